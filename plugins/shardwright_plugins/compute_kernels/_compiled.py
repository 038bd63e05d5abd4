"""Checks of whether compiled kernels can be used on this machine."""

from __future__ import annotations

import importlib
from functools import cache


@cache
def import_failure(module: str, compiler: str) -> str | None:
    """Return why a module of compiled kernels cannot be used here, or ``None``; tried once.

    Args:
        module: full name of the module.
        compiler: name of its compiler, for people.
    """
    try:
        importlib.import_module(module)
    except Exception as error:  # whatever a broken or an unfit version raises
        return f"{compiler} cannot be used here: {type(error).__name__}: {error}"
    return None
