"""What the commands say about a run, read from its folder: beside a live run as well as after it.

Each function returns the object that `--json` prints.
"""

from __future__ import annotations

import json
import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from laminar.control import codec, manager
from laminar.control.manager import Record
from laminar.data import schema
from laminar.errors import ConfigError, StorageError
from laminar.plot import Line, Panel, chart
from laminar.run_folder import RunFolder, is_running, read_json, read_jsonl
from laminar.types import Settings

if TYPE_CHECKING:
    from laminar.sim.planner import Found, Outcome
    from laminar.sim.report import Step

Json = dict[str, Any]


def open_run(path: Path) -> RunFolder:
    """Raises StorageError unless `path` is the folder of a run."""
    folder = RunFolder(path)
    folder.expect_run()
    return folder


# ---------------------------------------------------------------- ledger


def ledger(folder: RunFolder) -> Json:
    """Where every sample and group went, and what contradicts the rules.

    Closed: dispatched = trained + dropped + in flight, for samples and groups, of training and of evaluation, and no
    violation. Counts come from the rows; what is checked against them comes from the counters and the cuts.
    """
    with closing(schema.connect_read_only(folder.database)) as db:
        return _ledger(db, folder)


def _ledger(db: sqlite3.Connection, folder: RunFolder) -> Json:
    db.execute("BEGIN")  # one moment for all queries, though the run goes on beside
    counters = json.loads(schema.get_meta(db, "counters", "{}"))
    samples, groups = (_counts(db, what, "train") for what in ("samples", "groups"))
    evaluation = {what: _counts(db, what, "eval") for what in ("samples", "groups")}
    violations = [
        *_count_violations(db, counters, groups),
        *_cut_violations(db),
        *_state_violations(db),
        *_bound_violations(db, folder),
    ]
    balanced = all(
        c["dispatched"] == c["trained"] + sum(c["dropped"].values()) + c["in_flight"]
        for c in (samples, groups, *evaluation.values())
    )
    starts = int(schema.get_meta(db, "starts", "1"))
    return {
        "samples": samples,
        "groups": groups,
        "eval": evaluation,
        "restarts": starts - 1,
        "replayed_cuts": int(schema.get_meta(db, "replayed_cuts", "0")),
        "closed": balanced and not violations,
        "violations": violations,
    }


def _counts(db: sqlite3.Connection, what: str, kind: str) -> Json:
    table = (
        "samples s JOIN groups g ON g.id = s.group_id" if what == "samples" else "groups s JOIN groups g ON g.id = s.id"
    )
    states: Counter[str] = Counter()
    dropped: Counter[str] = Counter()
    for state, reason, count in db.execute(
        f"SELECT s.state, s.reason, COUNT(*) FROM {table} WHERE g.kind = ? GROUP BY s.state, s.reason", (kind,)
    ):
        states[state] += count
        if state == "dropped":
            dropped[str(reason)] += count
    return {
        "dispatched": states.total(),
        "trained": states["trained"],
        "dropped": dict(sorted(dropped.items())),
        "in_flight": states.total() - states["trained"] - states["dropped"],
    }


def _count_violations(db: sqlite3.Connection, counters: Json, groups: Json) -> Iterator[str]:
    if groups["dispatched"] != counters.get("cursor", 0):
        yield f"{counters.get('cursor', 0)} prompts were drawn, but {groups['dispatched']} groups are on record"
    (distinct,) = db.execute("SELECT COUNT(DISTINCT cursor) FROM groups WHERE kind = 'train'").fetchone()
    if distinct != groups["dispatched"]:
        yield f"{groups['dispatched'] - distinct} draws of the prompt pool were used twice"


def _cut_violations(db: sqlite3.Connection) -> Iterator[str]:
    seen: dict[int, int] = {}
    for update, text, trained in db.execute("SELECT batch, groups, trained FROM cuts ORDER BY batch, part"):
        for group in json.loads(text):
            if group in seen:
                yield f"group {group} is in cut {seen[group]} and in cut {update}"
            seen[group] = update
            row = db.execute("SELECT state, batch FROM groups WHERE id = ?", (group,)).fetchone()
            allowed = ("trained",) if trained else ("cut",)
            if row is None or row[0] not in allowed or row[1] != update:
                yield f"group {group} of cut {update} is on record as {None if row is None else tuple(row)}"
    for (group,) in db.execute("SELECT id FROM groups WHERE kind = 'train' AND state IN ('cut', 'trained')"):
        if group not in seen:
            yield f"group {group} was trained but is in no cut"
    trained = [u for (u,) in db.execute("SELECT DISTINCT batch FROM cuts WHERE trained ORDER BY batch")]
    rows = [v for (v,) in db.execute("SELECT version FROM metrics ORDER BY version")]
    if rows != [u + 1 for u in trained] or trained != list(range(len(trained))):
        yield f"trained cuts {trained} do not match the metric rows {rows}"


def _state_violations(db: sqlite3.Connection) -> Iterator[str]:
    for group, idx, sample, state in db.execute(
        "SELECT group_id, idx, s.state, g.state FROM samples s JOIN groups g ON g.id = s.group_id WHERE "
        "(g.state = 'trained' AND s.state NOT IN ('trained', 'dropped')) "
        "OR (g.state = 'dropped' AND s.state <> 'dropped') "
        "OR (s.state = 'trained' AND g.state <> 'trained') OR (s.state = 'dropped' AND s.reason IS NULL)"
    ):
        yield f"sample {group}/{idx} is {sample} in a group that is {state}"
    for group, idx, length, stored in db.execute(
        "SELECT s.group_id, s.idx, s.length, SUM(LENGTH(c.mask)) FROM samples s JOIN chunks c "
        "ON c.group_id = s.group_id AND c.idx = s.idx GROUP BY s.group_id, s.idx HAVING SUM(LENGTH(c.mask)) <> s.length"
    ):
        yield f"sample {group}/{idx} has {length} tokens on record and {stored} stored"


def _bound_violations(db: sqlite3.Connection, folder: RunFolder) -> Iterator[str]:
    settings = _newest_settings(folder)
    if settings is None or settings.max_staleness is None:
        return
    for group, idx, age in db.execute(
        "SELECT s.group_id, s.idx, g.batch - s.version FROM samples s JOIN groups g ON g.id = s.group_id "
        "WHERE s.state = 'trained' AND g.kind = 'train' AND g.batch - s.version > ?",
        (settings.max_staleness,),
    ):
        yield f"sample {group}/{idx} was trained at staleness {age}, the bound is {settings.max_staleness}"


# ---------------------------------------------------------------- processes, samples


def processes(folder: RunFolder) -> Json:
    """Roles, pids, states and versions; a process that is not there any more is `ended`."""
    rows = read_json(folder.processes, {"processes": []})["processes"]
    return {"processes": [row if is_running(row["pid"]) else row | {"state": "ended", "doing": None} for row in rows]}


def samples(
    folder: RunFolder,
    group: int | None = None,
    last: int | None = None,
    best: int | None = None,
    worst: int | None = None,
) -> Json:
    """Samples with their text, of one group or of the `last` groups; texts of old groups are gone (None).

    `best`, `worst`: of these, so many with the highest and the lowest reward, the best first, the worst last.
    """
    where, values = "1", []
    if group is not None:
        where, values = "g.id = ?", [group]
    elif last is not None:
        where, values = (
            "g.id IN (SELECT id FROM groups WHERE kind = 'train' AND prompt_text IS NOT NULL ORDER BY id DESC LIMIT ?)",
            [last],
        )
    query = (
        "SELECT g.id AS 'group', s.idx AS 'index', s.attempt, s.version, s.state, g.prompt_text AS prompt, "
        f"s.completion, s.reward FROM samples s JOIN groups g ON g.id = s.group_id WHERE {where}"
    )
    with closing(schema.connect_read_only(folder.database)) as db:
        if best is None and worst is None:
            rows = db.execute(f"{query} ORDER BY g.id, s.idx", values).fetchall()
        else:
            scored = f"{query} AND s.reward IS NOT NULL AND s.completion IS NOT NULL ORDER BY s.reward"
            rows = db.execute(f"{scored} DESC, g.id, s.idx LIMIT ?", [*values, best or 0]).fetchall()
            rows += db.execute(f"{scored}, g.id, s.idx LIMIT ?", [*values, worst or 0]).fetchall()[::-1]
        return {"samples": [dict(row) for row in rows]}


# ---------------------------------------------------------------- replay


def records(folder: RunFolder) -> Iterator[Record]:
    """What the managers of the run were told and what they answered, of all starts, in order."""
    for path in _logs(folder):
        yield from (codec.decode_record(row) for row in islice(read_jsonl(path), 1, None))


def replay(folder: RunFolder) -> Json:
    """Feed the recorded events to fresh managers; every difference in what they command is listed."""
    num_records = differences = 0
    lines: list[str] = []
    for path in _logs(folder):
        rows = read_jsonl(path)
        head = next(rows, None)
        if head is None:
            continue
        log = [codec.decode_record(row) for row in rows]
        num_records += len(log)
        for record, commands in manager.replay(Settings(**head["settings"]), log):
            differences += 1
            lines.append(_difference(path, record, commands))
    return {"records": num_records, "differences": differences, "agrees": differences == 0, "details": lines[:20]}


def _difference(path: Path, record: Record, commands: tuple[Any, ...]) -> str:
    said = json.dumps([codec.encode(c) for c in record.commands])
    says = json.dumps([codec.encode(c) for c in commands])
    return f"{path.name} at {record.now:.3f} s, {type(record.event).__name__}: recorded {said}, now {says}"


def _logs(folder: RunFolder) -> list[Path]:
    logs = sorted(folder.events.glob("*.jsonl"))
    if not logs:
        raise StorageError("the run has no event log", where=str(folder.events))
    return logs


def _newest_settings(folder: RunFolder) -> Settings | None:
    """Settings of the newest start: a bound may be raised by a resume, never lowered."""
    logs = sorted(folder.events.glob("*.jsonl"))
    head = next(read_jsonl(logs[-1]), None) if logs else None
    return None if head is None else Settings(**head["settings"])


# ---------------------------------------------------------------- summary


def summary(folder: RunFolder) -> str:
    """A finished run in a few lines: what came of it, and what to do next."""
    rows, evals = list(read_jsonl(folder.metrics)), list(read_jsonl(folder.evals))
    account = ledger(folder)
    lines = [f"run       {folder.path}"]
    if rows:
        first, last = rows[0].get("reward_mean"), rows[-1].get("reward_mean")
        if first is not None and last is not None:
            lines.append(f"reward    {first:.3f} -> {last:.3f} in {len(rows)} iterations, {rows[-1]['time_s']:.0f} s")
        lines.append(
            f"samples   {sum(r['num_samples'] for r in rows)} trained, {sum(r['num_tokens'] for r in rows)} tokens"
        )
    if len(evals) > 1 and evals[0]["eval_reward_mean"] is not None and evals[-1]["eval_reward_mean"] is not None:
        lines.append(
            f"eval      {evals[0]['eval_reward_mean']:.3f} (version {evals[0]['version']}) -> "
            f"{evals[-1]['eval_reward_mean']:.3f} (version {evals[-1]['version']}), on prompts that are not trained on"
        )
    dropped = ", ".join(f"{n} {reason}" for reason, n in account["samples"]["dropped"].items()) or "none"
    state = "closed" if account["closed"] else "NOT CLOSED: " + "; ".join(account["violations"][:3])
    lines.append(f"ledger    {state}; dropped: {dropped}")
    if folder.export.is_dir():
        lines.append(f"model     {folder.export}")
    lines.append(f"next      laminar samples {folder.path} --last 2")
    return "\n".join(lines)


# ---------------------------------------------------------------- simulated runs


def simulation_chart(steps: Sequence[Step]) -> str:
    """A simulated run by iteration, as SVG."""
    unit_s, unit = (60, "minutes") if steps[-1].ended_s > 300 else (1, "seconds")
    times = [step.began_s / unit_s for step in steps] + [steps[-1].ended_s / unit_s]
    figures = {
        "throughput, tokens/s": [step.throughput_tok_s for step in steps],
        "staleness at use, versions": [step.staleness_use for step in steps],
        "KV caches, % full": [100 * step.kv_utilization for step in steps],
    }
    panels = [
        Panel(title, [Line(list(zip(times, [*values, values[-1]], strict=True)))], unit, steps=True)
        for title, values in figures.items()
    ]
    return chart(panels, width=640, height=200)


# ---------------------------------------------------------------- plans


def plan_row(outcome: Outcome) -> Json:
    """One plan that was tried."""
    report = outcome.report
    return asdict(outcome.candidate) | {
        "iterations": outcome.iterations,
        "throughput_tok_s": report.throughput_tok_s,
        "staleness_use_mean": report.staleness_use.mean,
        "staleness_use_max": report.staleness_use.max,
        "trainer_busy_fraction": report.trainer_busy_fraction,
        "rollout_busy_fraction": report.rollout_busy_fraction,
    }


def plan_table(found: Found) -> Iterator[str]:
    """Everything that was tried, the fastest first."""
    yield (
        f"{'schedule':9}{'train GPUs':>11}{'replicas':>9}{'quota':>6}{'in flight':>10}{'admission':>10}"
        f"{'tokens/s':>11}{'staleness at use':>18}{'trainer busy':>13}{'rollout busy':>13}{'iterations':>11}"
    )
    for outcome in found.outcomes:
        c, r = outcome.candidate, outcome.report
        quota, in_flight = ("-" if value is None else f"{value:g}" for value in (c.quota, c.in_flight))
        stale = f"{r.staleness_use.mean:.2f} (max {r.staleness_use.max})"
        yield (
            f"{c.schedule:9}{c.train_gpus:>11}{c.replicas:>9}{quota:>6}{in_flight:>10}{c.admission:>10}"
            f"{r.throughput_tok_s:>11,.0f}{stale:>18}{r.trainer_busy_fraction:>13.0%}{r.rollout_busy_fraction:>13.0%}"
            f"{outcome.iterations:>11}{'  <- best' if outcome is found.best else ''}"
        )
    yield "quota and in flight are in batches; -: as in the config. The more iterations, the surer"


# ---------------------------------------------------------------- export


def export(folder: RunFolder, version: int | None, out: Path | None) -> Json:
    """Write the model of a checkpoint as a Hugging Face folder. `version` None = the newest checkpoint."""
    from laminar.config import load
    from laminar.trainer import checkpoint_folder
    from laminar.trainer.export import export_model

    config = load(folder.config)
    if config.emulated:
        raise ConfigError("an emulated run has no model to export", where=str(folder.path))
    numbered = [path for path in sorted(folder.checkpoints.iterdir()) if path.name.isdigit()]
    held = {int(path.name): path for path in numbered if checkpoint_folder.is_whole(path)}
    if not held:
        raise StorageError("the run has no checkpoint yet", where=str(folder.checkpoints))
    chosen = max(held) if version is None else version
    if chosen not in held:
        raise StorageError(
            f"there is no checkpoint of version {chosen}",
            where=str(folder.checkpoints),
            expected=f"one of {', '.join(map(str, sorted(held)))}",
        )
    target = out or folder.export
    export_model(held[chosen], config.model_path, target)
    return {"version": chosen, "path": str(target)}
