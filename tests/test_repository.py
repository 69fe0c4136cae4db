"""The scripts of the repository, and what importing the package costs."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

import laminar

ROOT = Path(__file__).resolve().parent.parent


def test_importing_laminar_imports_nothing_heavy() -> None:
    code = "import sys, laminar; print(*(name for name in sys.modules if '.' not in name))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"PYTHONPATH": str(ROOT / "src")},
    )
    assert not {"torch", "ray", "pydantic", "numpy", "transformers"} & set(done.stdout.split())


def test_the_package_has_no_other_lazy_names() -> None:
    with pytest.raises(AttributeError, match="Trainee"):
        _ = laminar.Trainee


def test_constraints_pin_every_requirement_and_hold_no_address() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines)
    assert "torch==2.13.0" in lines
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = project["dependencies"] + [r for extra in project["optional-dependencies"].values() for r in extra]
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    names = {re.split(r"[\[><=]", requirement)[0] for requirement in wanted} - {"laminar-rl"}
    assert names <= pinned


# ---------------------------------------------------------------- scripts/train


@pytest.fixture
def fake_checkout(tmp_path: Path) -> Path:
    """A checkout with the real scripts/train, no set-up to do, and a `laminar` that prints its arguments."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts" / "train", tmp_path / "scripts" / "train")
    for path, text in (("scripts/setup", "exit 0"), (".venv/bin/laminar", 'printf "%s\\n" "$@"')):
        script = tmp_path / path
        script.parent.mkdir(parents=True, exist_ok=True)
        script.write_text(f"#!/bin/sh\n{text}\n")
        script.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "supplies_config"),
    [
        ([], True),
        (["iterations=3"], True),
        (["data.train=rows.toml", "--run-dir", "runs/a b"], True),
        (["my.toml"], False),
        (["iterations=3", "examples/sort/config.toml"], False),
        (["--resume", "runs/x"], False),
        (["--resume=runs/x"], False),
    ],
)
def test_train_supplies_the_arithmetic_example(
    fake_checkout: Path, tmp_path_factory: pytest.TempPathFactory, arguments: list[str], supplies_config: bool
) -> None:
    done = subprocess.run(
        [fake_checkout / "scripts" / "train", *arguments],
        cwd=tmp_path_factory.mktemp("elsewhere"),
        capture_output=True,
        text=True,
        check=True,
    )
    supplied = [f"{fake_checkout}/examples/arithmetic/config.toml"] if supplies_config else []
    assert done.stdout.splitlines() == ["train", *supplied, *arguments]


# ---------------------------------------------------------------- links


@pytest.fixture
def check_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_links", ROOT / "scripts" / "check_links.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "ROOT", tmp_path)
    return module


PAGE = """
# The title, with `code`

## Twice
## Twice

[here](#twice-1) [code](#the-title-with-code) [file](other.md) [deep](docs/deep.md#part) [web](https://nowhere.invalid/x)
[reference]: other.md
`[not](a-link.md)`

```
[nor](this.md)
```
"""


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("", None),
        ("[x](gone.md)", "page.md: gone.md: no such file"),
        ("![x](picture.png)", "page.md: picture.png: no such file"),
        ("[x](#thrice)", "page.md: #thrice: no such heading"),
        ("[x](docs/deep.md#whole)", "page.md: docs/deep.md#whole: no such heading"),
        ("[x]: gone.md", "page.md: gone.md: no such file"),
        ('[x](gone.md "title")', "page.md: gone.md: no such file"),
    ],
)
def test_broken_links_are_found(check_links: ModuleType, tmp_path: Path, line: str, problem: str | None) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "deep.md").write_text("# Part\n[up](../other.md) [root](/page.md)\n")
    (tmp_path / "other.md").write_text("text")
    (tmp_path / "page.md").write_text(f"{PAGE}\n{line}\n")
    found = [p for page in check_links.markdown_files() for p in check_links.broken_links(page)]
    assert found == ([problem] if problem else [])
