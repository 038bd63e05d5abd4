"""Training that is measured beside its plan, and a plan that follows the data."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwright_plugins.following.replanner import Look, Replanner
    from shardwright_plugins.following.step_times import StepTimes
    from shardwright_plugins.following.times import GroupTimes, MeasuredTimes, RankTimes

__all__ = ["GroupTimes", "Look", "MeasuredTimes", "RankTimes", "Replanner", "StepTimes"]

_MODULE_OF_NAME = {"Look": "replanner", "Replanner": "replanner", "StepTimes": "step_times"}


def __getattr__(name: str) -> Any:
    """Import a public name on first use: the search for a plan needs no torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULE_OF_NAME.get(name, 'times')}"), name)


def __dir__() -> list[str]:
    return __all__
