"""Whether a rank leaves a backward pass out.

It would then send the headers of its next batch where the others expect gradients. A backend that is sent more than it
expects may end the process, and one that is sent less takes it for gradients. So a rank that begins a batch with more
steps still to go back through than ever before waits until all ranks do the same: several forward passes before their
backward passes, and forward passes that need none, are alike on all ranks. Loops of one forward and one backward pass
never wait.
"""

from __future__ import annotations

from shardwright.runtime.environment import ShardingEnv


class OpenSteps:
    """The steps of one collection that this rank has looked up with gradients, and not gone back through.

    Args:
        env: the ranks.
        number: the collection's, as in :class:`shardwright.runtime.lockstep.Lockstep`.

    Attributes:
        num_open: how many.
    """

    def __init__(self, env: ShardingEnv, number: int) -> None:
        self._env, self._number = env, number
        self.num_open = self._num_usual = self._num_begun = 0

    def begin(self) -> None:
        """A batch is begun; call it before anything of that is sent.

        Raises:
            DistributedError: another rank does not begin one, since it goes back through the last.
        """
        self._num_begun += 1
        if self.num_open <= self._num_usual or self._env.world_size == 1:
            return
        name = self._env.lockstep.name(self._number)
        what = f"the start of a batch of {name} without the backward pass of the one before"
        self._env.communicator.meet(f"{self._number}/{self._num_begun}", what)
        self._num_usual = self.num_open
