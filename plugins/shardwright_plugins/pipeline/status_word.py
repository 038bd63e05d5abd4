"""Status words: each rank's status of its next batch, in a collective of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from shardwright.errors import DistributedError, ShardwrightError
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.ranks.together import by_rank
from shardwright.runtime.step.batches.rank_problems import (
    RankProblem,
    Status,
    kind_of,
    kind_of_all,
    who_ended,
)


def exchange_statuses(
    env: ShardingEnv, status: Status, error: Exception | None = None, *, is_shared: bool = False
) -> tuple[Sequence[Status], Exception | None]:
    """Exchange the statuses of all ranks' batches without ids, and the texts of errors if there are some.

    Args:
        env: the ranks.
        status: status of this rank's batch.
        error: the error of its batch, or ``None``.
        is_shared: other ranks have the error, too, whose text names the rank that it comes from.

    Returns:
        Status of each rank, ``[W]``, and the error: this rank's own, or another with the texts of all, or ``None``.
    """
    channel, device = env.header_channel
    splits = [2] * env.world_size
    sent = torch.tensor([status, error is not None], device=device).repeat(env.world_size)
    received = torch.empty_like(sent)
    channel.all_to_all(received, sent, splits, splits, label="status").wait()
    words, has_error = received.view(-1, 2).T.tolist()
    statuses = [Status(word) for word in words]
    if not any(has_error):
        return statuses, None
    told = [own for own in channel.all_gather_objects(_told(env, error, is_shared)) if own is not None]
    shared = dict.fromkeys(text for _, text, rank in told if rank is None)
    # A rank that failed by itself says less than those of its sharding group, which name it.
    alone = {
        rank: text for _, text, rank in told if rank is not None and not any(text in one for one in shared)
    }
    said = filter(None, [*shared, by_rank([*alone.values()], [*alone])])
    return statuses, error or kind_of_all(kind for kind, _, _ in told)("; ".join(said))


def _told(
    env: ShardingEnv, error: Exception | None, is_shared: bool
) -> tuple[type[ShardwrightError], str, int | None] | None:
    """The kind and text of an error, and the rank that it is of, where the text does not name it."""
    if error is None:
        return None
    if is_shared:
        return kind_of(error), str(error), None
    problem = RankProblem.of(error)
    return problem.kind, problem.text, env.communicator.global_ranks[env.rank]


def raise_if_stopped(statuses: Sequence[Status]) -> None:
    """Raise where a rank has stopped.

    Raises:
        DistributedError: a rank gave the step up.
    """
    if Status.STOPPED in statuses:
        raise DistributedError(
            f"{who_ended(statuses)}. The step was given up on all ranks, nothing was updated"
        )
