"""User code is found from its spec, and what can't be found says why."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cloudpickle
import pytest

from laminar.errors import DataError, RewardError, UserCodeError
from laminar.user_code import load_function, resolve


@pytest.fixture(autouse=True)
def clean_import_state(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """`resolve` extends `sys.path` and `sys.modules`: both as before after each test."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_file_module_and_pickle_forms(tmp_path: Path) -> None:
    (tmp_path / "forms_helper.py").write_text("VALUE = 7\n")
    (tmp_path / "reward.py").write_text("import forms_helper\ndef f():\n    return forms_helper.VALUE\n")
    (tmp_path / "objects.pkl").write_bytes(cloudpickle.dumps({"g": lambda: 8}))
    assert resolve("reward.py:f", tmp_path, error=RewardError)() == 7
    assert resolve(f"{tmp_path}/reward.py:f", Path("/"), error=RewardError)() == 7
    assert resolve("forms_helper:VALUE", tmp_path, error=RewardError) == 7
    assert resolve("objects.pkl:g", tmp_path, error=RewardError)() == 8


def test_a_module_of_a_package_may_import_its_neighbours(tmp_path: Path) -> None:
    package = tmp_path / "judges_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "scale.py").write_text("SCALE = 3\n")
    (package / "judge.py").write_text("from .scale import SCALE\ndef f():\n    return SCALE\n")
    assert resolve(f"{tmp_path}/judges_package.judge:f", Path("/"), error=RewardError)() == 3


FUNCTIONS = """
def loss(new, old, behaviour, advantage, settings): ...
def some(new, advantage, **rest): ...
def other(new, reference): ...
number = 3
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("loss", None),
        ("some", None),
        ("other", ["can't be called as it will be", "expected: a function that takes new, old, ", "'reference'"]),
        ("number", ["not a function", "got: int"]),
        ("lost", ["there is no `lost` in it", "did you mean `loss`?"]),
    ],
)
def test_a_function_must_take_the_keywords_of_its_key(tmp_path: Path, name: str, expected: list[str] | None) -> None:
    spec = f"{tmp_path}/own.py:{name}"
    (tmp_path / "own.py").write_text(FUNCTIONS)
    if expected is None:
        load_function(spec, "train.loss")
        return
    with pytest.raises(UserCodeError) as failure:
        load_function(spec, "train.loss")
    for text in [spec, *expected]:
        assert text in str(failure.value)


def test_two_files_of_one_name_do_not_collide(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "reward.py").write_text(f"def f():\n    return {folder!r}\n")
    assert [resolve(f"{folder}/reward.py:f", tmp_path, error=RewardError)() for folder in "ab"] == ["a", "b"]


def test_a_file_is_executed_once(tmp_path: Path) -> None:
    (tmp_path / "once.py").write_text("marker = object()\n")
    assert resolve("once.py:marker", tmp_path, error=RewardError) is resolve(
        "./once.py:marker", tmp_path, error=RewardError
    )


def test_a_function_from_a_file_can_be_pickled_for_another_process(tmp_path: Path) -> None:
    (tmp_path / "travels.py").write_text("BASE = 40\ndef f(x):\n    return BASE + x\n")
    (tmp_path / "f.pkl").write_bytes(cloudpickle.dumps(resolve("travels.py:f", tmp_path, error=RewardError)))
    (tmp_path / "travels.py").unlink()
    code = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb'))(2))"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "f.pkl")], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("42", "")


BROKEN = {
    "raises.py": "x = 1\nraise ValueError('no good')\n",
    "leaves.py": "import sys\nsys.exit(3)\n",
    "syntax.py": "def f(:\n",
    "needs.py": "import a_package_that_is_not_there\n",
    "fine.py": "def correct(): pass\n",
    "a_module.py": "import a_package_that_is_not_there\n",
}


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("no_colon.py", ["`no_colon.py` names no object", "`path/to/file.py:name` or `module:name`"]),
        ("Qwen/Some-Reward-Model", ["names no object"]),
        ("fine.py:", ["names no object"]),
        ("absent.py:f", ["the file is not there", "absent.py"]),
        ("absent.pkl:f", ["the file is not there"]),
        ("raises.py:f", ["importing it failed", "ValueError: no good", "raises.py:2"]),
        ("leaves.py:f", ["importing it failed", "SystemExit: 3", "leaves.py:2"]),
        ("syntax.py:f", ["importing it failed", "SyntaxError", "syntax.py:1"]),
        ("needs.py:f", ["importing it failed", "a_package_that_is_not_there", "needs.py:1"]),
        ("fine.py:corect", ["there is no `corect` in it", "did you mean `correct`?"]),
        ("a_package_that_is_not_there:f", ["there is no module `a_package_that_is_not_there`"]),
        ("a_package_that_is_not_there.sub:f", ["there is no module `a_package_that_is_not_there`"]),
        ("a_module:f", ["importing it failed", "a_module.py:1"]),
        ("json:loadz", ["there is no `loadz` in it", "`loads`"]),
        ("objects.pkl:x", ["there is no `x` in it", "one of: y"]),
        ("garbage.pkl:x", ["importing it failed", "UnpicklingError"]),
    ],
)
def test_one_clear_error_each(tmp_path: Path, spec: str, expected: list[str]) -> None:
    for name, text in BROKEN.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "objects.pkl").write_bytes(cloudpickle.dumps({"y": 1}))
    (tmp_path / "garbage.pkl").write_bytes(b"garbage")
    with pytest.raises(RewardError) as failure:
        resolve(spec, tmp_path, error=RewardError)
    for text in expected:
        assert text in str(failure.value)
    assert spec.rstrip(":") in str(failure.value)


def test_the_caller_chooses_the_kind_of_error(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        resolve("absent.py:rows", tmp_path, error=DataError)
