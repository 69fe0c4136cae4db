"""Profiles against the numbers of the paper that they were made from, and draws by key."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from statistics import fmean

import pytest

from laminar.errors import ConfigError
from laminar.timing import PROFILES, RATES, SECONDS, Profile, keyed_uniform, load_profile, quantile

NAMES = sorted(file.stem for file in PROFILES.glob("*.toml"))
TOY = load_profile("toy")


def test_the_package_has_its_profiles() -> None:
    assert NAMES == ["32b", "72b", "7b", "toy"]
    assert [load_profile(name).name for name in NAMES] == NAMES


# ---------------------------------------------------------------- decode steps

# Milliseconds a step at 4,096 tokens of context by batch: figure 4 of the paper.
BATCHES = (1, 4, 8, 16, 32, 64, 128, 256)
FIGURE_4 = {
    "7b": (6.98, 7.30, 7.67, 8.41, 9.58, 12.6, 18.1, 29.6),
    "32b": (10.6, 11.1, 11.7, 12.7, 14.9, 18.2, 25.9, 37.3),
}
FIGURE_4_CONSTANT_S = {"7b": 6.93e-3, "32b": 10.8e-3}


@pytest.mark.parametrize("name", FIGURE_4)
def test_tokens_read_cost_what_figure_4_says(name: str) -> None:
    """With the constant part that the figure shows, and nothing else a sequence, the line is within 6 % of it."""
    profile = replace(load_profile(name), step_s=FIGURE_4_CONSTANT_S[name], step_s_per_sequence=0.0)
    steps = [1000 * profile.decode_step_s(batch, 4096 * batch) for batch in BATCHES]
    assert steps == pytest.approx(FIGURE_4[name], rel=0.06)


@pytest.mark.parametrize(
    ("constant", "per_sequence_s", "per_kv_token"), [(2.2, 0.0, 1.7), (2.2, 45e-6, 1.0), (1.0, 70e-6, 1.0)]
)
def test_other_readings_of_the_paper_fit_the_same_form(
    constant: float, per_sequence_s: float, per_kv_token: float
) -> None:
    """Scaled constants, and a cost a sequence: 512 sequences and full keys and values take 70 ms a step (figure 9)."""
    base = load_profile("32b")
    profile = replace(
        base,
        step_s=constant * FIGURE_4_CONSTANT_S["32b"],
        step_s_per_sequence=per_sequence_s,
        step_s_per_kv_token=per_kv_token * base.step_s_per_kv_token,
    )
    assert profile.decode_step_s(512, base.kv_tokens) == pytest.approx(0.070, rel=0.15)


def test_a_step_and_a_prefill_in_round_numbers() -> None:
    assert TOY.decode_step_s(4, 500) == pytest.approx(0.010 + 4 * 0.001 + 500 * 0.00001)
    assert TOY.prefill_s(250) == pytest.approx(0.025)


@pytest.mark.parametrize("name", NAMES)
def test_a_faster_profile_divides_every_time_and_nothing_else(name: str) -> None:
    profile = replace(load_profile(name), tool_calls=1, tool_latency_quantiles=((0.0, 1.0), (1.0, 3.0)))
    fast = profile.faster(40)

    def times(p: Profile) -> list[float]:
        training = p.train_step_s(10**6, 4, 8), p.publish_s(), p.broadcast_s(5), p.load_s(), p.switch_s
        return [p.decode_step_s(3, 999), p.prefill_s(999), p.tool_latency_s(0, 1, 2, 3), p.reward_s, *training]

    assert times(fast) == pytest.approx([seconds / 40 for seconds in times(profile)])
    assert fast.response_length(0, 1, 2) == profile.response_length(0, 1, 2)
    timeless = {f.name for f in fields(Profile)} - {*SECONDS, *RATES, "tool_latency_quantiles"}
    assert [getattr(fast, f) for f in timeless] == [getattr(profile, f) for f in timeless]
    assert not [f for f in timeless if re.search(r"_s(_|$)", f)]


# ---------------------------------------------------------------- trainer and weights

# Train GPUs and thousands of tokens a second of Laminar (table 2, figure 11); 512 x 16 samples, 16 mini-batches.
FIGURE_11 = {
    "32b": (0.02, 3427, {256: 230.0}),  # with fewer GPUs generation is the bottleneck
    "72b": (0.25, 1124, {32: 20.0, 64: 38.9, 128: 54.0, 320: 87.7, 768: 149.2}),
    "7b": (0.08, 5633, {8: 34.9, 40: 137.3, 80: 208.6, 192: 260.1}),
}


@pytest.mark.parametrize("name", FIGURE_11)
def test_iterations_last_what_figure_11_says(name: str) -> None:
    tolerance, tokens_per_sample, points = FIGURE_11[name]
    profile, tokens = load_profile(name), 8192 * tokens_per_sample
    for gpus, thousands in points.items():
        assert profile.train_step_s(tokens, 16, gpus) == pytest.approx(tokens / (1000 * thousands), rel=tolerance)


def test_a_training_step_in_round_numbers() -> None:
    assert TOY.train_step_s(tokens=10_000, mini_batches=4, gpus=5) == pytest.approx(0.5 + 4 * 0.1 + 2.0)
    assert TOY.train_step_s(tokens=10_000, mini_batches=4, gpus=5, first=False) == pytest.approx(4 * 0.1 + 2.0)


# Seconds by machines: figure 18.
FIGURE_18 = {
    "32b": {4: 0.42, 8: 0.49, 16: 0.55, 32: 0.61, 64: 0.67, 128: 0.73},
    "72b": {4: 0.945, 8: 1.10, 16: 1.24, 32: 1.38, 64: 1.50, 128: 1.625},
}


@pytest.mark.parametrize("name", FIGURE_18)
def test_broadcasts_last_what_figure_18_says(name: str) -> None:
    profile = load_profile(name)
    for machines, seconds in FIGURE_18[name].items():
        assert profile.broadcast_s(machines) == pytest.approx(seconds, rel=0.02)
    assert profile.broadcast_s(1) == 0.0


def test_stalls_and_loads_are_those_of_section_8_3() -> None:
    stalls = {name: (load_profile(name).publish_s(), load_profile(name).load_s()) for name in ("32b", "72b")}
    assert stalls == {"32b": (0.64, 0.56), "72b": (1.40, 1.28)}


# ---------------------------------------------------------------- lengths

# p10, p50, p90, p99 and mean: figure 17.
FIGURE_17 = {
    "7b": (638, 6152, 9709, 14000, 5533),
    "32b": (1262, 2822, 5980, 10528, 3327),
    "72b": (473, 919, 1700, 2741, 1024),
}


@pytest.mark.parametrize("name", FIGURE_17)
def test_lengths_follow_figure_17(name: str) -> None:
    profile, count = load_profile(name), 4000
    lengths = sorted(profile.response_length(1, group, 0) for group in range(count))
    drawn = [lengths[int(p * count)] for p in (0.1, 0.5, 0.9, 0.99)] + [fmean(lengths)]
    assert drawn == pytest.approx(FIGURE_17[name], rel=0.12)
    assert lengths[0] >= 1 and lengths[-1] <= profile.max_response_tokens


@pytest.mark.parametrize("correlation", [0.0, 0.5, 1.0])
def test_lengths_of_a_group_go_together(correlation: float) -> None:
    """The share of the variance that lies between groups is the correlation; the mean of all does not move."""
    profile = replace(TOY, correlation=correlation, response_quantiles=((0.0, 0.0), (1.0, 2000.0)))
    profile = replace(profile, max_response_tokens=2000)
    groups = [[profile.response_length(0, group, index) for index in range(8)] for group in range(400)]
    grand = fmean(length for group in groups for length in group)
    pairs = fmean(
        (group[i] - grand) * (group[j] - grand) for group in groups for i in range(8) for j in range(8) if i != j
    )
    variance = fmean((length - grand) ** 2 for group in groups for length in group)
    assert grand == pytest.approx(1000, rel=0.07)
    assert pairs / variance == pytest.approx(correlation, abs=0.07)


def test_draws_depend_on_their_key_alone() -> None:
    """Pinned numbers: another machine, another order of calls, the same lengths."""
    profile = load_profile("32b")
    keys = ((3, 1), (0, 0), (3, 1), (2**40, 5))
    assert [profile.response_length(7, *key) for key in keys] == [3640, 3602, 3640, 5063]
    assert keyed_uniform("a", 1) != keyed_uniform("b", 1)
    assert keyed_uniform("a", 1, 2) != keyed_uniform("a", 2, 1)


def test_uniforms_are_uniform() -> None:
    draws = sorted(keyed_uniform("test", i) for i in range(4000))
    assert draws[0] > 0 and draws[-1] < 1
    assert max(abs(value - (i + 0.5) / 4000) for i, value in enumerate(draws)) < 1.63 / 4000**0.5


def test_quantiles_at_their_ends() -> None:
    table = ((0.0, 10.0), (0.5, 20.0), (1.0, 100.0))
    assert [quantile(table, p) for p in (0.0, 0.25, 0.5, 0.75, 1.0)] == [10, 15, 20, 60, 100]


def test_tool_latencies_follow_their_table() -> None:
    profile = replace(TOY, tool_calls=2, tool_latency_quantiles=((0.0, 1.0), (1.0, 3.0)))
    latencies = [profile.tool_latency_s(0, group, 0, call) for group in range(500) for call in range(2)]
    assert fmean(latencies) == pytest.approx(2.0, rel=0.05)
    assert profile.tool_latency_s(0, 1, 2, 3) == profile.tool_latency_s(0, 1, 2, 3)


# ---------------------------------------------------------------- files


def toml(tmp_path: Path, **changes: str | None) -> Path:
    """The toy profile with lines changed, added, or (None) removed."""
    lines = dict(line.split(" = ", 1) for line in (PROFILES / "toy.toml").read_text().splitlines() if " = " in line)
    lines = {key: value for key, value in (lines | changes).items() if value is not None}
    path = tmp_path / "mine.toml"
    path.write_text("\n".join(f"{key} = {value}" for key, value in lines.items()))
    return path


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    assert load_profile(toml(tmp_path, step_s="1")) == replace(TOY, name="mine", step_s=1.0)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"step_ms": "1"}, "mine.toml: step_ms: unknown key in a profile"),
        ({"step_s": None}, "mine.toml: step_s: missing in a profile\n  expected: a number"),
        ({"step_s": '"fast"'}, "mine.toml: step_s: can't have this value\n  expected: a number\n  got: fast"),
        ({"kv_tokens": "1.5"}, "mine.toml: kv_tokens: can't have this value\n  expected: an integer"),
        ({"kv_tokens": "0"}, "kv_tokens: a profile can't have this value\n  expected: more than 0"),
        ({"load_weights_s": "-1"}, "load_weights_s: a profile can't have this value\n  expected: a number >= 0"),
        ({"correlation": "1.5"}, "correlation: a profile can't have this value\n  expected: 0 … 1"),
        ({"response_quantiles": "[[0, 5], [1, 3]]"}, r"expected: [[0, smallest], …, [1, largest]], both rising"),
        ({"response_quantiles": "[[0, 5], [0.9, 6]]"}, r"expected: [[0, smallest], …, [1, largest]], both rising"),
        ({"response_quantiles": "[3]"}, "response_quantiles: can't have this value"),
        ({"tool_calls": "1"}, "tool_latency_quantiles: a profile can't have this value"),
        ({"step_s": "0", "step_s_per_sequence": "0"}, "a decode step that takes time"),
        ({"step_s": "="}, "not valid TOML"),
    ],
)
def test_what_is_wrong_with_a_profile(tmp_path: Path, changes: dict[str, str | None], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        load_profile(toml(tmp_path, **changes))
    assert message in str(raised.value)


def test_a_profile_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"8b: no such profile\n  expected: a TOML file, or one of 32b, 72b, 7b, toy"):
        load_profile("8b")


def test_profiles_are_plain_values() -> None:
    assert isinstance(TOY, Profile) and hash(TOY) == hash(load_profile("toy"))
