"""Options and settings of all tests."""

from __future__ import annotations

import pytest
from hypothesis import settings

# The machines that run these tests are shared: a slow example is no fault, and a failure must come again.
settings.register_profile("laminar", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("laminar")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the long tests too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--slow"):
        return
    slow = [item for item in items if item.get_closest_marker("slow")]
    items[:] = [item for item in items if not item.get_closest_marker("slow")]
    config.hook.pytest_deselected(items=slow)
