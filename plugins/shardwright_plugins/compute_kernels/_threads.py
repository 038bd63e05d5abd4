"""Work of kernels on several threads of this process, as many as torch may use, and its shares."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache
from itertools import pairwise
from typing import TypeAlias, TypeVar

import numpy as np
import torch

from shardwright.planning.arrays import Ints

T = TypeVar("T")
R = TypeVar("R")
Share: TypeAlias = tuple[int, int, int, int]
"""The first of a thread's slots or blocks and the one after the last; and which part of each, of how many."""

# Fewer elements than this are not worth handing to a second thread, which takes some 50 microseconds to wake.
_ELEMENTS_PER_THREAD = 200_000
_EVEN = 1.25  # times its fair share that a thread may have before slots or blocks are parted


def in_threads(work: Callable[[T], R], shares: Sequence[T]) -> list[R]:
    """Call ``work`` for each share, the first in this thread and each other in one of its own.

    Args:
        work: function of a share; it releases the GIL where it is long, and writes the same for any division into
            shares.
        shares: shares of the work, at least one.

    Returns:
        The result of each call, in the order of the shares.
    """
    first, *rest = shares
    if not rest:
        return [work(first)]
    threads = _threads(os.getpid(), max(torch.get_num_threads(), len(rest)))
    others = [threads.submit(work, share) for share in rest]
    try:
        mine = work(first)
    finally:
        wait(others)  # they write into what would be freed
    return [mine, *(other.result() for other in others)]


@lru_cache(maxsize=1)
def _threads(process: int, count: int) -> ThreadPoolExecutor:
    """Threads of this process; a forked one needs its own."""
    return ThreadPoolExecutor(count, thread_name_prefix="shardwright-kernel")


def shares_of(sizes_of: Callable[[], Ints], count: int, *, may_part: bool = True) -> list[Share]:
    """Shares of about equal size that together are everything, for as many threads as pay.

    Args:
        sizes_of: function that returns the work of each slot or block, in elements.
        count: number of slots or blocks.
        may_part: a slot or block may be parted between threads.
    """
    if torch.get_num_threads() == 1:
        return [(0, count, 0, 1)]
    sizes = sizes_of()
    num_threads = min(torch.get_num_threads(), 1 + int(sizes.sum()) // _ELEMENTS_PER_THREAD)
    return _dealt(sizes, num_threads, may_part=may_part)


def _dealt(sizes: Ints, num_threads: int, *, may_part: bool) -> list[Share]:
    """Ranges of whole slots or blocks, where they come out even; else a part of each."""
    count, total = len(sizes), int(sizes.sum())
    if num_threads == 1:
        return [(0, count, 0, 1)]
    ends = np.searchsorted(np.cumsum(sizes), total * np.arange(1, num_threads) / num_threads) + 1
    bounds = [0, *(min(int(end), count) for end in ends), count]
    spans = [span for span in pairwise(bounds) if span[0] < span[1]]
    largest = max(int(sizes[start:stop].sum()) for start, stop in spans)
    if may_part and largest > _EVEN * total / num_threads:
        return [(0, count, part, num_threads) for part in range(num_threads)]
    return [(start, stop, 0, 1) for start, stop in spans]
