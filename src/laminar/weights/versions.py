"""The durable list of all versions: `versions.jsonl` of the run folder.

Owns the form of the file. One process (the trainer) appends; any number read. No locks: the newline at the end of a
record is written after the record is on disk, and readers take only lines that end. So they never learn of a
version that a power failure could take back, and a stopped reader or writer delays nobody.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from laminar.errors import StorageError, WeightsError
from laminar.types import Version


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """One version that exists, or existed."""

    version: Version
    fingerprint: str
    kind: str = "full"
    """How the version is stored; `full` = all tensors."""

    def to_json(self) -> str:
        return json.dumps(
            {
                "version": self.version.number,
                "lineage": self.version.lineage,
                "fingerprint": self.fingerprint,
                "kind": self.kind,
            }
        )

    @classmethod
    def from_json(cls, text: str) -> VersionRecord:
        """Raises `ValueError`, `KeyError` or `TypeError` if the text is no record."""
        fields = json.loads(text)
        return cls(Version(int(fields["lineage"]), int(fields["version"])), fields["fingerprint"], fields["kind"])


class VersionLog:
    """Reads and extends one `versions.jsonl`. The file may not exist yet."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._records: dict[Version, VersionRecord] = {}
        self._read_bytes = 0
        self._repaired = False

    def repair(self) -> None:
        """Ends or cuts off a last line that a dead writer left without its newline. Only for the writer.

        A line that holds a whole record is ended (a power failure may have taken just its newline, after somebody
        saw it); a torn one is cut off. The first `append` does this too.
        """
        self._repaired = True
        if not self.path.exists():
            return
        with self.path.open("r+b") as file:
            text = file.read()
            whole = text.rfind(b"\n") + 1
            if whole == len(text):
                return
            if _is_record(text[whole:]):
                file.write(b"\n")
            else:
                file.truncate(whole)
            os.fsync(file.fileno())

    def append(self, record: VersionRecord) -> None:
        """Makes the record durable, then visible. A record that is there already is not written again.

        Raises:
            WeightsError: the version was recorded with another fingerprint; it needs a new lineage.
            StorageError: the file can't be written.
        """
        try:
            if not self._repaired:
                self.repair()
            known = self.find(record.version)
            if known == record:
                return
            if known is not None:
                raise WeightsError(
                    f"version {record.version} was recorded with fingerprint {known.fingerprint} and now has "
                    f"{record.fingerprint}; other weights need a new lineage"
                )
            is_new = not self.path.exists()
            with self.path.open("ab", buffering=0) as file:
                for text in (record.to_json().encode(), b"\n"):
                    file.write(text)
                    os.fsync(file.fileno())
            if is_new:
                _sync_folder(self.path.parent)
        except OSError as error:
            self._repaired = False
            raise StorageError(
                "the record of a new version can't be written",
                where=str(self.path),
                got=str(error),
                fix="free space on that disk and resume the run",
            ) from error

    def records(self) -> tuple[VersionRecord, ...]:
        """All records in the order they were made.

        Raises:
            StorageError: a line is not a record.
        """
        self._read_new()
        return tuple(self._records.values())

    def newest(self) -> VersionRecord | None:
        """The record of the highest version, or None if there is none."""
        return max(self.records(), key=lambda record: record.version, default=None)

    def find(self, version: Version) -> VersionRecord | None:
        """The record of this version, or None if there is none (yet)."""
        if version not in self._records:
            self._read_new()
        return self._records.get(version)

    def _read_new(self) -> None:
        """Takes in the lines that were ended since the last time."""
        try:
            with self.path.open("rb") as file:
                file.seek(self._read_bytes)
                text = file.read()
        except FileNotFoundError:
            return
        for line in text[: text.rfind(b"\n") + 1].split(b"\n")[:-1]:
            if not _is_record(line):
                raise StorageError(
                    f"the line at byte {self._read_bytes} is not the record of a version",
                    where=str(self.path),
                    expected=VersionRecord(Version(0, 1), "...").to_json(),
                    got=repr(line[:80])[1:],
                    fix="restore the file from a copy; without it the versions of the run can't be told apart",
                )
            record = VersionRecord.from_json(line.decode())
            self._records[record.version] = record
            self._read_bytes += len(line) + 1


def _is_record(line: bytes) -> bool:
    try:
        VersionRecord.from_json(line.decode())
    except (ValueError, KeyError, TypeError):
        return False
    return True


def _sync_folder(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
