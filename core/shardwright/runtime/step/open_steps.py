"""Whether a rank leaves a backward pass out.

It would then send the headers of its next batch where the others expect gradients. A backend that is sent more than it
expects may end the process, and one that is sent less takes it for gradients. So a rank that begins a batch after more
forward passes without a backward pass than is usual waits until all ranks do the same: several forward passes before
their backward passes, and forward passes that need none, are alike on all ranks. Loops of one forward and one backward
pass never wait; loops without backward passes wait ever more rarely, ten times in the first thousand batches. What is
not seen here, as in the first step after such a loop, is an error all the same, of sizes that differ or of the next
headers, which carry a checksum of the calls before them.
"""

from __future__ import annotations

from collections import deque

from shardwright.runtime.ranks.environment import ShardingEnv

_NUM_RECENT = 4  # runs of forward passes, which say what is usual


class OpenSteps:
    """The forward passes of one collection with gradients since its last backward pass, on one rank.

    Args:
        env: the ranks.
        number: the collection's, as in :class:`shardwright.runtime.ranks.lockstep.Lockstep`.
    """

    def __init__(self, env: ShardingEnv, number: int) -> None:
        self._env, self._number = env, number
        self._num_forward = self._num_begun = self._most_before_begin = self._usual = 0
        self._recent: deque[int] = deque(maxlen=_NUM_RECENT)

    def begin(self) -> None:
        """A batch is begun; call it before anything of that is sent.

        Raises:
            DistributedError: another rank does not begin one, since it goes back through the last.
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
        """Results that will be differentiated were looked up."""
        self._num_forward += 1

    def backward(self) -> None:
        """A backward pass is made: what came before it says what is usual from now on."""
        if self._num_forward:
            self._recent.append(self._most_before_begin)
            # What was twice of late: an evaluation with gradients does not make the training after it one.
            self._usual = sorted(self._recent)[-2] if len(self._recent) > 1 else 0
        self._num_forward = 0
