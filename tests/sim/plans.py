"""Plans whose times can be worked out by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from laminar.sim.plan import Delays, Plan
from laminar.timing import Profile, load_profile
from laminar.types import Settings

LENGTH = 50
B, SIZE = 2, 4
TOY = load_profile("toy")
EQUAL = replace(TOY, response_quantiles=((0.0, float(LENGTH)), (1.0, float(LENGTH))), reward_s=0.0)
"""The toy profile with responses of one length, and rewards at once."""
AT_ONCE = Delays(coalesce_s=0.0, exchange_s=0.0, poll_s=0.0, beat_s=0.0)
BOUNDS = {"sync": 0, "one_step": 1, "stream": 1}
SCHEDULES = ("sync", "one_step", "stream", "partial", "laminar")


def make_settings(schedule: str = "laminar", **changes: Any) -> Settings:
    """Two groups of four a batch."""
    k = BOUNDS.get(schedule, 2)
    plain = Settings(
        schedule=schedule,
        max_staleness=k,
        iterations=6,
        groups_per_batch=B,
        group_size=SIZE,
        min_group_size=2,
        num_mini_batches=2,
        max_outstanding_groups=B * (k + 1),
        groups_in_flight=B,
    )
    return replace(plain, **changes)


def by_hand(schedule: str, profile: Profile = EQUAL, **changes: Any) -> Plan:
    """One replica, one machine, messages that take no time."""
    return replace(Plan(make_settings(schedule), profile, one_machine=True, delays=AT_ONCE), **changes)


def generation_s(profile: Profile = EQUAL, sequences: int = B * SIZE) -> float:
    """All sequences of a batch at once: prefill, then a step a token, each a bit longer than the last."""
    held = sequences * (profile.prompt_tokens + LENGTH / 2)
    return profile.prefill_s(sequences * profile.prompt_tokens) + LENGTH * profile.decode_step_s(sequences, held)


def training_s(profile: Profile = EQUAL, gpus: int = 1) -> float:
    return profile.train_step_s(B * SIZE * (profile.prompt_tokens + LENGTH), 2, gpus)
