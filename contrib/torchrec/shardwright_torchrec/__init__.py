"""TorchRec's scripts on shardwright.

Names are imported on first use: child processes of a script import this package before they do anything.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwright_torchrec.names import install as install
    from shardwright_torchrec.names import is_installed as is_installed
    from shardwright_torchrec.names import uninstall as uninstall

__all__ = ["install", "is_installed", "uninstall"]


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.names"), name)
