"""Who is there: silence and stuck engines, judged by the manager's own receipt clock.

A manager that was itself paused must not declare everybody dead, so the length of an unusual gap between two ticks is
added to every deadline.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from laminar.control import ledger
from laminar.control.state import Process
from laminar.types import Settings

LONGEST_TICK_S = 1.0
"""A gap between ticks beyond this is time that the manager itself lost."""


@dataclass(frozen=True, slots=True)
class Verdict:
    process: Process
    state: str
    reason: str


def lost_time(gap_s: float) -> float:
    """Seconds by which a gap between two ticks is too long: the manager was away."""
    return max(0.0, gap_s - LONGEST_TICK_S)


def forgive(now: float, processes: Iterable[Process], lost_s: float) -> None:
    """Extend all deadlines by time that the manager lost; what was heard since then stays heard at most now."""
    for process in processes:
        process.heard = min(now, process.heard + lost_s)
        process.moved = min(now, process.moved + lost_s)


def judge(now: float, processes: Iterable[Process], settings: Settings) -> list[Verdict]:
    """Move processes to `suspect` and say which are to be taken for dead, with the reason.

    Importing a library or laying out weights can keep all threads of a process from speaking, so one that has never
    been heard, or has said that it loads what it begins with, has longer: `start_timeout_s`.
    """
    verdicts = []
    for process in processes:
        if process.role == "manager" or process.state not in ("starting", "alive", "suspect"):
            continue  # the driver judges the manager
        silent, stuck = now - process.heard, now - process.moved
        if process.state == "starting" or process.loading:
            if silent > settings.start_timeout_s:
                verdicts.append(Verdict(process, "dead", f"it has not come up within {settings.start_timeout_s:g} s"))
        elif silent > settings.dead_after_s:
            verdicts.append(Verdict(process, "dead", f"silent for {silent:.1f} s"))
        elif process.role == "replica" and stuck > settings.dead_after_s:
            verdicts.append(Verdict(process, "dead", f"its engine has not moved for {stuck:.1f} s though it has work"))
        elif process.state == "alive" and silent > settings.suspect_after_s:
            process.state = ledger.step(ledger.PROCESS, process.state, "silence", process.name)
            verdicts.append(Verdict(process, "suspect", f"silent for {silent:.1f} s"))
    return verdicts
