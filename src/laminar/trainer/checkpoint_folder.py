"""Folders of checkpoints, whoever fills them: each is whole or not there.

A folder is written under a temporary name, synced, and renamed; its last file lists the digests of the others,
so that a folder which is torn all the same (a disk that lied, a copy that broke off) is known and passed over.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import xxhash
from safetensors import SafetensorError

from laminar.errors import StorageError

STATE = "state.json"
_NUMBERED = re.compile(r"\d{6,}")


def write(
    folder: Path, number: int, fill: Callable[[Path], None], record: Mapping[str, object], *, keep: int = 2
) -> Path:
    """Write checkpoint `number` durably, then remove all but the newest `keep`.

    Args:
        folder: of all checkpoints, made if missing
        number: of the version
        fill: writes the checkpoint's files into an empty folder
        record: what `read_record` gives back
        keep: checkpoints left in the folder, this one included

    Raises:
        StorageError: it can't be written
    """
    target = folder / f"{number:06d}"
    temporary = folder / f".{target.name}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        fill(temporary)
        _seal(temporary, record)
        shutil.rmtree(target, ignore_errors=True)  # a torn one: what is whole was loaded, and never comes again
        temporary.rename(target)
        _sync(folder)
        _remove_older(folder, keep)
    except (OSError, SafetensorError) as error:
        raise StorageError("the checkpoint can't be written", where=str(target), got=str(error)) from error
    return target


def newest(folder: Path) -> Path | None:
    """Newest whole checkpoint of the folder, or None. Torn ones and leftovers are passed over."""
    return next((path for path in reversed(_numbered(folder)) if is_whole(path)), None)


def is_whole(path: Path) -> bool:
    """Whether every file of a checkpoint is there with the content it was written with."""
    try:
        digests = json.loads((path / STATE).read_text())["files"]
        return all(_digest(path / name) == digest for name, digest in digests.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def read_record(path: Path) -> dict[str, Any]:
    """The record of a whole checkpoint."""
    record: dict[str, Any] = json.loads((path / STATE).read_text())
    return record


def _seal(folder: Path, record: Mapping[str, object]) -> None:
    files = {path.name: _digest(path) for path in sorted(folder.iterdir())}
    (folder / STATE).write_text(json.dumps({**record, "files": files}, indent=1))
    for path in folder.iterdir():
        _sync(path)
    _sync(folder)


def _numbered(folder: Path) -> list[Path]:
    """Checkpoint folders, whole or not, the oldest first."""
    paths = folder.iterdir() if folder.is_dir() else iter(())
    return sorted((path for path in paths if _NUMBERED.fullmatch(path.name)), key=lambda path: int(path.name))


def _remove_older(folder: Path, keep: int) -> None:
    for path in _numbered(folder)[:-keep]:
        shutil.rmtree(path)


def _digest(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        while piece := file.read(1 << 22):
            digest.update(piece)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
