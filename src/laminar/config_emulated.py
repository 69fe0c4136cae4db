"""Emulated runs in the config: what follows from the profile, and what such a run can't have."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from laminar.errors import ConfigError
from laminar.timing import Profile, load_profile

if TYPE_CHECKING:
    from laminar.config import Config

EMULATED = "emulated"
SCHEDULES = ("laminar", "sync", "one_step", "stream", "partial")


def with_defaults(raw: Mapping[str, Any], default_profile: str) -> Mapping[str, Any]:
    """Raw config data of an emulated run with what it leaves out; of any other run as it is.

    Raises ConfigError if the profile can't be used.
    """
    sections = {name: raw.get(name, {}) for name in ("model", "data", "reward", "rollout", "train", "simulation")}
    if not all(isinstance(section, Mapping) for section in sections.values()):
        return raw
    if EMULATED not in (sections["rollout"].get("engine"), sections["train"].get("backend")):
        return raw
    simulation = sections["simulation"]
    profile = _profile(simulation.get("profile", default_profile))
    listed = _listed_train_gpus(raw, sections, profile)
    colocated = simulation.get("colocated", listed is not None and listed == raw.get("gpus"))
    total, rollout_gpus, train_gpus, replicas = _gpus(
        raw, sections["rollout"], sections["train"], profile, colocated is True, listed
    )
    defaults: dict[str, dict[str, Any]] = {
        "model": {"path": None},
        "data": {"train": None, "max_prompt_tokens": profile.prompt_tokens},
        "reward": {"functions": None},
        "rollout": {
            "max_new_tokens": profile.max_response_tokens,
            "max_num_seqs": profile.max_num_seqs,
            "kv_tokens": profile.kv_tokens,
            "gpus": rollout_gpus,
            "replicas": replicas,
        },
        "train": {"gpus": train_gpus},
        "simulation": {"colocated": colocated},
    }
    filled = {name: _filled(sections[name], values) for name, values in defaults.items()}
    return _filled(raw, {"gpus": total}) | filled


def _filled(table: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`none` is no value here: it is what the profile says."""
    return {**table, **{key: value for key, value in defaults.items() if table.get(key) in (None, "none")}}


def _profile(name: object) -> Profile:
    try:
        return load_profile(str(name))
    except ConfigError as error:
        where = "simulation.profile"
        raise ConfigError(error.what, where=where, expected=error.expected, got=error.got or str(name)) from None


def _listed_train_gpus(
    raw: Mapping[str, Any], sections: Mapping[str, Mapping[str, Any]], profile: Profile
) -> int | None:
    """Those that `simulation.splits` has for this schedule and so many GPUs, unless another key says it.

    The nearest row counts, by ratio; with another total its share, such that the other GPUs are whole replicas.
    """
    rollout, train, simulation = sections["rollout"], sections["train"], sections["simulation"]
    total, splits = raw.get("gpus"), simulation.get("splits", {})
    given = [rollout.get("gpus"), train.get("gpus"), rollout.get("replicas"), simulation.get("colocated")]
    if any(value not in (None, "none") for value in given) or not isinstance(total, int):
        return None
    with suppress(AttributeError, TypeError, ValueError, ZeroDivisionError):  # a mistake: the rules of the key tell it
        rows = splits.get(raw.get("schedule", "laminar"), ())
        whole, part = min(rows, key=lambda row: max(row[0] / total, total / row[0]), default=(1, 0))
        share = total * part // whole
        return None if share == 0 else share + (total - share) % profile.gpus_per_replica
    return None


def _gpus(
    raw: Mapping[str, Any],
    rollout: Mapping[str, Any],
    train: Mapping[str, Any],
    profile: Profile,
    colocated: bool,
    listed: int | None,
) -> tuple[Any, Any, Any, Any]:
    """All GPUs, those of the replicas, those of the trainer, and the replicas.

    What is not given: the `listed` GPUs train, else half of them. If they are `colocated`, both have all.
    """
    given = raw.get("gpus"), rollout.get("gpus"), train.get("gpus")
    total, ours, theirs = (None if value == "none" else value for value in given)
    replicas = rollout.get("replicas", 1)
    if not all(isinstance(value, int) for value in (total, ours, theirs, replicas) if value is not None):
        return total, ours, theirs, replicas  # a mistake, which is told by the types of the fields
    if colocated:
        shared = next((value for value in (total, ours, theirs) if value is not None), None)
        if shared is None:
            shared = replicas * profile.gpus_per_replica
        replicas = rollout.get("replicas", max(1, shared // profile.gpus_per_replica))
        return (*(shared if value is None else value for value in (total, ours, theirs)), replicas)
    if ours is None:
        if total is None or "replicas" in rollout:
            ours = replicas * profile.gpus_per_replica
        else:
            ours = total - next(value for value in (theirs, listed, total // 2) if value is not None)
    if theirs is None:
        theirs = ours if total is None else total - ours
    replicas = rollout.get("replicas", max(1, ours // profile.gpus_per_replica))
    return ours + theirs if total is None else total, ours, theirs, replicas


def broken_rules(config: Config) -> Iterator[ConfigError]:
    """Rules between the keys of emulated runs, and keys that only such runs have."""
    engine, backend = config.rollout.engine, config.train.backend
    if (engine == EMULATED) != (backend == EMULATED):
        yield ConfigError(
            "an emulated engine and an emulated trainer need each other",
            where="train.backend",
            expected=f'"{engine}", as rollout.engine',
            got=f'"{backend}"',
        )
    elif engine == EMULATED:
        yield from _broken_emulated_rules(config)
    else:
        for key, gpus, threads in (
            ("gpus", config.gpus, "train.threads and rollout.threads"),
            ("rollout.gpus", config.rollout.gpus, "rollout.threads"),
            ("train.gpus", config.train.gpus, "train.threads"),
        ):
            if gpus is not None:
                why = "this version does not place processes on GPUs; the key is for emulated runs"
                yield ConfigError(why, where=key, got=str(gpus), fix=f"use {threads}")


def _broken_emulated_rules(config: Config) -> Iterator[ConfigError]:
    profile = load_profile(config.simulation.profile)
    if profile.tool_calls:
        yield ConfigError(
            "the emulated engine calls no tools", where="simulation.profile", expected="a profile with tool_calls = 0"
        )
    for key, value in (("data.epochs", config.data.epochs), ("data.eval", config.data.eval)):
        if value is not None:
            yield ConfigError(
                "an emulated run has no dataset", where=key, got=str(value), fix="remove it; set iterations"
            )
    for key, value in (("train.advantage", config.train.advantage), ("train.loss", config.train.loss)):
        if value is not None:
            yield ConfigError("an emulated run has no loss", where=key, got=value, fix="remove it")
    for schedule, rows in config.simulation.splits.items():
        for row in rows:
            if schedule not in SCHEDULES or len(row) != 2 or not 0 < row[1] <= row[0]:
                yield ConfigError(
                    "is no split",
                    where=f"simulation.splits.{schedule}",
                    expected=f"[all GPUs, those of them that train] by schedule: {', '.join(SCHEDULES)}",
                    got=str(row),
                )
    if config.simulation.colocated and config.schedule != "sync":
        yield ConfigError(
            "shared GPUs can't train while they generate",
            where="simulation.colocated",
            expected='schedule = "sync"',
            got=f'"{config.schedule}"',
        )
    expected = config.rollout.replicas * profile.gpus_per_replica
    if config.rollout.gpus != expected:
        yield ConfigError(
            "does not fit the replicas",
            where="rollout.gpus",
            expected=f"{expected}: rollout.replicas x {profile.gpus_per_replica} of profile {profile.name}",
            got=str(config.rollout.gpus),
        )
    elif config.simulation.colocated:
        if not config.gpus == expected == config.train.gpus:
            yield ConfigError(
                "colocated: trainer and replicas have the same GPUs",
                where="gpus",
                expected=f"gpus = rollout.gpus = train.gpus, {expected}",
                got=f"{config.gpus}, {config.rollout.gpus}, {config.train.gpus}",
            )
    elif config.gpus != expected + (config.train.gpus or 0):
        yield ConfigError(
            "is not the sum of its parts",
            where="gpus",
            expected=f"rollout.gpus + train.gpus, {expected} + {config.train.gpus}",
            got=str(config.gpus),
        )
