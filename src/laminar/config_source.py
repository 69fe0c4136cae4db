"""A config as raw data: the TOML file, `a.b=value` overrides, and paths made absolute."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from laminar.config_help import shown
from laminar.errors import ConfigError


def read_toml(path: Path) -> dict[str, Any]:
    if not path.is_file():
        got = "a folder" if path.is_dir() else "no such file"
        raise ConfigError("can't read the config", where=str(path), expected="a TOML file", got=got)
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        fix = "strings need quotes, and a section starts with [name]"
        raise ConfigError("not valid TOML", where=str(path), got=str(error), fix=fix) from None
    except OSError as error:
        raise ConfigError("can't read the config", where=str(path), got=str(error)) from None


def parse_override(override: str) -> tuple[str, Any]:
    key, equals, text = override.partition("=")
    key = key.strip()
    if not equals or not re.fullmatch(r"[\w-]+(\.[\w-]+)*", key):
        raise ConfigError("not an override", where=override, expected="key=value, as in train.lr=1e-5")
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        parsed = {}
    value = parsed["value"] if list(parsed) == ["value"] else text
    return key, _absolute_value(key, value, Path.cwd())


def set_key(raw: dict[str, Any], key: str, value: Any, override: str) -> None:
    *sections, name = key.split(".")
    table = raw
    for section in sections:
        inner = table.setdefault(section, {})
        if not isinstance(inner, dict):
            raise ConfigError("not a section", where=f"override {override}", expected="a section", got=shown(inner))
        table = inner
    table[name] = value


def with_absolute_paths(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """A copy of two levels, its paths counted from `folder`."""
    return {
        key: {name: _absolute_value(f"{key}.{name}", inner, folder) for name, inner in value.items()}
        if isinstance(value, Mapping)
        else value
        for key, value in data.items()
    }


def _absolute_value(key: str, value: Any, folder: Path) -> Any:
    if key == "reward.functions" and isinstance(value, list):
        return [_absolute_spec(item, folder) if isinstance(item, str) else item for item in value]
    if key in ("data.sampler", "train.advantage", "train.loss") and isinstance(value, str):
        return _absolute_spec(value, folder)
    if key in ("data.train", "data.eval") and isinstance(value, str) and value != "none":
        return _absolute_dataset(value, folder)
    if key == "model.path" and isinstance(value, str | Path) and value != "none":
        return _absolute_path(value, folder)
    if key == "simulation.profile" and isinstance(value, str) and value.endswith(".toml"):
        return _absolute_path(value, folder)
    return dict(value) if isinstance(value, Mapping) else value


def is_hub_name(name: str) -> bool:
    """Whether it looks like `owner/name` or `owner/name/config` of a dataset on the Hugging Face hub."""
    is_file = name.endswith((".jsonl", ".json", ".parquet", ".arrow", ".csv", ".tsv", ".txt", ".py", ".pkl"))
    return re.fullmatch(r"\w[\w.-]*(/[\w.-]*\w){1,2}", name) is not None and not is_file


def _absolute_dataset(spec: str, folder: Path) -> str:
    """A file, a folder with or without `:split`, a name on the hub, or what `_absolute_spec` takes."""
    path, colon, split = spec.partition(":")
    if (folder / Path(path).expanduser()).is_dir():
        return f"{_absolute_path(path, folder)}{colon}{split}"
    if is_hub_name(path):
        return spec
    return _absolute_spec(spec, folder) if colon else _absolute_path(spec, folder)


def _absolute_spec(spec: str, folder: Path) -> str:
    """`path/to/file.py:name` with an absolute path; `module:name` too if the module is in `folder`.

    So every process of the run finds the user's modules, wherever it was started. A module of a package becomes
    `folder/package.module:name`, because it may import its neighbours.
    """
    path, colon, name = spec.rpartition(":")
    if colon and re.fullmatch(r"\w+", path) and (folder / f"{path}.py").is_file():
        path = f"{path}.py"
    is_package = re.fullmatch(r"\w+(\.\w+)*", path) is not None and (folder / path.partition(".")[0]).is_dir()
    is_path = is_package or path.endswith((".py", ".pkl"))
    return f"{_absolute_path(path, folder)}:{name}" if colon and is_path else spec


def _absolute_path(path: str | Path, folder: Path) -> str:
    return os.path.abspath(folder / Path(path).expanduser())
