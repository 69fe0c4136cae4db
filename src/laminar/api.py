"""The Python form: `laminar.Trainer(...).train()`, with TRL's keyword names."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import cloudpickle

from laminar import preflight, reports
from laminar.config import parse
from laminar.errors import ConfigError
from laminar.run_folder import RunFolder
from laminar.runtime import launch
from laminar.trackers import Reporter
from laminar.view import View

Dataset = str | Path | Iterable[Mapping[str, Any]] | Callable[[], Iterable[Mapping[str, Any]]]
RewardFunction = str | Callable[..., Any]


class Trainer:
    """A training run described in Python.

    Args:
        model: folder with a Hugging Face causal language model and its tokenizer.
        reward_funcs: one or several reward functions in TRL's or verl's form, or their `file.py:function` names. They
            travel to other processes by cloudpickle, so lambdas and functions of a notebook work.
        train_dataset: rows with a `prompt` column: what `data.train` may name, a Hugging Face dataset (a stream is read
            to its end), a list or another iterable, or a callable that returns one.
        eval_dataset: the same, for `config["eval"]`.
        config: keys of the config file as nested dictionaries.
        run_dir: where the run is kept; `runs/python-<time>` if not given.

    Raises:
        UserError: what is wrong with any of it, before anything slow starts.
    """

    def __init__(
        self,
        model: str | Path,
        reward_funcs: RewardFunction | Sequence[RewardFunction],
        train_dataset: Dataset,
        eval_dataset: Dataset | None = None,
        config: Mapping[str, Any] | None = None,
        run_dir: str | Path | None = None,
    ) -> None:
        self.folder = RunFolder(Path(run_dir or f"runs/python-{time.strftime('%Y%m%d-%H%M%S')}"))
        self.folder.create()
        self._objects: dict[str, Any] = {}
        functions = [reward_funcs] if isinstance(reward_funcs, str) or callable(reward_funcs) else list(reward_funcs)
        values: dict[str, Any] = {
            key: dict(value) if isinstance(value, Mapping) else value for key, value in (config or {}).items()
        }
        self._set(values, "model", "path", str(Path(model).resolve()))
        names = [self._named(f, getattr(f, "__name__", f"reward_{i}")) for i, f in enumerate(functions)]
        self._set(values, "reward", "functions", names)
        self._set(values, "data", "train", self._named(train_dataset, "train_dataset"))
        if eval_dataset is not None:
            self._set(values, "data", "eval", self._named(eval_dataset, "eval_dataset"))
        if self._objects:
            self.folder.user_code.write_bytes(self._pickled())
        self.config = parse(values, source="config", folder=Path.cwd())
        preflight.check(self.config)

    def train(self) -> Path:
        """Train to the end. Returns the folder of the trained model. Raises RunFailed, or KeyboardInterrupt."""
        with View(self.folder, self.config.iterations) as view, Reporter(self.folder, self.config, view.say):
            code = launch.train(self.config, self.folder.path, resume=False, say=view.say)
        if code:
            raise KeyboardInterrupt
        print(reports.summary(self.folder))
        return self.folder.export

    def _named(self, value: Any, name: str) -> str:
        """A name that other processes can resolve: objects go into the run folder's pickle."""
        if isinstance(value, str | Path):
            return str(value)
        base, count = name if name.isidentifier() else "object", 1
        name = base
        while name in self._objects:
            count += 1
            name = f"{base}_{count}"
        self._objects[name] = value
        return f"{self.folder.user_code}:{name}"

    def _pickled(self) -> bytes:
        try:
            return bytes(cloudpickle.dumps(self._objects))
        except Exception as cause:  # what the user's objects raise
            raise ConfigError(
                "an argument can't be sent to other processes",
                where=", ".join(self._objects),
                got=f"{type(cause).__name__}: {cause}",
                fix="give a list, or a function that makes what is needed where it is called",
            ) from cause

    @staticmethod
    def _set(values: dict[str, Any], section: str, key: str, value: object) -> None:
        part = values.setdefault(section, {})
        if key in part:
            raise ConfigError(f"`{section}.{key}` is given twice", fix="leave it out of `config`: it is an argument")
        part[key] = value
