"""TorchRec's scripts on shardwright, TorchRec's plans in and out, and TorchRec's own estimators as a plugin.

Names are imported on first use: child processes of a script import this package before they do anything.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwright_torchrec.names import install as install
    from shardwright_torchrec.names import is_installed as is_installed
    from shardwright_torchrec.names import uninstall as uninstall
    from shardwright_torchrec.plans import read_plan as read_plan
    from shardwright_torchrec.plans import to_torchrec as to_torchrec
    from shardwright_torchrec.plans import write_plan as write_plan

__all__ = ["install", "is_installed", "read_plan", "to_torchrec", "uninstall", "write_plan"]

_PLANS = frozenset({"read_plan", "to_torchrec", "write_plan"})


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{'plans' if name in _PLANS else 'names'}"), name)
