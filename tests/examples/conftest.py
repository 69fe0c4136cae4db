"""Examples are scripts, not packages: tests load their files by path."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")
def load_example() -> Callable[[str], ModuleType]:
    """Import `examples/<path>` under a name of its own."""

    def load(path: str) -> ModuleType:
        name = "examples_" + path.removesuffix(".py").replace("/", "_")
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / path)
        assert spec is not None and spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)  # where dataclasses look for it
        spec.loader.exec_module(module)
        return module

    return load
