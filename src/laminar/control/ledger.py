"""Every lifecycle as one table: (state, event) -> state. What is not in a table can't happen.

The data store applies `SAMPLE` and `GROUP` in the transaction that changes the data itself; the manager
applies `PROCESS` and `REPLICA` to what it sees; relays apply `SLOT` to their files.
"""

from __future__ import annotations

from collections.abc import Mapping

from laminar.errors import IllegalTransition

Table = Mapping[tuple[str, str], str]

SAMPLE: Table = {
    ("new", "issue"): "issued",
    ("issued", "accept"): "running",
    ("running", "accept"): "running",
    ("issued", "finish"): "finished",
    ("running", "finish"): "finished",
    ("finished", "score"): "scored",
    ("scored", "train"): "trained",
    # another replica goes on from its tokens
    ("running", "move"): "issued",
    ("issued", "move"): "issued",
    ("orphan", "adopt"): "issued",
    # its owner is gone
    ("issued", "orphan"): "orphan",
    ("running", "orphan"): "orphan",
    ("orphan", "restart"): "issued",
    # given up, with a reason
    ("issued", "drop"): "dropped",
    ("running", "drop"): "dropped",
    ("orphan", "drop"): "dropped",
    ("finished", "drop"): "dropped",
    ("scored", "drop"): "dropped",
}
"""One response. `trained` of an evaluation sample means that it is in the evaluation's result."""

GROUP: Table = {
    ("new", "issue"): "issued",
    ("new", "drop"): "dropped",
    ("issued", "finish"): "finished",
    ("finished", "score"): "buffered",
    ("buffered", "cut"): "cut",
    ("cut", "train"): "trained",
    # an evaluation group never enters the buffer
    ("finished", "evaluate"): "trained",
    ("issued", "drop"): "dropped",
    ("finished", "drop"): "dropped",
    ("buffered", "drop"): "dropped",
    ("cut", "drop"): "dropped",  # its cut was given up
}
"""One prompt drawn once. It is `finished` when no member is left to generate, `buffered` when all have a score."""

REPLICA: Table = {
    ("starting", "loaded"): "idle",
    ("starting", "pull"): "pulling",
    ("starting", "resumed"): "generating",  # a new manager hears of it for the first time
    ("pulling", "loaded"): "idle",
    ("pulling", "resumed"): "generating",
    ("pulling", "failed"): "starting",
    ("idle", "loaded"): "idle",
    ("idle", "pull"): "pulling",
    ("idle", "grant"): "granted",
    ("granted", "nothing"): "idle",
    ("granted", "work"): "generating",
    ("idle", "work"): "generating",
    ("generating", "work"): "generating",
    ("generating", "grant"): "granted",
    ("generating", "pull"): "pulling",
    ("generating", "empty"): "idle",
}
"""What the manager lets a replica do next. `granted`: the data store has been asked to issue to it."""

PROCESS: Table = {
    ("starting", "beat"): "alive",
    ("alive", "beat"): "alive",
    ("alive", "silence"): "suspect",
    ("suspect", "beat"): "alive",
    ("starting", "death"): "dead",
    ("alive", "death"): "dead",
    ("suspect", "death"): "dead",
    ("alive", "stop"): "stopped",
    ("suspect", "stop"): "stopped",
    ("starting", "stop"): "stopped",
    ("dead", "give up"): "given up",
    ("dead", "replace"): "starting",
    ("stopped", "replace"): "starting",
}
"""Whether a process is there, as the manager sees it."""

ENDED = ("dead", "stopped", "given up")
"""States of a process from which nothing more is taken in: it may only have been stopped, and be continued late."""

SLOT: Table = {
    ("empty", "write"): "writing",
    ("writing", "write"): "writing",
    ("writing", "written"): "written",
    ("written", "verify"): "whole",
    ("written", "reject"): "empty",
    ("written", "write"): "writing",
    ("whole", "write"): "writing",
}
"""A place for one version in a machine's shared memory. Only `whole` is ever shown to a reader."""

TABLES: Mapping[str, Table] = {"sample": SAMPLE, "group": GROUP, "replica": REPLICA, "process": PROCESS, "slot": SLOT}

TERMINAL = frozenset({"trained", "dropped"})


def step(table: Table, state: str, event: str, who: object) -> str:
    """The next state. Raises IllegalTransition, naming `who`, if the table has none; nothing changes then."""
    try:
        return table[state, event]
    except KeyError:
        raise IllegalTransition(f"{who}: no {event!r} in state {state!r}") from None
