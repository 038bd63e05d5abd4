"""Work that all ranks do well, or for which all raise one error."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from shardwright.errors import CheckpointError, DistributedError, ShardwrightError
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.ranks.lockstep import by_rank

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
    kind, text, facts = told[first]
    raise kind(text, **facts)


def _told(error: Exception, rank: int) -> tuple[type[ShardwrightError], str, Mapping[str, Any]]:
    """Class, text and attributes of the error that the other ranks raise."""
    if isinstance(error, ShardwrightError):
        return type(error), str(error), error.facts
    return CheckpointError, f"rank {rank}: {type(error).__name__}: {error}", {}


def compare_places(env: ShardingEnv, path: str | os.PathLike[str], step: int | None) -> None:
    """Check that all ranks mean one checkpoint.

    Args:
        env: the ranks.
        path: folder that this rank was given.
        step: step that this rank was given.

    Raises:
        DistributedError: they do not; the text is the same on every rank.
    """
    told = env.communicator.all_gather_objects(f"{str(path)!r}, step={step}")
    if len(set(told)) > 1:
        raise DistributedError(
            f"the ranks named different checkpoints: {by_rank(told, env.communicator.global_ranks)}. Give every rank "
            "the same path and step"
        )
