"""What a user asks of a run that is going on: a file each in the run folder, taken by the run's driver.

A file works wherever the folder is seen, needs no port and no password, and outlives a driver that is killed just then.
"""

from __future__ import annotations

import json
import time

from laminar.control import codec
from laminar.control.events import DrainRequested, ScaleRequested
from laminar.errors import ConfigError, StorageError
from laminar.run_folder import RunFolder, is_running, read_json, write_atomic, writing

TAKEN_WITHIN_S = 10.0
"""A driver that lives looks several times a second."""

Request = DrainRequested | ScaleRequested


def send(folder: RunFolder, request: Request, within_s: float = TAKEN_WITHIN_S) -> None:
    """Ask, and wait until the driver has it.

    Raises StorageError if the run is not going on, ConfigError if it can't do what is asked.
    """
    rows = read_json(folder.processes, {"processes": []})["processes"]
    if not any(row["role"] == "driver" and is_running(row["pid"]) for row in rows):
        raise StorageError(
            "this run is not going on", where=str(folder.path), fix=f"laminar train --resume {folder.path}"
        )
    replicas = [row["id"] for row in rows if row["role"] == "replica" and is_running(row["pid"])]
    if isinstance(request, DrainRequested) and request.replica not in replicas:
        raise ConfigError("no such replica", where=str(folder.path), got=request.replica, expected=", ".join(replicas))
    if isinstance(request, DrainRequested) and len(replicas) == 1:
        raise ConfigError("the last replica can't leave", got=request.replica, fix="stop the run with Ctrl-C instead")
    with writing(folder.requests):
        folder.requests.mkdir(exist_ok=True)
    path = folder.requests / f"{time.time_ns()}.json"
    write_atomic(path, json.dumps(codec.encode(request)))
    deadline = time.monotonic() + within_s
    while path.exists():
        if time.monotonic() > deadline:
            path.unlink(missing_ok=True)
            raise StorageError(f"the driver has not answered for {within_s:g} s", where=str(folder.path))
        time.sleep(0.05)


def take(folder: RunFolder) -> list[Request]:
    """The requests that have come, oldest first; they are gone then."""
    found: list[Request] = []
    for path in sorted(folder.requests.glob("*.json")):
        found.append(codec.decode(json.loads(path.read_text(encoding="utf-8"))))
        path.unlink()
    return found
