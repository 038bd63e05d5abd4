"""What each rank has to say of its next batch, where no ids of it are exchanged ahead."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwright.runtime.pipeline.fetching import Fetched
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.step.inputs import Status, goes_on
from shardwright.runtime.step.rank_problems import RankProblem, raise_problems


class StatusWord:
    """What each rank has to say of its batch, in a collective of its own."""

    statuses: Sequence[Status] = ()

    def __init__(self, env: ShardingEnv, fetched: Fetched) -> None:
        self._fetched = fetched
        self._communicator, device = env.header_channel
        ones = [1] * env.world_size
        sent = torch.full((env.world_size,), int(fetched.status), device=device)
        self._received: Tensor = torch.empty_like(sent)
        self._work = self._communicator.all_to_all(self._received, sent, ones, ones, label="status")

    def send(self) -> bool:
        """Wait for the words.

        Raises:
            Exception: a rank's iterator failed; there its own error, on the others one with its text.
        """
        self._work.wait()
        self.statuses = [Status(word) for word in self._received.tolist()]
        if Status.STOPPED not in self.statuses:
            self._complain()
        return goes_on(self.statuses)

    def _complain(self) -> None:
        """Raise what any rank has to say."""
        error = self._fetched.error
        try:
            raise_problems(
                self.statuses, [0] * len(self.statuses), self._communicator, RankProblem.of(error, None)
            )
        except Exception:
            if error is not None:
                raise error from None  # here it says more than its text
            raise
