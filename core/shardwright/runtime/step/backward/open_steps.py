"""Detection of a rank that leaves a backward pass out.

Such a rank sends the headers of its next batch where the others expect gradients. A backend that gets more bytes than
it expects may end the process; one that gets fewer takes them for gradients.

Therefore a rank that has made more forward passes without a backward pass than is usual meets the others in the store
before it begins a batch. If all ranks do the same, they go on: loops with several forward passes before their backward
passes, or with none, are alike on all ranks.

Loops of one forward and one backward pass never meet. Loops without backward passes meet ever more rarely: ten times in
the first thousand batches. A difference that is missed here, as in the first step after such a loop, is still an error:
of sizes that differ, or of the next headers, which carry a checksum of the calls before them.
"""

from __future__ import annotations

from collections import deque

from shardwright.runtime.ranks.environment import ShardingEnv

_NUM_RECENT = 4  # runs of forward passes that tell the usual number


class OpenSteps:
    """Counts of one collection's forward passes with gradients since its last backward pass, on one rank.

    Args:
        env: the ranks.
        number: number of the collection, as in :class:`shardwright.runtime.ranks.lockstep.Lockstep`.
    """

    def __init__(self, env: ShardingEnv, number: int) -> None:
        self._env, self._number = env, number
        self._num_forward = self._num_begun = self._most_before_begin = self._usual = 0
        self._recent: deque[int] = deque(maxlen=_NUM_RECENT)

    def begin(self) -> None:
        """Note the start of a batch; called before anything of it is sent.

        Raises:
            DistributedError: another rank does not begin a batch: it runs the backward pass of the last one.
        """
        self._num_begun += 1
        self._most_before_begin = self._num_forward
        if self._num_forward <= self._usual or self._env.world_size == 1:
            return
        name = self._env.lockstep.name(self._number)
        what = f"the start of a batch of {name} without the backward pass of the one before"
        self._env.communicator.meet(f"{self._number}/{self._num_begun}", what)
        self._usual = 2 * self._num_forward

    def forward(self) -> None:
        """Note a forward pass whose results will be differentiated."""
        self._num_forward += 1

    def backward(self) -> None:
        """Note a backward pass; the forward passes before it tell the usual number from now on."""
        if self._num_forward:
            self._recent.append(self._most_before_begin)
            # The second largest of late, so that one evaluation with gradients does not change the usual number.
            self._usual = sorted(self._recent)[-2] if len(self._recent) > 1 else 0
        self._num_forward = 0
