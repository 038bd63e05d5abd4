"""Functions that one rank runs for all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch.distributed as dist

import shardwright as sw

__all__ = ["invoke_on_rank_and_broadcast_result", "is_leader", "run_on_leader"]

_P, _T = ParamSpec("_P"), TypeVar("_T")


def is_leader(pg: dist.ProcessGroup | None, leader_rank: int = 0) -> bool:
    """True on a group's rank `leader_rank`, and everywhere without a group."""
    return pg is None or dist.get_rank(pg) == leader_rank


def invoke_on_rank_and_broadcast_result(
    pg: dist.ProcessGroup, rank: int, func: Callable[..., _T], *args: Any, **kwargs: Any
) -> _T:
    """Call a function on one rank and give all ranks its result; every rank makes this call.

    Args:
        pg: process group.
        rank: number in the group of the rank that calls the function.
        func: the function.
        args: its arguments.
        kwargs: its keyword arguments.

    Raises:
        DistributedError: it failed on that rank, which raises the function's own error.
    """
    outcome: list[Any] = [None, None]
    failure: Exception | None = None
    if is_leader(pg, rank):
        try:
            outcome[0] = func(*args, **kwargs)
        except Exception as error:  # the other ranks wait for an answer
            failure, outcome[1] = error, f"{type(error).__name__}: {error}"
    dist.broadcast_object_list(outcome, group=pg, group_src=rank)
    if failure is not None:
        raise failure
    if outcome[1] is not None:
        raise sw.DistributedError(f"{getattr(func, '__name__', func)} failed on rank {rank}: {outcome[1]}")
    return outcome[0]  # type: ignore[no-any-return]


def run_on_leader(pg: dist.ProcessGroup, rank: int) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """A decorator: a call on all ranks runs on one, and gives all its result.

    Args:
        pg: process group.
        rank: number in the group of the rank that runs it.
    """

    def decorate(func: Callable[_P, _T]) -> Callable[_P, _T]:
        @functools.wraps(func)
        def run(*args: _P.args, **kwargs: _P.kwargs) -> _T:
            return invoke_on_rank_and_broadcast_result(pg, rank, func, *args, **kwargs)

        return run

    return decorate
