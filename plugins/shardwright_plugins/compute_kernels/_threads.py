"""Work of kernels on several threads of this process, as many as torch may use."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import lru_cache
from typing import TypeVar

import torch

T = TypeVar("T")
R = TypeVar("R")


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
