from __future__ import annotations

import os
from pathlib import Path

import pytest

from laminar.errors import StorageError, WeightsError
from laminar.types import Version
from laminar.weights import VersionLog, VersionRecord

RECORDS = [
    VersionRecord(Version(0, 0), "aa"),
    VersionRecord(Version(0, 1), "bb"),
    VersionRecord(Version(1, 1), "cc"),
    VersionRecord(Version(0, 2), "dd"),
]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "versions.jsonl"


def filled(path: Path) -> VersionLog:
    log = VersionLog(path)
    for record in RECORDS:
        log.append(record)
    return log


def test_records_are_kept_in_order_and_found(path: Path) -> None:
    filled(path)
    log = VersionLog(path)
    assert log.records() == tuple(RECORDS)
    assert log.newest() == RECORDS[2], "a higher lineage is newer whatever its number"
    assert log.find(Version(0, 1)) == RECORDS[1]
    assert log.find(Version(0, 9)) is None


def test_a_run_without_versions(path: Path) -> None:
    log = VersionLog(path)
    assert (log.records(), log.newest(), log.find(Version(0, 0))) == ((), None, None)


def test_a_reader_sees_what_is_appended_later(path: Path) -> None:
    reader = VersionLog(path)
    assert reader.find(RECORDS[0].version) is None
    writer = VersionLog(path)
    for count, record in enumerate(RECORDS, start=1):
        writer.append(record)
        assert reader.records() == tuple(RECORDS[:count])


def test_a_replayed_version_gets_no_second_record(path: Path) -> None:
    before = (filled(path).path).read_bytes()
    VersionLog(path).append(RECORDS[1])
    assert path.read_bytes() == before


def test_one_version_with_two_fingerprints_is_refused(path: Path) -> None:
    log = filled(path)
    with pytest.raises(WeightsError, match="new lineage"):
        log.append(VersionRecord(Version(0, 1), "other"))
    assert log.records() == tuple(RECORDS)


def test_a_record_is_on_disk_before_readers_see_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Protocol: the record is fsynced before any relay shows the version."""
    reader = VersionLog(path)
    seen_at_sync: list[int] = []
    real_fsync = os.fsync

    def fsync(fd: int) -> None:
        seen_at_sync.append(len(reader.records()))
        real_fsync(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    VersionLog(path).append(RECORDS[0])
    assert seen_at_sync[0] == 0
    assert len(reader.records()) == 1


LINE = RECORDS[-1].to_json().encode()


@pytest.mark.parametrize("length", range(1, len(LINE)))
def test_a_torn_last_line_is_left_out_and_then_cut_off(path: Path, length: int) -> None:
    """A writer killed at any byte of a record."""
    for record in RECORDS[:-1]:
        VersionLog(path).append(record)
    whole = path.read_bytes()
    path.write_bytes(whole + LINE[:length])

    reader = VersionLog(path)
    assert reader.records() == tuple(RECORDS[:-1])
    assert path.read_bytes() == whole + LINE[:length], "a reader changes nothing"
    VersionLog(path).append(RECORDS[-1])
    assert path.read_bytes() == whole + LINE + b"\n"
    assert reader.records() == tuple(RECORDS)


def test_a_record_that_lost_only_its_newline_is_completed(path: Path) -> None:
    filled(path)
    text = path.read_bytes()
    path.write_bytes(text[:-1])
    log = VersionLog(path)
    log.repair()
    assert path.read_bytes() == text
    assert log.records() == tuple(RECORDS)


@pytest.mark.parametrize("bad", [b"{}", b"not json", b"\x00\x00", b"[1]", b'{"version": "x", "lineage": 0}', b""])
def test_a_bad_line_in_the_middle_is_one_clear_error(path: Path, bad: bytes) -> None:
    good = RECORDS[0].to_json().encode()
    path.write_bytes(good + b"\n" + bad + b"\n" + good + b"\n")
    with pytest.raises(StorageError, match=rf"line at byte {len(good) + 1} .*") as caught:
        VersionLog(path).records()
    assert str(path) in str(caught.value)


def test_a_file_that_can_not_be_written_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="can't be written"):
        VersionLog(tmp_path / "missing" / "versions.jsonl").append(RECORDS[0])
