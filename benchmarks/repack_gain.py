"""What does repack gain, by replicas, by the tail of the lengths, and by what it costs to prefill what has moved?

Generation of 32B with repack over that without: the paper's run on 128 GPUs, which has 16 replicas, with one thing
changed at a time, and a trainer that takes no time. Simulated, one seed each.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import NormalDist

from laminar.config import load
from laminar.sim.simulate import plan_of
from laminar.sim.world import World
from laminar.timing import Profile, Quantiles

CONFIG = Path(__file__).resolve().parents[1] / "configs" / "paper" / "32b.toml"
ITERATIONS, WARM_UP = 10, 4
REPLICAS = (2, 4, 16, 64, 128)
TAILS = {"none": 1.0, "short": 2.0, "of 32B": None, "long": 10.0}
"""99 % over 50 %; None: the quantiles of the profile."""
PREFILL_TOK_S = (30_000.0, 10_000.0, 3_000.0, 1_000.0)


@dataclass(frozen=True, slots=True)
class Case:
    replicas: int = 16
    tail: str = "of 32B"
    prefill_tok_s: float = 30_000.0


@dataclass(frozen=True, slots=True)
class Gain:
    case: Case
    gain: float
    moves_an_iteration: float
    prefill_share: float
    """Of the time of the replicas, that goes into tokens which another one had made."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    as_json = parser.parse_args().json
    cases = dict.fromkeys(
        [
            *(Case(replicas=n) for n in REPLICAS),
            *(Case(tail=tail) for tail in TAILS),
            *(Case(prefill_tok_s=price) for price in PREFILL_TOK_S),
            *(Case(replicas=64, prefill_tok_s=price) for price in PREFILL_TOK_S),
        ]
    )
    gains = [gain_of(case) for case in cases]
    if as_json:
        print(json.dumps([asdict(gain) for gain in gains]))
        return
    print("replicas  tail     prefill tok/s   gain   moves an iteration   time spent on prefill")
    for g in gains:
        c = g.case
        print(
            f"{c.replicas:8}  {c.tail:8}{c.prefill_tok_s:>14,.0f}{g.gain:>+7.0%}"
            f"{g.moves_an_iteration:>21.1f}{g.prefill_share:>24.1%}"
        )


def gain_of(case: Case) -> Gain:
    with_it, without = (run(case, repack) for repack in (True, False))
    gain = with_it.rate / without.rate - 1
    print(f"{case}: {gain:+.1%}", file=sys.stderr, flush=True)
    return Gain(case, gain, with_it.moves / (ITERATIONS - WARM_UP), with_it.prefill_share)


@dataclass(frozen=True, slots=True)
class Run:
    rate: float
    """Tokens a second"""
    moves: int
    prefill_share: float


def run(case: Case, repack: bool) -> Run:
    keys = [f"rollout.replicas={case.replicas}", "gpus=none", f"rollout.repack={'true' if repack else 'false'}"]
    plan = plan_of(load(CONFIG, keys))
    world = World(replace(plan, profile=profile_of(case, plan.profile)))
    while len(world.marks) <= ITERATIONS:
        world.kernel.step()
    first, last = world.marks[WARM_UP], world.marks[ITERATIONS]
    seconds = last.time - first.time
    return Run(
        (last.decoded_tokens - first.decoded_tokens) / seconds,
        last.num_moves - first.num_moves,
        (last.reprefilled_s - first.reprefilled_s) / seconds / case.replicas,
    )


def profile_of(case: Case, profile: Profile) -> Profile:
    ratio = TAILS[case.tail]
    return replace(
        profile,
        prefill_tokens_per_s=case.prefill_tok_s,
        response_quantiles=profile.response_quantiles if ratio is None else lognormal(profile, ratio),
        train_tokens_per_s_per_gpu=1e9,
        train_s_per_mini_batch=0.0,
    )


def lognormal(profile: Profile, ratio: float) -> Quantiles:
    """Lengths with the median of the profile and this 99 % over it, cut off at the longest response."""
    median = next(length for p, length in profile.response_quantiles if p == 0.5)
    steps: Sequence[float] = [0.001, *(i / 100 for i in range(1, 100)), 0.995, 0.999]
    power = {p: NormalDist().inv_cdf(p) / NormalDist().inv_cdf(0.99) for p in steps}
    lengths = {p: min(median * ratio ** power[p], profile.max_response_tokens) for p in steps}
    return ((0.0, lengths[0.001]), *lengths.items(), (1.0, min(lengths[0.999] * 1.2, profile.max_response_tokens)))


if __name__ == "__main__":
    main()
