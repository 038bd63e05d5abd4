"""Calls of plugins while planning: what one raises or returns against its contract is an error that names it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwright.arguments import brief, problem
from shardwright.errors import PlanningError, ShardwrightError

if TYPE_CHECKING:
    from shardwright.planning.arrays import Ints


@contextmanager
def calling(plugin: str) -> Iterator[None]:
    """Within this, what a plugin raises names it; errors of ours and interrupts are left as they are.

    Args:
        plugin: its kind and name, ``"estimator 'acme'"``.

    Raises:
        PlanningError: instead of what the plugin raised.
    """
    try:
        yield
    except ShardwrightError:
        raise
    except Exception as error:
        raise PlanningError(f"{plugin} failed: {type(error).__name__}: {error}") from error


def check_answer(plugin: str, method: str, answer: Any, hint: Any) -> None:
    """Check what a plugin's method returned against the annotation of its contract.

    Raises:
        PlanningError: naming the plugin, the method, what it must return and what it did.
    """
    if wrong := problem(f"what {method}() returns", answer, hint):
        raise PlanningError(f"{plugin} broke its contract: {wrong}")


def whole_numbers(plugin: str, what: str, values: Any) -> Ints:
    """Option indices or ranks that a plugin gave, as an array.

    Raises:
        PlanningError: they are no whole numbers.
    """
    try:
        numbers = np.asarray(values)
    except ValueError:  # lists of unequal lengths
        numbers = np.empty(0)
    if numbers.dtype.kind not in "iu" or numbers.ndim != 1:
        raise PlanningError(
            f"{plugin} broke its contract: it must give {what}, an array of whole numbers; it gave {brief(values)}"
        )
    return numbers.astype(np.int64)
