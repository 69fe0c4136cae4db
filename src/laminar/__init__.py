"""Asynchronous reinforcement learning for language models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from laminar.api import Trainer

__all__ = ["Trainer", "__version__"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """`laminar.Trainer` is imported when it is asked for: `import laminar` alone stays cheap."""
    if name == "Trainer":
        from laminar.api import Trainer

        return Trainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
