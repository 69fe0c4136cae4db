"""`laminar train` beside TRL's GRPOTrainer: the same model, rows, reward, batches and cores, in turn, in one run.

Two tasks: a Llama of 5 million random parameters, 8 groups of 8 responses of 32 tokens; and the sort example, to its
end. Prints samples a second after the warm-up, CPU seconds a sample, and for the sort example the time from the command
to a mean reward of 0.75 over ten batches; medians over the rounds, and how many times better `laminar` is.

TRL has an environment of its own. To make one:
    python -m venv trl-env && trl-env/bin/pip install -c constraints.txt torch transformers trl
Exits with 1 if `laminar` makes less than 2 times the samples a second on the first task, 1.5 times on the second, or is
later at 0.75.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.command import LAMINAR
from laminar.plot import Line, Panel, Point, chart
from laminar.run_folder import RunFolder, read_jsonl
from laminar.runtime import guard

SORT = Path(__file__).parents[1] / "examples" / "sort"
SCRIPT = Path(__file__).with_name("trl_script.py")
GROUPS, GROUP_SIZE = 8, 8
WARM_UP = 0.25
"""Share of the steps that is not timed."""
GOAL, OVER = 0.75, 10
"""Mean reward to be reached, over so many batches."""
AT_LEAST = {"5M": 2.0, "sort": 1.5}
"""How many times TRL's samples a second."""
LOOK_EVERY_S = 0.1
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Task:
    """The same for both."""

    name: str
    model: Path
    rows: Path
    reward: Path
    steps: int
    new_tokens: int
    lr: float
    warmup_steps: int

    def trl(self) -> dict[str, Any]:
        return {
            "max_steps": self.steps,
            "learning_rate": self.lr,
            "lr_scheduler_type": "linear",
            "warmup_steps": self.warmup_steps,
            "per_device_train_batch_size": GROUPS * GROUP_SIZE,
            "num_generations": GROUP_SIZE,
            "max_completion_length": self.new_tokens,
            "temperature": 1.0,
            "beta": 0.0,
        }

    def laminar(self) -> dict[str, Any]:
        return {
            "iterations": self.steps,
            "max_staleness": 1,
            "model": {"path": str(self.model)},
            "data": {"train": str(self.rows)},
            "reward": {"functions": [f"{self.reward}:reward"]},
            "rollout": {"max_new_tokens": self.new_tokens, "max_num_seqs": GROUPS * GROUP_SIZE},
            "train": {
                "groups_per_batch": GROUPS,
                "group_size": GROUP_SIZE,
                "lr": self.lr,
                "lr_schedule": "linear",
                "warmup_steps": self.warmup_steps,
                "checkpoint_every": 1000,
            },
        }


@dataclass(frozen=True, slots=True)
class Run:
    """One of the two, once."""

    samples_per_s: float
    cpu_s_per_sample: float
    """Of all processes, their start included."""
    goal_s: float | None
    """From the command to the goal; None if it was not reached."""
    curve: tuple[Point, ...] = ()
    """Seconds since the command, mean reward over `OVER` batches."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trl_python", type=Path, help="the Python of an environment that has TRL")
    parser.add_argument("--tasks", nargs="+", choices=AT_LEAST, default=list(AT_LEAST))
    parser.add_argument("--rounds", type=int, default=2, help="how often both are run in turn (2)")
    parser.add_argument("--steps", type=int, help="of each run, instead of 60 and 450")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the reward of the last task against time")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, the table on stderr")
    arguments = parser.parse_args()
    table = sys.stderr if arguments.json else sys.stdout
    results: dict[str, dict[str, Run]] = {}
    with tempfile.TemporaryDirectory(prefix="against-trl-", dir="/dev/shm") as name:
        for task in tasks(Path(name), arguments.tasks, arguments.steps):
            runs: dict[str, list[Run]] = {"laminar": [], "TRL": []}
            for number in range(arguments.rounds):
                folder = Path(name) / f"{task.name}-{number}"
                folder.mkdir()
                for who, run in (("laminar", run_laminar), ("TRL", lambda t, f: run_trl(arguments.trl_python, t, f))):
                    runs[who].append(run(task, folder))
                    print(f"{task.name}: {who}: {as_text(runs[who][-1])}", file=table, flush=True)
            results[task.name] = {who: middle(of) for who, of in runs.items()}
            for who, of in results[task.name].items():
                print(f"{task.name}: {who}, median: {as_text(of)}", file=table, flush=True)
            if arguments.plot:
                arguments.plot.write_text(picture(runs), encoding="utf-8")
    problems = [problem for name, both in results.items() for problem in broken(name, both)]
    print("\n".join(problems), file=table)
    if arguments.json:
        found = {name: {who: asdict(run) for who, run in both.items()} for name, both in results.items()}
        print(json.dumps({"against_trl": found, "problems": problems}))
    return int(bool(problems))


def tasks(folder: Path, names: list[str], steps: int | None) -> list[Task]:
    found = []
    if "5M" in names:
        model, rows, reward = make_5m(folder / "5M")
        found.append(Task("5M", model, rows, reward, steps or 60, 32, 1e-4, 10))
    if "sort" in names:
        build = SORT / "build"
        sort = Task("sort", build / "model", build / "train.jsonl", SORT / "reward.py", steps or 450, 12, 3e-4, 20)
        found.append(sort)
    return found


def make_5m(folder: Path) -> tuple[Path, Path, Path]:
    """A random Llama with a tokenizer of 4,096 words, rows of 16 of them, and a reward that likes half of them."""
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from laminar.bench.engine import RANDOM_LLAMA

    words = ["<pad>", "<eos>", *(f"w{i}" for i in range(RANDOM_LLAMA["vocab_size"] - 2))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            **RANDOM_LLAMA | {"max_position_embeddings": 256}, pad_token_id=0, bos_token_id=None, eos_token_id=1
        )
    )
    model.save_pretrained(folder / "model")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    fast.save_pretrained(folder / "model")
    rng = random.Random(0)
    rows = [{"prompt": " ".join(rng.choices(words[2:], k=16)), "answer": "even"} for _ in range(2000)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "reward.py").write_text(
        "def reward(completions, answer):\n"
        "    return [sum(w[-1:] in '02468' for w in c.split()) / max(1, len(c.split())) for c in completions]\n",
        encoding="utf-8",
    )
    return folder / "model", folder / "rows.jsonl", folder / "reward.py"


def run_laminar(task: Task, folder: Path) -> Run:
    config, run = folder / "config.toml", RunFolder(folder / "run")
    config.write_text(as_toml(task.laminar()), encoding="utf-8")
    return watch([LAMINAR, "train", config, "--run-dir", run.path], run.metrics, folder, task, run.tag)


def as_toml(data: dict[str, Any]) -> str:
    lines = [f"{key} = {json.dumps(value)}" for key, value in data.items() if not isinstance(value, dict)]
    for name, section in data.items():
        if isinstance(section, dict):
            lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in section.items())]
    return "\n".join(lines) + "\n"


def run_trl(python: Path, task: Task, folder: Path) -> Run:
    command = [python, SCRIPT, folder, task.model, task.rows, task.reward, json.dumps(task.trl())]
    return watch(command, folder / "steps.jsonl", folder, task, None)


def watch(command: list[Any], steps: Path, folder: Path, task: Task, tag: str | None) -> Run:
    """Run it to its end, looking at the file that has a line a step."""
    began = time.monotonic()
    seen: list[tuple[float, float]] = []
    cpu_s: dict[int, float] = {}
    with (folder / "output").open("ab") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        while process.poll() is None:
            time.sleep(LOOK_EVERY_S)
            rewards = [row["reward_mean"] for row in read_jsonl(steps)] if steps.exists() else []
            seen += [(time.monotonic() - began, reward) for reward in rewards[len(seen) :]]
            for pid in [process.pid, *(guard.marked(tag) if tag else ())]:
                cpu_s[pid] = cpu_of(pid, cpu_s.get(pid, 0.0))
    if process.returncode:
        raise SystemExit((folder / "output").read_text(encoding="utf-8"))
    first = int(WARM_UP * len(seen))
    samples = (len(seen) - 1 - first) * GROUPS * GROUP_SIZE
    means = [(at, fmean(r for _, r in seen[i - OVER + 1 : i + 1])) for i, (at, _) in enumerate(seen) if i >= OVER - 1]
    return Run(
        samples / (seen[-1][0] - seen[first][0]),
        sum(cpu_s.values()) / (task.steps * GROUPS * GROUP_SIZE),
        next((at for at, mean in means if mean >= GOAL), None),
        tuple(means),
    )


def cpu_of(pid: int, before: float) -> float:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return before
    return (int(stat[11]) + int(stat[12])) / _TICKS


def middle(runs: list[Run]) -> Run:
    """The medians, with the curve of the first run."""
    goals = [run.goal_s for run in runs if run.goal_s is not None]
    return Run(
        median(run.samples_per_s for run in runs),
        median(run.cpu_s_per_sample for run in runs),
        median(goals) if len(goals) == len(runs) else None,
        runs[0].curve,
    )


def as_text(run: Run) -> str:
    goal = "" if run.goal_s is None else f", reward {GOAL} after {run.goal_s:.0f} s"
    return f"{run.samples_per_s:.1f} samples/s, {run.cpu_s_per_sample * 1000:.1f} ms CPU a sample{goal}"


def picture(runs: dict[str, list[Run]]) -> str:
    """Every run of one task, in a colour for each of the two."""
    lines = [
        Line(run.curve, who if number == 0 else "", colour=colour)
        for colour, (who, of) in enumerate(runs.items())
        for number, run in enumerate(of)
    ]
    return chart([Panel(f"reward, mean of {OVER} batches", lines, "seconds since the command")])


def broken(name: str, both: dict[str, Run]) -> list[str]:
    ours, theirs = both["laminar"], both["TRL"]
    ratio = ours.samples_per_s / theirs.samples_per_s
    problems = [f"{name}: {ratio:.2f} x is below {AT_LEAST[name]:g} x"] if ratio < AT_LEAST[name] else []
    if name == "sort" and (ours.goal_s is None or ours.goal_s >= (theirs.goal_s or float("inf"))):
        problems.append(f"{name}: not sooner at reward {GOAL}")
    return problems


if __name__ == "__main__":
    raise SystemExit(main())
