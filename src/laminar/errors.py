"""Errors, by the boundary that was crossed.

A `UserError` is something the user can mend: it is shown as one message, never as a traceback.
Everything else that escapes is a fault of the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


class LaminarError(Exception):
    """Base of all errors that Laminar raises on purpose."""


class UserError(LaminarError):
    """Bad input. Says what is wrong, where, what was expected, what was found, how to mend it."""

    def __init__(
        self,
        what: str,
        *,
        where: str | None = None,
        expected: str | None = None,
        got: str | None = None,
        fix: str | None = None,
    ) -> None:
        self.what, self.where, self.expected, self.got, self.fix = what, where, expected, got, fix
        lines = [what if where is None else f"{where}: {what}"]
        lines += [
            f"  {label}: {text}"
            for label, text in (("expected", expected), ("got", got), ("fix", fix))
            if text is not None
        ]
        super().__init__("\n".join(lines))


class ConfigError(UserError):
    """A key, a value, or a combination that the config may not have."""


class DataError(UserError):
    """A dataset, a row, or a prompt that can't be used."""


class RewardError(UserError):
    """A reward function that can't be found, called, or believed."""


class UserCodeError(UserError):
    """A sampler, advantage or loss of the user's that can't be found, called, or believed."""


class ModelError(UserError):
    """A model folder that can't be used."""


class StorageError(UserError):
    """A run folder, a disk, or shared memory that can't be used."""


class WeightsError(LaminarError):
    """Weights that are not what their version says (fingerprint or golden prompt)."""


class VersionGone(WeightsError):
    """The slot has been taken for a newer version; ask for the newest."""


class EngineError(LaminarError):
    """The engine could not do what it was asked."""


class ProtocolError(LaminarError):
    """A message that no correct process sends."""


class IllegalTransition(ProtocolError):
    """A lifecycle was asked for a step that its table does not have. Nothing was changed."""


class RunFailed(LaminarError):
    """The run can't go on. The message is for the user; details are in `logs/`."""


# ---------------------------------------------------------------- failures as data


@dataclass(frozen=True, slots=True)
class FailureKind:
    """What goes wrong at one boundary of a run, and what is done about it: a row of the table in docs/faults.md."""

    policy: str
    """`retry n, then drop`, `drop`, `fail`, or a choice of them"""
    key: str | None
    """That sets the policy, or how often it is tried again."""
    reasons: tuple[str, ...] = ()
    """Of the drops in the ledger; none where nothing is dropped."""


FAILURES: Mapping[str, FailureKind] = {
    "prompt": FailureKind("drop, truncate or fail", "data.overlong_prompt", ("prompt_overlong",)),
    "engine": FailureKind("retry n, then drop", "rollout.engine_retries", ("engine_error",)),
    "reward": FailureKind(
        "retry once, then drop, fail or a reward",
        "reward.on_failure",
        ("reward_error", "reward_timeout", "reward_none"),
    ),
    "weights": FailureKind("retry once, then fail; drop an evaluation", None, ("version_gone",)),
    "trainer": FailureKind("retry once, then drop", None, ("trainer_error",)),
    "storage": FailureKind("fail", None),
    "control": FailureKind("retry n, then fail; drop an evaluation", "faults.max_restarts", ("interrupted",)),
}
"""By the boundary that was crossed. Other reasons of the ledger are no failures: they follow from one (a group that has
become too small), from a filter, or from the end of the run. Those with reasons are counted, `failures/<boundary>` in
the metrics."""

BOUNDARY: Mapping[str, str] = {reason: name for name, kind in FAILURES.items() for reason in kind.reasons}
"""The boundary of each reason that is a failure."""
