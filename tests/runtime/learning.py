"""Training runs of which it is known beforehand whether they may learn: the sort task, one reason changed at a time.

`python -m tests.runtime.learning OUT.json --seeds 0 1 2` trains all of them, one after the other, and writes their
curves after each; one that is there already is not trained again.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean

from torch import Tensor

from laminar.errors import UserCodeError
from laminar.plot import Line, Panel, chart
from laminar.run_folder import RunFolder, read_jsonl
from laminar.trainer.loss import LossSettings, decoupled_ppo
from laminar.user_code import resolve

SORT = Path(__file__).parents[2] / "examples" / "sort"
ITERATIONS = 400
ENDS = 20
"""Iterations over which the reward at the beginning and at the end of a run is averaged."""

COMMON = (
    *(f"iterations={ITERATIONS}", "train.lr=5e-5", "train.lr_schedule=constant", "data.eval=none"),
    *("eval.temperature=0.0", f"train.checkpoint_every={10 * ITERATIONS}", "rollout.exact=false", "report_to=[]"),
)
LAGGING = ("max_staleness=4", "rollout.admission=fresh", "rollout.max_in_flight=192", "rollout.max_num_seqs=192")
"""Three batches in the engine and the rest in the buffer, which is used oldest first: what is trained is as old as it
may be. The staleness in the metrics is the proof."""

VARIANTS = {
    "lag 0": ("max_staleness=0",),
    "lag 4": LAGGING,
    "lag 4, no importance weight": (*LAGGING, f"train.loss={__file__}:uncorrected"),
    "lr 0": ("max_staleness=0", "train.lr=0.0"),
    "shuffled rewards": ("max_staleness=0", f'reward.functions=["{__file__}:shuffled"]'),
}

Curve = dict[str, list[float]]
"""`reward` and `staleness`, a number an iteration."""


def uncorrected(new: Tensor, old: Tensor, behaviour: Tensor, advantage: Tensor, settings: LossSettings) -> Tensor:
    """The loss with the importance weight left out: stale samples are taken for the trainer's own. [T] from [T]."""
    return decoupled_ppo(new, old, old, advantage, settings)


def shuffled(prompts: list[str], completions: list[str], answer: list[str]) -> list[float]:
    """The rewards of a group, dealt to its members by dice: same numbers, nothing to learn from."""
    reward = resolve(f"{SORT / 'reward.py'}:reward", SORT, error=UserCodeError)
    assert callable(reward)
    rewards: list[float] = reward(completions, answer)
    random.Random(prompts[0]).shuffle(rewards)
    return rewards


def train(variant: str, seed: int, folder: Path) -> Curve:
    """Train one variant in `folder` as a user would, and read its curve."""
    overrides = [*COMMON, *VARIANTS[variant], f"seed={seed}"]
    laminar = Path(sys.executable).with_name("laminar")
    command = [laminar, "train", SORT / "config.toml", *overrides, "--run-dir", folder]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    rows = list(read_jsonl(RunFolder(folder).metrics))
    return {
        "reward": [row["reward_mean"] for row in rows],
        "staleness": [row["staleness_use_mean"] for row in rows],
    }


def gain(curve: Curve) -> float:
    """Reward at the end of a run minus that of the model it began with."""
    return fmean(curve["reward"][-ENDS:]) - fmean(curve["reward"][:ENDS])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the reward against iterations")
    arguments = parser.parse_args()
    curves: dict[str, Curve] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    for seed in arguments.seeds:
        for variant in VARIANTS:
            name = f"{variant}/{seed}"
            if name not in curves:
                folder = Path(tempfile.mkdtemp(prefix="learning-"))
                curves[name] = train(variant, seed, folder / "run")
                shutil.rmtree(folder)
                arguments.out.write_text(json.dumps(curves))
            lag = fmean(curves[name]["staleness"])
            print(f"{name:32} gain {gain(curves[name]):+.3f}, mean staleness {lag:.2f}", flush=True)
    if arguments.plot:
        arguments.plot.write_text(picture(curves, arguments.seeds), encoding="utf-8")


def picture(curves: dict[str, Curve], seeds: list[int]) -> str:
    """The reward of each variant, mean over seeds and over `ENDS` iterations."""
    lines = []
    for variant in VARIANTS:
        rewards = [fmean(step) for step in zip(*(curves[f"{variant}/{seed}"]["reward"] for seed in seeds), strict=True)]
        lines.append(Line([(i, fmean(rewards[i - ENDS : i])) for i in range(ENDS, len(rewards) + 1)], variant))
    return chart([Panel("reward", lines, "iterations")], width=720, height=320)


if __name__ == "__main__":
    main()
