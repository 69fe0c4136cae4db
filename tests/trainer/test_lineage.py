"""Numbering of weights that were trained again."""

from __future__ import annotations

import pytest

from laminar.trainer.lineage import Records
from laminar.types import Version

LINE_0 = [(Version(0, n), f"a{n}") for n in range(7)]
LINE_1 = [(Version(1, n), f"b{n}") for n in range(4, 6)]
LINE_2 = [(Version(2, n), f"c{n}") for n in range(2, 3)]


@pytest.mark.parametrize(
    ("records", "number", "fingerprint", "expected"),
    [
        ([], 0, "a0", (Version(0, 0), True)),
        (LINE_0, 7, "a7", (Version(0, 7), True)),
        (LINE_0, 3, "a3", (Version(0, 3), False)),
        (LINE_0, 3, "x", (Version(1, 3), True)),
        (LINE_0 + LINE_1, 3, "a3", (Version(0, 3), False)),
        (LINE_0 + LINE_1, 4, "b4", (Version(1, 4), False)),
        (LINE_0 + LINE_1, 4, "a4", (Version(2, 4), True)),  # lineage 1 stands for 4: going back to 0 is no way
        (LINE_0 + LINE_1, 6, "a6", (Version(1, 6), True)),  # beyond the newest, lineage 1 goes on
        (LINE_0 + LINE_1 + LINE_2, 2, "c2", (Version(2, 2), False)),
        (LINE_0 + LINE_1 + LINE_2, 4, "b4", (Version(2, 4), True)),
    ],
)
def test_identify(
    records: list[tuple[Version, str]], number: int, fingerprint: str, expected: tuple[Version, bool]
) -> None:
    """Protocol section 6."""
    assert Records(records).identify(number, fingerprint) == expected


def test_highest_number_counts_all_lineages() -> None:
    assert Records(LINE_0 + LINE_1 + LINE_2).highest_number == 6
    assert Records([]).highest_number is None
