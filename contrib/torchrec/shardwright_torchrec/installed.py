"""TorchRec itself, where it is installed."""

from __future__ import annotations

import importlib
import warnings
from types import ModuleType

import shardwright as sw
from shardwright_torchrec.names import is_installed

__all__ = ["torchrec_module", "why_not"]


def why_not() -> str | None:
    """The reason why TorchRec cannot be used here; None if it can."""
    if is_installed():
        return "the name 'torchrec' is shardwright's in this process: call shardwright_torchrec.uninstall() first"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it and FBGEMM say at import is not of the caller's making
            importlib.import_module("torchrec")
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        return f"TorchRec cannot be imported ({type(error).__name__}: {error}): pip install torchrec"
    return None


def torchrec_module(name: str) -> ModuleType:
    """One of TorchRec's own modules.

    Raises:
        UnsupportedError: It is not installed, or its name is taken.
    """
    if (reason := why_not()) is not None:
        raise sw.UnsupportedError(f"TorchRec itself is needed: {reason}")
    return importlib.import_module(name)
