"""Planning on one rank: the others wait as long as it takes, and all get the same plan or raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from shardwright.errors import PlanningError, ShardwrightError
from shardwright.planning.watch import Watch
from shardwright.runtime.ranks.environment import ShardingEnv

_Result = TypeVar("_Result")


def on_one_rank(
    env: ShardingEnv,
    work: Callable[[Watch], _Result],
    watch: Watch,
    *,
    to_text: Callable[[_Result], str],
    from_text: Callable[[str], _Result],
) -> _Result:
    """Do some work on rank 0 and give its result to every rank.

    Every rank makes this call. The others wait for rank 0 in the process group's store, where it leaves a sign of life
    every few seconds, whatever the group's time-out. It reads its own text back before it sends it, so that an
    unreadable result raises on every rank. Ctrl-C on any rank is left to rank 0, which ends the work early.

    Args:
        env: the ranks.
        work: function called on rank 0 with ``watch``.
        watch: tells the work when to end.
        to_text: writes the result as text.
        from_text: reads the result from text, on every rank.

    Raises:
        ShardwrightError: the work failed, or its result cannot be read; of the same class on every rank.
    """
    with env.together("planning"), watch.interruptible():
        if env.rank == 0:
            with env.ranks.busy():
                text, result = _written(work(watch), to_text, from_text)
        env.agree("planning on rank 0")
        text = env.communicator.broadcast_object(text if env.rank == 0 else "")
        return result if env.rank == 0 else from_text(text)


def _written(
    made: _Result, to_text: Callable[[_Result], str], from_text: Callable[[str], _Result]
) -> tuple[str, _Result]:
    """Write a result as text, and read it back."""
    text = to_text(made)
    try:
        return text, from_text(text)
    except ShardwrightError as error:
        raise PlanningError(f"what was made on rank 0 cannot be read again: {error}") from error
