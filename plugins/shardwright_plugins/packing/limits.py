"""Limits of bins: how full these are, what is over, how much may be tried. Legend: W bins, D dimensions, K items."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from attrs import define

from shardwright.planning.options import FREE, Floats, Ints

# Rounding: a bin is over its limit by more than this part of it.
SLACK = 1e-9
_LEAST = 1e-300


def never() -> bool:
    """Time is never over."""
    return False


@define
class Effort:
    """How much may still be done, in steps of about the same time; the same on any machine, unlike seconds.

    Args:
        left: steps; below 1 nothing more is tried.
        is_over: whether the time for the whole search is over; then, too, nothing more is tried.
    """

    left: float = np.inf
    is_over: Callable[[], bool] = never

    @property
    def is_spent(self) -> bool:
        """Whether nothing more may be done."""
        return self.left < 1 or self.is_over()


def memory_limits(capacity_bytes: Ints) -> Floats:
    """Limits of memory that, exceeded by rounding, are still no more than there is: ``[W, M]``."""
    limits: Floats = capacity_bytes / (1 + SLACK)
    return limits


def gang_bins(used: Floats, limit: Floats, size: Floats, local: Ints, bins_per_host: int) -> list[int]:
    """The bins of the host where a gang of items ``[K, D]`` does least harm, one an item."""
    hosts = len(used) // bins_per_host
    trial = used.reshape(hosts, bins_per_host, -1).copy()
    most = limit.reshape(trial.shape)
    places = []
    rows = np.arange(hosts)
    for index, place in enumerate(local.tolist()):
        is_free = place == FREE
        after = (trial + size[index]) / most if is_free else most
        column = after.max(axis=2).argmin(axis=1) if is_free else np.full(hosts, place)
        trial[rows, column] += size[index]
        places.append(column)
    over = np.maximum(trial / most - 1, 0).sum(axis=(1, 2))
    fullest = (trial[..., 0] / most[..., 0]).max(axis=1)
    host = int(np.lexsort((fullest, over))[0])
    return [host * bins_per_host + int(column[host]) for column in places]


def fullness(parts: Floats) -> Floats:
    """How full bins are, by their fullest dimension; of equally full ones, that with less time comes first."""
    result: Floats = parts.max(axis=-1) + 0.05 * parts[..., 0]
    return result


def excess(used: Floats, limit: Floats) -> Floats:
    """By how much bins are over their limits, in parts of them, all dimensions together: ``[..., D]`` to ``[...]``."""
    room = np.maximum(limit, _LEAST)  # shards may cost nothing, and so their limit may be 0
    result: Floats = np.maximum(used / room - (1 + SLACK), 0).sum(axis=-1)
    return result
