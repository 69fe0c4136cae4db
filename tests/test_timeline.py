"""A run as a Chrome trace: lanes, and that they say what happened."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from laminar.config import load
from laminar.sim.simulate import plan_of, simulate_world
from laminar.sim.world import World
from laminar.timeline import trace

TOY = Path(__file__).resolve().parents[1] / "configs" / "simulated" / "toy.toml"
Json = dict[str, Any]


def lanes(events: list[Json]) -> dict[str, list[Json]]:
    """Spans by lane, in the order of time."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    found: dict[str, list[Json]] = defaultdict(list)
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: e["ts"]):
        found[names[event["pid"], event["tid"]]].append(event)
    return found


def seconds(spans: list[Json], verb: str) -> float:
    return sum(span["dur"] for span in spans if span["name"].startswith(verb)) / 1e6


def test_a_lane_does_one_thing_at_a_time_and_all_that_the_report_says() -> None:
    world, found = simulate_world(load(TOY), record=True)
    made = trace(world.records or ())
    assert json.loads(json.dumps(made)) == made
    by_lane = lanes(made["traceEvents"])
    assert set(by_lane) == {"trainer", *world.replicas, *(relay.id for relay in world.relays.values())}
    for spans in by_lane.values():
        assert all(a["ts"] + a["dur"] <= b["ts"] + 1 for a, b in pairwise(spans))  # rounded to microseconds
    trained = [span["name"] for span in by_lane["trainer"] if span["name"] != "wait"]
    assert trained[:12] == [f"train batch {u}" for u in range(12)]
    total = world.kernel.now * len(world.replicas)
    busy = sum(seconds(by_lane[name], "generate") for name in world.replicas) / total
    really = sum(r.decoder.busy_s for r in world.replicas.values()) / total
    assert busy == pytest.approx(really, abs=0.05)
    assert 0 < found.trainer_busy_fraction < 1 and seconds(by_lane["trainer"], "wait") > 0
    moves = [e for e in made["traceEvents"] if e["name"].startswith("moves to replica-")]
    assert len(moves) == world.manager.manager.state.num_moves > 0 and moves[0]["args"]["reason"].startswith("frees")


def test_counters_stay_within_what_there_is() -> None:
    world, _ = simulate_world(load(TOY), record=True)
    counters: dict[str, list[float]] = defaultdict(list)
    for event in trace(world.records or ())["traceEvents"]:
        if event["ph"] == "C":
            counters[event["name"]].append(event["args"]["value"])
    kv, buffered = counters["KV caches, % full"], counters["groups in the buffer"]
    assert max(kv) > 0 and all(0 <= value <= 100 for value in kv)
    assert max(buffered) > 0 and all(0 <= n <= world.settings.max_outstanding_groups for n in buffered)


def test_a_death_ends_the_span_and_another_life_goes_on_in_the_same_lane() -> None:
    world = World(plan_of(load(TOY)), record=True)
    world.kernel.at(5.0, lambda: world.driver.kill("replica", "replica-1"))
    world.run()
    events = trace(world.records or ())["traceEvents"]
    (death,) = [e for e in events if e["name"] == "died: killed"]
    assert death["ts"] == pytest.approx(5.1e6)
    spans = [s for s in lanes(events)["replica-1"] if s["name"].startswith("generate")]
    while_away = range(death["ts"], death["ts"] + int(1e6 * world.plan.start_s))
    assert not any(s["ts"] in while_away for s in spans)
    assert spans[0]["ts"] < death["ts"] and any(s["ts"] > while_away.stop for s in spans)


def test_partial_goes_on_after_each_interruption() -> None:
    world, _ = simulate_world(load(TOY, ["schedule=partial"]), record=True)
    names = [s["name"] for s in lanes(trace(world.records or ())["traceEvents"])["replica-0"]]
    assert any(a.startswith("load version") and b == a.replace("load", "generate") for a, b in pairwise(names))


def test_nothing_happened() -> None:
    assert [e["ph"] for e in trace([])["traceEvents"]] == ["M"] * 4
