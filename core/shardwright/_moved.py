"""Names that stand elsewhere now, and are still found where they were."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any


def moved(old: str, places: Mapping[str, str], *, stacklevel: int = 2) -> Callable[[str], Any]:
    """Make the ``__getattr__`` of a module whose names stand elsewhere: each is found there, with a warning.

    Args:
        old: name of the module.
        places: name of the module where each stands now.
        stacklevel: stack level of the warning, counted from what is returned.
    """

    def find(name: str) -> Any:
        if name == "__all__":  # for `import *`
            return sorted(places)
        if name not in places:
            raise AttributeError(f"module {old!r} has no attribute {name!r}")
        new = places[name]
        warnings.warn(
            f"{old}.{name} stands in {new} now: from {new} import {name}",
            DeprecationWarning,
            stacklevel=stacklevel,
        )
        return getattr(importlib.import_module(new), name)

    return find
