"""Compiled kernels: whether they can be used on this machine, and Numba's loops of them."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any


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


def compiled(function: Any, **options: Any) -> Any:
    """Have Numba compile a loop on first use; kept on disk, unless there is no place that may be written to.

    Args:
        function: the loop, which gives the GIL up.
        options: further options of ``numba.njit``.
    """
    from numba import njit

    try:
        return njit(cache=True, nogil=True, **options)(function)
    except RuntimeError:
        return njit(nogil=True, **options)(function)
