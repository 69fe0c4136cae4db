"""Which version some weights are: the rule of lineages, pure.

A trainer that died trains the standing cuts again. If that gives the recorded weights, they are the recorded
version. If not (a trainer that is not deterministic), the same number would name two sets of weights: then the
lineage is raised by one, and holds from there on.
"""

from __future__ import annotations

from collections.abc import Iterable

from laminar.types import Version


class Records:
    """The versions that were ever recorded, with their fingerprints; a higher lineage supersedes a lower one."""

    def __init__(self, records: Iterable[tuple[Version, str]]) -> None:
        self._fingerprints = dict(records)

    @property
    def highest_number(self) -> int | None:
        """The highest number in any lineage: samples may exist that were issued under it."""
        return max((version.number for version in self._fingerprints), default=None)

    def next_version(self, number: int) -> Version | None:
        """Version of weights after `number` iterations if nothing was ever recorded for that many; else None."""
        highest = self.highest_number
        if highest is not None and number <= highest:
            return None
        newest = max(self._fingerprints, default=Version(0, 0))
        return Version(newest.lineage, number)

    def identify(self, number: int, fingerprint: str) -> tuple[Version, bool]:
        """Version of weights after `number` iterations, and whether it has to be recorded.

        The record that stands for a number is that of the highest lineage which has one. Beyond the newest
        version nothing stands, and the newest lineage goes on.
        """
        newest = max(self._fingerprints, default=None)
        if newest is None:
            return Version(0, number), True
        if number > newest.number:
            return Version(newest.lineage, number), True
        standing = max((version for version in self._fingerprints if version.number == number), default=None)
        if standing is None:
            return Version(newest.lineage, number), True
        if self._fingerprints[standing] == fingerprint:
            return standing, False
        return Version(newest.lineage + 1, number), True

    def add(self, version: Version, fingerprint: str) -> None:
        self._fingerprints[version] = fingerprint
