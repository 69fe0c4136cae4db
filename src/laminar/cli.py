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
from pathlib import Path
from typing import Annotated

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

Arguments = Annotated[
    list[str] | None,
    typer.Argument(metavar="CONFIG.toml KEY=VALUE", help="A config file, and keys of it to change."),
]
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
        path = path or _config_of(resume)
    elif path is None:
        raise ConfigError("no config", expected="laminar train CONFIG.toml [KEY=VALUE]..., or --resume RUN")
    config = load(path, overrides)
    preflight.check(config)
    folder = resume or _new_run_folder(run_dir, path)

    from laminar import reports
    from laminar.run_folder import RunFolder
    from laminar.runtime import launch
    from laminar.view import View

    run = RunFolder(folder)
    with View(run, config.iterations) as view:
        view.say(f"run folder: {run.path}")
        code = launch.train(config, folder, resume is not None, view.say)
    if code == 0:
        print(reports.summary(run))
    else:
        print(f"laminar: interrupted; go on with: laminar train --resume {folder}", file=sys.stderr)
    raise typer.Exit(code)


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
    print(f"  model     {config.model.path}")
    print(f"  data      {config.data.train}")
    print(f"  reward    {', '.join(config.reward.functions)}")
    print(f"  batch     {batch} groups x {group} samples, {config.train.num_mini_batches} optimizer step(s)")
    print(f"  schedule  {config.schedule}, staleness at most {bound}, {config.rollout.replicas} replica(s)")


def _as_object(problem: UserError) -> dict[str, str | None]:
    return {name: getattr(problem, name) for name in ("what", "where", "expected", "got", "fix")}


def _split(arguments: list[str] | None) -> tuple[Path | None, list[str]]:
    """The config, if one is named, and the overrides."""
    paths = [argument for argument in arguments or [] if "=" not in argument]
    if len(paths) > 1:
        raise ConfigError("more than one config", got=" ".join(paths), expected="one, then overrides as key=value")
    return (Path(paths[0]) if paths else None), [argument for argument in arguments or [] if "=" in argument]


def _config_of(run: Path) -> Path:
    path = run / "config.toml"
    if not path.is_file():
        raise StorageError("not a run folder", where=str(run), expected="a folder that laminar train made")
    return path


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
