"""Errors, by the boundary that was crossed.

A `UserError` is something the user can mend: it is shown as one message, never as a traceback.
Everything else that escapes is a fault of the run.
"""

from __future__ import annotations


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
