"""Code of the user's: from `path/to/file.py:name` or `module:name` to the object, and to a function that fits."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import pickle
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import cloudpickle

from laminar.errors import UserCodeError, UserError

KEYWORDS = {
    "data.sampler": ("groups",),
    "train.advantage": ("rewards", "groups"),
    "train.loss": ("new", "old", "behaviour", "advantage", "settings"),
}
"""What a function of the user's is called with, by the config key that names it."""

_FORMS = "`path/to/file.py:name` or `module:name`"


def resolve(spec: str, base_folder: Path, *, error: type[UserError]) -> object:
    """The object that `spec` names.

    `path/to/file.py:name` is an attribute of a file, `module:name` or `folder/module:name` of an importable
    module, and `path/to/file.pkl:name` an entry of a cloudpickled dict. Relative paths start at `base_folder`,
    which also goes on `sys.path`, as does the folder of a file or module. The same file is executed once a process.
    Raises `error`, a kind of UserError: malformed, not there, can't be imported, or has no such name.
    """
    source, separator, name = spec.rpartition(":")
    if not separator or not source or not name:
        raise error(f"`{spec}` names no object", expected=_FORMS, got=f"`{spec}`")
    _put_on_path(base_folder)
    if source.endswith(".pkl"):
        return _from_pickle(_existing(source, base_folder, spec, error), name, spec, error)
    if source.endswith(".py"):
        module = _load_file(_existing(source, base_folder, spec, error), spec, error)
    else:
        *folders, module_name = source.rsplit("/", 1)
        module = _load_module(module_name, base_folder.joinpath(*folders), spec, error)
    return _attribute(module, name, spec, error)


def load_function(spec: str, key: str) -> Callable[..., Any]:
    """The function that `spec` names, to be called with the `KEYWORDS` of this config key.

    Raises UserCodeError: as `resolve` does, or because it can't be called like that.
    """
    keywords = KEYWORDS[key]
    found = resolve(spec, Path.cwd(), error=UserCodeError)
    expected = f"a function that takes {', '.join(keywords)} by keyword"
    if not callable(found):
        raise UserCodeError("not a function", where=f"`{spec}`", expected=expected, got=type(found).__name__)
    try:
        inspect.signature(found).bind(**dict.fromkeys(keywords))
    except TypeError as cause:
        raise UserCodeError(
            "can't be called as it will be", where=f"`{spec}`", expected=expected, got=str(cause)
        ) from None
    return found


def failed(spec: str, cause: BaseException) -> UserCodeError:
    """What to raise when a function of the user's has raised."""
    return UserCodeError("failed", where=f"`{spec}`", got=f"{last_line(cause)} ({_place(cause)})", fix="mend the file")


def _put_on_path(folder: Path) -> None:
    entry = str(folder.resolve())
    if entry not in sys.path:
        sys.path.insert(0, entry)


def _existing(source: str, base_folder: Path, spec: str, error: type[UserError]) -> Path:
    path = (base_folder / source).resolve()
    if not path.is_file():
        raise error("the file is not there", where=f"`{spec}`", expected=f"a file at {path}", fix="correct the path")
    return path


def _load_file(path: Path, spec: str, error: type[UserError]) -> ModuleType:
    # The digest keeps two files of one name apart; a name that depends on the path alone is the same in every process.
    module_name = f"laminar_user_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:12]}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    _put_on_path(path.parent)
    module_spec = importlib.util.spec_from_file_location(module_name, path)
    assert module_spec is not None and module_spec.loader is not None, path
    module = importlib.util.module_from_spec(module_spec)
    sys.modules[module_name] = module
    try:
        module_spec.loader.exec_module(module)
    except (Exception, SystemExit) as cause:  # whatever the user's file raises is the user's to read
        del sys.modules[module_name]
        _import_failed(cause, spec, error)
    # No other process can import this name, so what the file defines has to be pickled with its code.
    cloudpickle.register_pickle_by_value(module)
    return module


def _load_module(name: str, folder: Path, spec: str, error: type[UserError]) -> ModuleType:
    _put_on_path(folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as cause:
        if cause.name is None or not (name == cause.name or name.startswith(cause.name + ".")):
            _import_failed(cause, spec, error)
        raise error(
            f"there is no module `{cause.name}`",
            where=f"`{spec}`",
            expected=f"{_FORMS}; modules are looked for in {folder.resolve()} too",
            fix="correct the name, or install the package",
        ) from cause
    except (Exception, SystemExit) as cause:  # as above
        _import_failed(cause, spec, error)


def _import_failed(cause: BaseException, spec: str, error: type[UserError]) -> NoReturn:
    raise error(
        "importing it failed", where=f"`{spec}`", got=f"{last_line(cause)} ({_place(cause)})", fix="mend the file"
    ) from cause


def last_line(cause: BaseException) -> str:
    """`ValueError: text`, the last line of a traceback."""
    return "".join(traceback.format_exception_only(cause)).strip().splitlines()[-1]


def _place(cause: BaseException) -> str:
    if isinstance(cause, SyntaxError):
        return f"{cause.filename}:{cause.lineno}"
    frames = traceback.extract_tb(cause.__traceback__)
    return f"{frames[-1].filename}:{frames[-1].lineno}"


def _from_pickle(path: Path, name: str, spec: str, error: type[UserError]) -> object:
    try:
        objects = pickle.loads(path.read_bytes())
    except (Exception, SystemExit) as cause:  # unpickling imports the user's modules
        _import_failed(cause, spec, error)
    if name not in objects:
        _no_such_name(name, list(objects), spec, error)
    found: object = objects[name]
    return found


def _attribute(module: ModuleType, name: str, spec: str, error: type[UserError]) -> object:
    if not hasattr(module, name):
        _no_such_name(name, [key for key in vars(module) if not key.startswith("_")], spec, error)
    found: object = getattr(module, name)
    return found


def _no_such_name(name: str, names: list[str], spec: str, error: type[UserError]) -> NoReturn:
    near = difflib.get_close_matches(name, names, n=3)
    raise error(
        f"there is no `{name}` in it",
        where=f"`{spec}`",
        expected=f"one of: {', '.join(sorted(names)) or '(it defines nothing)'}",
        fix=f"did you mean {' or '.join(f'`{match}`' for match in near)}?" if near else None,
    )
