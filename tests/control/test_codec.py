"""Events and commands survive the way through JSON, every kind of them."""

from __future__ import annotations

import json
import typing
from typing import Any

import pytest

from laminar.control import codec, commands, events
from laminar.control.manager import Record
from laminar.errors import ProtocolError
from laminar.types import Load, SampleId, Version

V, W = Version(0, 3), Version(1, 4)
SAMPLES = (SampleId(3, 0), SampleId(4, 1))
BEATS = (
    events.ReplicaBeat("r0", 1, "generating", V, 7, Load(1, 2, 3, 4), "node", 2),
    events.RelayBeat("relay", 1, "node", (V, W), 2, ("version 3 was refused",)),
    events.TrainerBeat(1, V, 2, "training"),
    events.ScorerBeat(2),
    events.StoreBeat(1),
)
VALUES: tuple[Any, ...] = (
    *BEATS,
    events.ReplicaBeat("r0", 1, "idle", None, 0),
    events.ReplicaBeat("r0", 1, "loading", V, 0, pulling=W),
    events.TrainerBeat(1, None, 0, "starting"),
    events.Tick(BEATS),
    events.Tick(),
    events.Issued("r0", 1, W, "train", (3, 4), SAMPLES, False),
    events.Adopted("r1", 2, V, SAMPLES),
    events.MoveEnded("r0", "r1"),
    events.Finished(SAMPLES),
    events.Buffered((3,)),
    events.CutMade(2, 0, (3, 4)),
    events.CutGivenUp(2, 4),
    events.CutTrained(2),
    events.CutGivenUp(3, 8),
    events.Dropped(SAMPLES, (3,), "engine_error"),
    events.Orphaned(SAMPLES, V),
    events.Orphaned(SAMPLES, V, 4),
    events.EvalDone(W),
    events.Exhausted(),
    events.Completed(),
    events.Fatal('é "quoted"\nand long'),
    events.StoreEvents(9, (events.Exhausted(), events.Orphaned(SAMPLES, W))),
    events.Recovered(2, ((3, "issued"),), 4, 2, 1, ((SAMPLES[0], V, 4), (SAMPLES[1], W, None)), True, (V, W), 17),
    events.Recovered(
        3,
        owned=(("r0", 2, SAMPLES),),
        evals_open=((W, 2),),
        processes=(events.ProcessSeen("replica", "r0", 2, "alive", (0, 4), True),),
    ),
    events.ProcessStarted("replica", "r0", 1),
    events.ProcessEnded("replica", "r0", 1, "killed"),
    events.ProcessEnded("trainer", "trainer", 1, None),
    events.StopRequested("interrupted"),
    events.DrainRequested("r0"),
    events.ScaleRequested(3),
    commands.Pull("r0", 1, V, "newer"),
    commands.Pull("r0", 1, V, "newer", interrupt=True),
    commands.Issue("r0", 1, V, 3, "train", "room"),
    commands.Restart("r0", 1, V, SAMPLES, "orphans"),
    commands.Adopt("r1", 2, V, SAMPLES, "it holds their version"),
    commands.Move("r0", 1, "r1", 2, V, "the tail fits"),
    commands.CancelMove("r0", "late"),
    commands.Orphan("r0", 1, "killed"),
    commands.GiveUpEval(V, "gone"),
    commands.GiveUpCut(2, "the trainer died on it twice"),
    commands.GiveUpCut(3, "twice"),
    commands.NoteDeaths((("relay", 1), ("replica", 2))),
    commands.Complete("done"),
    commands.Keep("relay", (V, W), "live"),
    commands.Links("relay-1", "relay-0", None, 3),
    commands.Replace("replica", "r0", 2, "killed"),
    commands.Remove("replica", "r0", "drained"),
    commands.Stop("replica", "*", "over"),
    commands.EndRun("completed", "done"),
)


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_there_and_back(value: object) -> None:
    again = codec.decode(json.loads(json.dumps(codec.encode(value))))
    assert again == value and type(again) is type(value)
    assert repr(again) == repr(value), "the types inside too: versions, samples, loads"


def test_no_kind_is_left_out() -> None:
    kinds = {kind for union in (events.Event, events.StoreEvent, commands.Command) for kind in typing.get_args(union)}
    assert kinds == {type(value) for value in VALUES}


def test_a_record_there_and_back() -> None:
    record = Record(1.25, events.Tick(BEATS), (VALUES[-1], VALUES[-2]))
    assert codec.decode_record(json.loads(json.dumps(codec.encode_record(record)))) == record


def test_an_unknown_kind_is_an_error() -> None:
    with pytest.raises(ProtocolError, match="unknown record 'Explode'"):
        codec.decode({"type": "Explode"})
