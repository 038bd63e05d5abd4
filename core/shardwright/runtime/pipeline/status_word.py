"""Status words: each rank's status of its next batch, in a collective of its own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.ranks.sharding_groups import ShardingEnv2D
from shardwright.runtime.step.batches.inputs import Status, goes_on
from shardwright.runtime.step.batches.rank_problems import RankProblem, kind_of, kind_of_all, raise_problems


class GroupsWord:
    """Exchange of a batch's errors between sharding groups: each rank tells its replicas the error of its group.

    Args:
        env: the ranks.
        error: error of this rank's group, or ``None``.
    """

    def __init__(self, env: ShardingEnv2D, error: Exception | None) -> None:
        self._env, self._error = env, error

    def exchange(self) -> Exception | None:
        """Exchange errors; return this group's, or else another's, or ``None``."""
        channel, device = self._env.replicas.header_channel
        ones = [1] * channel.world_size
        sent = torch.full((channel.world_size,), int(self._error is not None), device=device)
        received = torch.empty_like(sent)
        channel.all_to_all(received, sent, ones, ones, label="status of the sharding groups").wait()
        if not received.any():
            return None
        mine = None if self._error is None else (kind_of(self._error), str(self._error))
        told = [other for other in channel.all_gather_objects(mine) if other is not None]
        text = "; ".join(dict.fromkeys(text for _, text in told))
        return self._error or kind_of_all(kind for kind, _ in told)(text)


class StatusWord:
    """Exchange of all ranks' statuses of a batch, without ids.

    Args:
        env: the ranks.
        status: status of this rank's batch.
        error: its error, or ``None``.
    """

    statuses: Sequence[Status] = ()

    def __init__(self, env: ShardingEnv, status: Status, error: Exception | None = None) -> None:
        self._error = error
        self._communicator, device = env.header_channel
        ones = [1] * env.world_size
        sent = torch.full((env.world_size,), int(status), device=device)
        self._received: Tensor = torch.empty_like(sent)
        self._work = self._communicator.all_to_all(self._received, sent, ones, ones, label="status")

    def send(self) -> bool:
        """Wait for the words.

        Raises:
            Exception: a rank's iterator failed. That rank raises its own error, the others one with its text.
        """
        self._work.wait()
        self.statuses = [Status(word) for word in self._received.tolist()]
        if Status.STOPPED not in self.statuses:
            self._complain()
        return goes_on(self.statuses)

    def _complain(self) -> None:
        """Raise the problems of any rank."""
        error = self._error
        try:
            raise_problems(
                self.statuses, [0] * len(self.statuses), self._communicator, RankProblem.of(error, None)
            )
        except Exception:
            if error is not None:
                raise error from None  # here it says more than its text
            raise
