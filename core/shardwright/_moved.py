"""Names that stand elsewhere now, and are still found where they were."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from typing import Any


def moved(old: str, new: str, *, stacklevel: int = 2) -> Callable[[str], Any]:
    """The ``__getattr__`` of a module whose names stand in another: each is found there, with a warning.

    Args:
        old: name of the module.
        new: name of the module where they stand now.
        stacklevel: stack level of the warning, counted from what is returned.
    """

    def find(name: str) -> Any:
        if name.startswith("__"):  # the import machinery and tools look such up
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        value = getattr(importlib.import_module(new), name)
        warnings.warn(
            f"{old}.{name} stands in {new} now: from {new} import {name}",
            DeprecationWarning,
            stacklevel=stacklevel,
        )
        return value

    return find
