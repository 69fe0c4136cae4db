"""Sweeps up after a driver: a process that outlives it, kills what it left, and frees its shared memory.

Runs as a script without imports beyond the standard library: `python guard.py PID TAG FOLDER...`. It waits for the end
of process PID, however that comes, then kills every process that carries `LAMINAR_RUN=TAG` in its environment and
removes the folders.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import sys
import time

MARK = "LAMINAR_RUN"
SWEEP_S = 8.0


def marked(tag: str) -> list[int]:
    """Processes whose environment says that they belong to the run, this one not counted."""
    wanted = f"{MARK}={tag}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as environ, open(f"/proc/{entry}/stat", "rb") as stat:
                is_zombie = stat.read().rpartition(b")")[2].split()[0] == b"Z"
                if wanted in environ.read().split(b"\0") and not is_zombie:
                    found.append(int(entry))
        except OSError:
            continue
    return found


def kill_marked(tag: str, spare: int = 0) -> None:
    """SIGKILL all of them, until none is left or SWEEP_S have passed. `spare`: a pid to leave alone."""
    deadline = time.monotonic() + SWEEP_S
    while (pids := [p for p in marked(tag) if p != spare]) and time.monotonic() < deadline:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)


def main() -> None:
    pid, tag, folders = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    try:
        driver = os.pidfd_open(pid)
        select.select([driver], [], [])
    except ProcessLookupError:
        pass
    kill_marked(tag)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
