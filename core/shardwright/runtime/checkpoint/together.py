"""Work that all ranks do well, or for which all raise one error."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from shardwright.errors import CheckpointError, ShardwrightError
from shardwright.runtime.ranks.environment import ShardingEnv

T = TypeVar("T")


def on_all_ranks(env: ShardingEnv, work: Callable[[], T]) -> T:
    """Do this rank's part of work; every rank makes this call.

    The ranks tell each other how it went by a collective that all of them come to, so the process group can be used
    after an error too.

    Args:
        env: the ranks.
        work: part of this rank, without a collective.

    Returns:
        What this rank's part gave.

    Raises:
        ShardwrightError: a rank failed; of several errors that of the first rank, on all of them.
    """
    own: Exception | None = None
    try:
        made = work()
    except OSError as error:
        own = CheckpointError(str(error))
        own.__cause__ = error
    except Exception as error:  # whatever it is, the others must not wait for this rank
        own = error
    told = env.communicator.all_gather_objects(None if own is None else _told(own, env.rank))
    first = next((rank for rank, error in enumerate(told) if error is not None), None)
    if first is None:
        return made
    if own is not None and first == env.rank:
        raise own
    kind, text = told[first]
    raise kind(text)


def _told(error: Exception, rank: int) -> tuple[type[ShardwrightError], str]:
    """Class and text of the error that the other ranks raise."""
    if isinstance(error, ShardwrightError):
        return type(error), str(error)
    return CheckpointError, f"rank {rank}: {type(error).__name__}: {error}"
