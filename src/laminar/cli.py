"""The command line. One function a command: read the arguments, call the one function that does it.

Commands import what they need inside, so that `laminar --help` and `laminar check` stay quick. They raise
`UserError` (exit 2) or `RunFailed` (exit 1), or raise `typer.Exit` with a code of their own; `main` alone
turns errors into messages.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import traceback
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from laminar import __version__
from laminar.errors import ConfigError, LaminarError, StorageError, UserError

app = typer.Typer(
    name="laminar",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Exit codes: 0 done, 1 the run failed, 2 bad usage or config, 130 interrupted.",
)
bench = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help="Measure one part alone.")
app.add_typer(bench, name="bench")

Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="CONFIG.toml KEY=VALUE", help="A config file, and keys of it to change."),
]
Run = Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")]


class BenchDtype(StrEnum):
    """Choices of `--dtype`."""

    bf16 = "bf16"
    fp32 = "fp32"


class EnginePeer(StrEnum):
    """Choices of `laminar bench engine --against`."""

    transformers = "transformers"


AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def main() -> None:
    """Entry point of the `laminar` command."""
    try:
        app(prog_name="laminar")
    except UserError as error:
        _stop(str(error), code=2)
    except LaminarError as error:
        _stop(str(error), code=1)
    except Exception:  # the last boundary: a fault of ours is a message too, and the traceback is kept
        with tempfile.NamedTemporaryFile("w", prefix="laminar-", suffix=".log", delete=False) as log:
            traceback.print_exc(file=log)
        _stop(f"{traceback.format_exc().splitlines()[-1]}\n  traceback: {log.name}", code=1)


def _stop(message: str, *, code: int) -> None:
    print(f"laminar: {message}", file=sys.stderr)
    sys.exit(code)


def print_json(value: object) -> None:
    """The output of a command with `--json`."""
    print(json.dumps(value, ensure_ascii=False))


def _show_version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Asynchronous reinforcement learning for language models.

    \b
    laminar check CONFIG.toml             is everything there and right? (under 2 s)
    laminar train CONFIG.toml             train; the run folder is runs/<config>-<time>
    laminar train --resume RUN            go on with an interrupted run
    laminar eval CONFIG.toml              the same rewards, no training
    laminar samples | ledger | ps | replay | timeline | profile | export RUN    look at a run, live or ended
    laminar simulate | plan CONFIG.toml   how fast would it be, and how are GPUs best used?

    Any key of the config can be changed after it: train.lr=1e-5 rollout.replicas=2 max_staleness=none.
    """


@app.command()
def train(
    arguments: Arguments = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="New folder for the run. [default: runs/<config>-<time>]")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="RUN", help="Go on with this run; CONFIG.toml may be left out.")
    ] = None,
) -> None:
    """Train a model as a config says.

    \b
    laminar train examples/sort/config.toml
    laminar train examples/sort/config.toml iterations=20 rollout.replicas=2 --run-dir runs/two
    laminar train --resume runs/two iterations=40
    """
    from laminar import preflight
    from laminar.config import load

    path, overrides = _split(arguments)
    if resume is not None:
        found = _config_of(resume)
        path = path or found
    elif path is None:
        raise ConfigError("no config", expected="laminar train CONFIG.toml [KEY=VALUE]..., or --resume RUN")
    config = load(path, overrides)
    preflight.check(config)
    folder = resume or _new_run_folder(run_dir, path)

    from laminar import reports
    from laminar.run_folder import RunFolder
    from laminar.runtime import launch
    from laminar.trackers import Reporter
    from laminar.view import View

    run = RunFolder(folder)
    with View(run, config.iterations) as view, Reporter(run, config, view.say):
        view.say(f"run folder: {run.path}")
        code = launch.train(config, folder, resume is not None, view.say)
    if code == 0:
        print(reports.summary(run))
    else:
        print(f"laminar: interrupted; go on with: laminar train --resume {folder}", file=sys.stderr)
    raise typer.Exit(code)


@app.command("eval")
def evaluate(
    arguments: Arguments = None,
    run_dir: Annotated[
        Path | None, typer.Option("--run-dir", help="New folder for the run. [default: runs/<config>-<time>]")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate the model of a config on `data.eval`, with the same rewards as in training, and train nothing.

    \b
    laminar eval examples/sort/config.toml
    laminar eval examples/sort/config.toml model.path=runs/two/export eval.samples_per_prompt=4 --json
    """
    from laminar import preflight
    from laminar.config import load

    path, overrides = _split(arguments)
    if path is None:
        raise ConfigError("no config", expected="laminar eval CONFIG.toml [KEY=VALUE]...")
    config = load(path, [*overrides, "iterations=0", "eval.before_train=true", "eval.after_train=false"])
    preflight.check(config)
    folder = _new_run_folder(run_dir, path)

    from laminar.run_folder import RunFolder, read_jsonl
    from laminar.runtime import launch
    from laminar.view import View

    run = RunFolder(folder)
    with View(run, 0) as view:
        code = launch.train(config, folder, resume=False, say=view.say)
    if code:
        raise typer.Exit(code)
    (row,) = read_jsonl(run.evals)
    if as_json:
        print_json(
            {key: row[key] for key in ("eval_reward_mean", "eval_reward_best", "num_samples")} | {"run": str(run.path)}
        )
        return
    reward = "none could be scored" if row["eval_reward_mean"] is None else f"{row['eval_reward_mean']:.3f}"
    print(f"run       {run.path}")
    print(f"eval      {reward}, mean reward of {row['num_samples']} samples")
    if config.eval.samples_per_prompt > 1 and row["eval_reward_best"] is not None:
        print(f"best      {row['eval_reward_best']:.3f}, mean of the best of {config.eval.samples_per_prompt} a prompt")
    print(f"next      laminar samples {run.path} --worst 5")


@app.command()
def check(arguments: Arguments = None, as_json: AsJson = False) -> None:
    """Say whether a run could start: config, model folder, data and reward functions. Loads no model.

    Prints every problem with its remedy and exits with 2 if there is one.

    \b
    laminar check examples/sort/config.toml
    laminar check examples/sort/config.toml train.group_size=16 --json
    """
    from laminar import preflight
    from laminar.config import InvalidConfig, load

    path, overrides = _split(arguments)
    if path is None:
        raise ConfigError("no config", expected="laminar check CONFIG.toml [KEY=VALUE]...")
    resolved = None
    try:
        config = load(path, overrides)
        resolved = config.model_dump(mode="json")
        preflight.check(config)
    except UserError as error:
        if not as_json:
            raise
        problems = error.problems if isinstance(error, InvalidConfig) else (error,)
        print_json({"ok": False, "problems": [_as_object(problem) for problem in problems], "config": resolved})
        raise typer.Exit(2) from None
    if as_json:
        print_json({"ok": True, "problems": [], "config": resolved})
        return
    batch, group = config.train.groups_per_batch, config.train.group_size
    bound = "no bound" if config.staleness_bound is None else config.staleness_bound
    print(f"{path} is fine: laminar train would start.")
    if config.emulated:
        print(f"  emulated  profile {config.simulation.profile}, {config.simulation.time_scale:g} times as fast")
    else:
        print(f"  model     {config.model_path}")
        print(f"  data      {config.train_data}")
        print(f"  reward    {', '.join(config.reward_functions)}")
    print(f"  batch     {batch} groups x {group} samples, {config.train.num_mini_batches} optimizer step(s)")
    print(f"  schedule  {config.schedule}, staleness at most {bound}, {config.rollout.replicas} replica(s)")


@app.command()
def simulate(
    arguments: Arguments = None,
    timeline: Annotated[
        Path | None, typer.Option("--timeline", metavar="FILE", help="Write what each process did when, for Perfetto.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.svg", help="Draw throughput, staleness and KV caches over time."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run an emulated config in simulated time and say how fast it is. The same seed gives the same numbers.

    A timeline has a lane for each replica, relay and the trainer; https://ui.perfetto.dev opens it.

    \b
    laminar simulate configs/paper/72b.toml gpus=512
    laminar simulate configs/paper/32b.toml gpus=128 schedule=sync --json
    laminar simulate configs/simulated/toy.toml --timeline toy.json --plot toy.svg
    """
    from laminar.config import load
    from laminar.sim.simulate import simulate_world

    path, overrides = _split(arguments)
    if path is None:
        raise ConfigError("no config", expected="laminar simulate CONFIG.toml [KEY=VALUE]...")
    for file in (timeline, plot):
        _expect_folder_of(file)
    config = load(path, overrides)
    world, found = simulate_world(config, lambda line: print(line, file=sys.stderr), record=timeline is not None)
    if timeline is not None:
        from laminar.timeline import trace

        timeline.write_text(json.dumps(trace(world.records or ())), encoding="utf-8")
    if plot is not None:
        from laminar.reports import simulation_chart
        from laminar.sim.report import history

        plot.write_text(simulation_chart(history(world, config.iterations or 0)), encoding="utf-8")
    if as_json:
        print_json(found.as_json())
        return
    print(f"throughput   {found.throughput_tok_s:,.0f} tokens/s, an iteration takes {found.iteration_s:.1f} s")
    print(f"generation   {found.generation_tok_s:,.0f} tokens/s, KV caches {found.kv_utilization_mean:.0%} full")
    print(f"busy         replicas {found.rollout_busy_fraction:.0%}, trainer {found.trainer_busy_fraction:.0%}")
    for name, ages in (("generation", found.staleness_generation), ("use", found.staleness_use)):
        print(f"staleness    at {name}: mean {ages.mean:.2f}, at most {ages.max}")
    print(f"latency      mean {found.latency_mean_s:.0f} s, at most {found.latency_max_s:.0f} s a response")
    print(f"repack       {found.repack_moves} moves, {found.repack_cost_s:.1f} s of prefill")


@app.command()
def plan(
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="To plan for, all together.")],
    arguments: Arguments = None,
    staleness: Annotated[
        float | None, typer.Option("--staleness", min=0, help="Mean staleness at use, at most. [default: any]")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FILE.toml", help="Write the config of the best plan.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Search the fastest way to use some GPUs: split, schedule, quota, samples in flight, admission.

    Short simulations find candidates, longer ones decide; of plans that are equally fast the least stale is taken.
    What a plan is worth depends on the profile: `laminar profile` makes one from a run of yours. `partial` is left
    out, because its responses mix versions.

    \b
    laminar plan configs/paper/72b.toml --gpus 1024
    laminar plan configs/paper/32b.toml --gpus 128 --staleness 1 -o best.toml
    laminar simulate best.toml
    """
    from laminar import reports
    from laminar.config import dump, load
    from laminar.sim import planner

    path, overrides = _split(arguments)
    if path is None:
        raise ConfigError("no config", expected="laminar plan CONFIG.toml --gpus N [KEY=VALUE]...")
    _expect_folder_of(out)
    found = planner.search(path, overrides, gpus, staleness, say=lambda line: print(line, file=sys.stderr))
    changes = [*overrides, *found.best.candidate.overrides]
    if out is not None:
        out.write_text(dump(load(path, changes)), encoding="utf-8")
    if as_json:
        tried = [reports.plan_row(outcome) for outcome in found.outcomes]
        print_json({"overrides": changes, "best": reports.plan_row(found.best), "tried": tried})
        return
    for line in reports.plan_table(found):
        print(line)
    print(f"best      laminar simulate {path} {' '.join(changes)}")
    if out is not None:
        print(f"config    {out}")


@app.command()
def ledger(run: Run, as_json: AsJson = False) -> None:
    """Say where every sample and group went, and whether the account closes.

    Works beside a running run. Exits with 1 if something contradicts the rules.

    \b
    laminar ledger runs/sort-20260101-120000
    """
    from laminar import reports

    account = reports.ledger(reports.open_run(run))
    if as_json:
        print_json(account)
    else:
        for name, part in (("train", account), ("eval", account["eval"])):
            for what in ("samples", "groups"):
                c = part[what]
                dropped = ", ".join(f"{n} {reason}" for reason, n in c["dropped"].items()) or "0"
                print(
                    f"{name} {what:8} {c['dispatched']} dispatched = {c['trained']} trained + {dropped} dropped "
                    f"+ {c['in_flight']} in flight"
                )
        print(f"restarts {account['restarts']}, replayed cuts {account['replayed_cuts']}")
        print("closed" if account["closed"] else "NOT CLOSED")
        for line in account["violations"]:
            print(f"violation: {line}")
    if not account["closed"]:
        raise typer.Exit(1)


@app.command()
def ps(run: Run, as_json: AsJson = False) -> None:
    """List the processes of a run: role, pid, state, what it does, and the weight version it holds.

    A replica that is `generating 12` has 12 unfinished samples.
    """
    from laminar import reports

    found = reports.processes(reports.open_run(run))
    if as_json:
        print_json(found)
        return
    print(f"{'role':10} {'id':12} {'pid':>8}  {'state':10} {'doing':16} version")
    for p in found["processes"]:
        version = "-" if p["version"] is None else p["version"]
        print(f"{p['role']:10} {p['id']:12} {p['pid']:>8}  {p['state']:10} {p.get('doing') or '-':16} {version}")


@app.command()
def scale(
    run: Run, wanted: Annotated[str, typer.Argument(metavar="replicas=N", help="How many are to generate.")]
) -> None:
    """Change the number of replicas of a run that is going on.

    New ones load the newest weights by themselves. Those with the highest numbers finish or hand over their samples,
    and leave.

    \b
    laminar scale runs/sort-20260101-120000 replicas=3
    """
    from laminar.control.events import ScaleRequested
    from laminar.reports import open_run
    from laminar.requests import send

    name, _, number = wanted.partition("=")
    if name != "replicas" or not number.isdigit() or int(number) < 1:
        raise ConfigError("what to scale is not clear", got=wanted, expected="replicas=N with N >= 1")
    send(open_run(run), ScaleRequested(int(number)))
    print(f"the run has it; watch with: laminar ps {run}")


@app.command()
def drain(run: Run, replica: Annotated[str, typer.Argument(metavar="REPLICA", help="Its id in `laminar ps`.")]) -> None:
    """Let one replica of a run that is going on leave: its samples go on elsewhere, and nothing is lost.

    \b
    laminar drain runs/sort-20260101-120000 replica-1
    """
    from laminar.control.events import DrainRequested
    from laminar.reports import open_run
    from laminar.requests import send

    send(open_run(run), DrainRequested(replica))
    print(f"the run has it; watch with: laminar ps {run}")


@app.command()
def samples(
    run: Run,
    group: Annotated[int | None, typer.Option("--group", help="Only this group.")] = None,
    last: Annotated[int | None, typer.Option("--last", help="Only the newest N scored groups.")] = None,
    best: Annotated[int | None, typer.Option("--best", min=1, help="Of these, N with the highest reward.")] = None,
    worst: Annotated[int | None, typer.Option("--worst", min=1, help="Of these, N with the lowest reward.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show prompts, completions and rewards. Texts of the last 1,000 groups are kept.

    \b
    laminar samples runs/sort-20260101-120000 --last 2
    laminar samples runs/sort-20260101-120000 --best 3 --worst 3
    """
    from laminar import reports

    rows = reports.samples(reports.open_run(run), group, last, best, worst)
    if as_json:
        print_json(rows)
        return
    shown = None
    for row in rows["samples"]:
        if row["group"] != shown:
            shown = row["group"]
            print(f"\ngroup {shown}  {row['prompt'] or '(text no longer kept)'}")
        reward = "-" if row["reward"] is None else f"{row['reward']:.3f}"
        text = (row["completion"] or "").replace("\n", "\\n")
        print(f"  {row['index']:3}  reward {reward:>7}  version {row['version']}  {row['state']}  {text}")


@app.command()
def replay(run: Run, as_json: AsJson = False) -> None:
    """Feed the run's recorded events to a fresh manager: it must give the same commands.

    Exits with 1 and shows the first differences if it does not.
    """
    from laminar import reports

    result = reports.replay(reports.open_run(run))
    if as_json:
        print_json(result)
    else:
        print(f"{result['records']} events replayed, {result['differences']} differences")
        for line in result["details"]:
            print(line)
    if not result["agrees"]:
        raise typer.Exit(1)


@app.command()
def timeline(
    run: Run, file: Annotated[Path, typer.Argument(metavar="FILE", help="To write; JSON for Perfetto.")]
) -> None:
    """Write what each process of a run did when: a lane for each replica, relay and the trainer.

    Open the file with https://ui.perfetto.dev (it stays on your machine) or chrome://tracing.

    \b
    laminar timeline runs/sort-20260101-120000 sort.json
    """
    from laminar import reports
    from laminar.timeline import trace

    folder = reports.open_run(run)
    _expect_folder_of(file)
    events = trace(reports.records(folder))
    file.write_text(json.dumps(events), encoding="utf-8")
    print(f"{file}: {len(events['traceEvents'])} events; open it with https://ui.perfetto.dev")


@app.command()
def profile(
    run: Run,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE.toml", help="To write.")] = Path("profile.toml"),
) -> None:
    """Make a profile of a run of yours: its lengths and times, for `laminar simulate` and `laminar plan`.

    Decode steps are measured by when samples ended, the trainer by what it says itself; each number says where it is
    from. The run may still go on, and should have ten iterations or more.

    \b
    laminar profile runs/sort-20260101-120000 -o sort.toml
    """
    from laminar import profiling
    from laminar.config import load
    from laminar.reports import open_run

    folder = open_run(run)
    _expect_folder_of(out)
    measured = profiling.measure(folder)
    out.write_text(profiling.as_toml(measured, folder), encoding="utf-8")
    p, config = measured.profile, load(folder.config)
    one, all_ = (1e3 * p.decode_step_s(n, n * p.prompt_tokens) for n in (1, p.max_num_seqs))
    print(f"generation  a decode step takes {one:.3g} ms with one sequence, {all_:.3g} ms with {p.max_num_seqs}")
    print(
        f"training    {p.train_tokens_per_s_per_gpu:,.0f} tokens/s, and {p.train_s_per_mini_batch:.3g} s a mini-batch"
    )
    print(f"measured    {measured.throughput_tok_s:,.0f} tokens/s")
    print(f"profile     {out}")
    changes = profiling.overrides(config, str(out.absolute()), measured.iterations)
    print(f"next        laminar simulate {folder.config} {' '.join(changes)}")


@app.command()
def export(
    run: Run,
    version: Annotated[int | None, typer.Option("--version", help="Of a checkpoint. [default: the newest]")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder to write. [default: RUN/export]")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a checkpoint as a Hugging Face folder, loadable by transformers."""
    from laminar import reports

    result = reports.export(reports.open_run(run), version, out)
    if as_json:
        print_json(result)
    else:
        print(f"version {result['version']} is in {result['path']}")


@bench.command("plan")
def bench_plan(
    replicas: Annotated[int, typer.Option("--replicas", min=1, help="Size of the random fleet.")] = 4096,
    as_json: AsJson = False,
) -> None:
    """Say how long planning one repack takes (processor time, median of several runs)."""
    from dataclasses import asdict

    from laminar.bench.plan import measure

    result = measure(replicas)
    if as_json:
        print_json(asdict(result))
    else:
        print(f"{result.replicas} replicas: {result.moves} moves planned in {1_000 * result.seconds:.1f} ms")


@bench.command("store")
def bench_store(
    size: Annotated[str, typer.Option("--size", help="Of one version, as kB, MB or GB.")] = "300MB",
    readers: Annotated[int, typer.Option("--readers", min=1, help="Processes that hold a version meanwhile.")] = 4,
    versions: Annotated[int, typer.Option("--versions", min=10, help="How many to publish.")] = 100,
    as_json: AsJson = False,
) -> None:
    """Publish and pull weights through shared memory, and say how much longer than a plain copy each takes.

    Needs (5 + readers) times the size of shared memory, and 4 times the size beside it.

    \b
    laminar bench store --size 1.2GB --readers 4
    """
    from dataclasses import asdict

    from laminar.bench import store

    result = store.measure(store.parse_size(size), readers, versions)
    if as_json:
        print_json(asdict(result))
        return
    print(f"{'memcpy':22} {1_000 * result.memcpy_s:.1f} ms for {result.bytes / 1e9:.3f} GB; this long take, of it:")
    for name, ratio in result.ratios.items():
        print(f"{name:22} {ratio.median:.2f}, at most {ratio.worst:.2f}; {ratio.cpu:.2f} of processor time")
    grown_mib = (result.growth.memory_bytes + result.growth.shared_bytes) / 2**20
    print(f"{'growth':22} {grown_mib:.1f} MiB over {result.versions} versions")


@bench.command("step")
def bench_step(
    model: Annotated[Path, typer.Option("--model", metavar="PATH", help="A model folder.")],
    groups: Annotated[int, typer.Option("--groups", min=1)] = 8,
    group_size: Annotated[int, typer.Option("--group-size", min=2)] = 8,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1)] = 64,
    longest: Annotated[int, typer.Option("--longest", min=8, help="Tokens of the longest response.")] = 512,
    micro_batch_tokens: Annotated[int, typer.Option("--micro-batch-tokens", min=1)] = 8192,
    dtype: Annotated[BenchDtype, typer.Option("--dtype", help="Of the arithmetic.")] = BenchDtype.fp32,
    as_json: AsJson = False,
) -> None:
    """Take one optimizer step of the trainer, and a plain padded one, in turn: time, memory, and whether they agree.

    Lengths of responses have a long tail. Exits with 1 if loss or gradient norm differ.

    \b
    laminar bench step --model examples/sort/build/model
    """
    from dataclasses import asdict

    from laminar.bench.step import Settings, measure

    compute: Literal["bf16", "fp32"] = "bf16" if dtype is BenchDtype.bf16 else "fp32"
    result = measure(Settings(model, groups, group_size, prompt_tokens, longest, micro_batch_tokens, compute, seed=0))
    if as_json:
        print_json(asdict(result))
    else:
        print(f"batch    {result.samples} samples, {result.tokens} tokens; {result.padded_tokens} with padding")
        for name, side in (("laminar", result.laminar), ("plain", result.plain)):
            print(f"{name:8} {side.seconds:.2f} s, {side.peak_bytes / 2**20:,.0f} MiB at most")
        print(f"ratios   {result.speedup:.2f} times as fast, {result.memory_ratio:.2f} of the memory")
        print(f"agree    {'yes' if result.agrees else 'NO'}, relative difference {result.difference:.1e}")
    if not result.agrees:
        raise typer.Exit(1)


@bench.command("engine")
def bench_engine(
    model: Annotated[
        Path | None, typer.Option("--model", help="A model folder. [default: a random Llama of 5M parameters]")
    ] = None,
    slots: Annotated[int, typer.Option("--slots", min=1, help="Sequences decoded at once.")] = 32,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", min=1, help="Length of every prompt.")] = 32,
    group_size: Annotated[int, typer.Option("--group-size", min=1, help="Sequences with the same prompt.")] = 1,
    new_tokens: Annotated[int, typer.Option("--new-tokens", min=2, help="Length of every response.")] = 64,
    dtype: Annotated[BenchDtype, typer.Option("--dtype", help="Of weights and arithmetic.")] = BenchDtype.bf16,
    threads: Annotated[int, typer.Option("--threads", min=1, help="Compute threads.")] = 1,
    against: Annotated[
        EnginePeer | None, typer.Option("--against", help="Run this in turn with the engine and give the ratio.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say how many tokens a second the engine makes, and where its time goes.

    Every token is drawn from the full softmax and comes with its log-prob, here and in what it is compared with.
    Figures are medians of three rounds after a warm-up; with one thread they are of processor time, so that other
    work on the machine does not count. `roofline` is the share of a part's time that the arithmetic and the bytes
    it can't do without would take at the peak rates of this machine, which are measured in the same run.

    \b
    laminar bench engine
    laminar bench engine --model examples/arithmetic/build/model --against transformers
    laminar bench engine --slots 64 --group-size 8 --dtype fp32 --json
    """
    from dataclasses import asdict

    from laminar.bench.engine import Settings, measure

    settings = Settings(model, slots, prompt_tokens, group_size, new_tokens, dtype.value, threads)
    result = measure(settings, against is not None, lambda line: print(line, file=sys.stderr, flush=True))
    if as_json:
        print_json(asdict(result))
        return
    print(f"{result.model}, {result.parameters / 1e6:.1f}M parameters, {result.dtype}, {slots} slots")
    print(f"engine        {result.tokens_per_s:,.0f} tokens/s; {result.decode_tokens_per_s:,.0f} without the prefill")
    for name, part in result.parts.items():
        share = "" if part.roofline is None else f"{part.roofline:8.0%} of it is the roofline"
        print(f"  {name:11} {part.seconds:8.3f} s{share}")
    if result.against is not None:
        print(
            f"{result.against.name}  {result.against.tokens_per_s:,.0f} tokens/s: the engine has {result.ratio:.2f} x"
        )


def _as_object(problem: UserError) -> dict[str, str | None]:
    return {name: getattr(problem, name) for name in ("what", "where", "expected", "got", "fix")}


def _split(arguments: list[str] | None) -> tuple[Path | None, list[str]]:
    """The config, if one is named, and the overrides."""
    paths = [argument for argument in arguments or [] if "=" not in argument]
    if len(paths) > 1:
        raise ConfigError("more than one config", got=" ".join(paths), expected="one, then overrides as key=value")
    return (Path(paths[0]) if paths else None), [argument for argument in arguments or [] if "=" in argument]


def _expect_folder_of(file: Path | None) -> None:
    """Raises StorageError unless the file could be written: better before a long simulation than after it."""
    if file is not None and not file.absolute().parent.is_dir():
        raise StorageError("there is no such folder", where=str(file.parent), fix=f"mkdir -p {file.parent}")


def _config_of(run: Path) -> Path:
    from laminar.reports import open_run

    return open_run(run).config


def _new_run_folder(wanted: Path | None, config: Path) -> Path:
    """`wanted`, or runs/<config>-<time>; an example's `config.toml` goes by the name of its folder."""
    if wanted is None:
        name = config.resolve().parent.name if config.stem == "config" else config.stem
        wanted = Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    if wanted.exists() and (not wanted.is_dir() or any(wanted.iterdir())):
        raise StorageError(
            "the run folder is not empty",
            where=str(wanted),
            fix=f"choose another folder, or go on with that run: --resume {wanted}",
        )
    return wanted
