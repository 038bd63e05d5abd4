"""The gradients of what is replicated are averaged by ``DistributedDataParallel``; here its failures get names.

It makes two kinds of collectives: sums of buckets of gradients while a backward pass goes on, and once, before the
second forward pass, an agreement on these buckets. Where a rank is lost, its errors say at most that a connection was
closed, so the communicator is asked to say more, as it does of the collectives of tables. That costs a bucket one or
two tenths of a millisecond: a call of Python's before its sum, and one after it.
"""

from __future__ import annotations

from typing import Any, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from shardwright.runtime.environment import ShardingEnv

GRADIENTS = "the sum of the dense gradients"
BUCKETS = "the agreement on buckets of dense gradients"
_NOT_LOST = "Expected to have finished reduction"  # what a user is to do about parameters without gradients


@final
class DenseDataParallel(DistributedDataParallel):
    """``DistributedDataParallel`` on the CPU whose errors name the collective and the ranks that are lost.

    Args:
        module: what is replicated.
        env: the ranks, with a process group.
        options: of ``DistributedDataParallel``.
    """

    def __init__(self, module: torch.nn.Module, env: ShardingEnv, **options: Any) -> None:
        super().__init__(module, process_group=env.process_group, **options)
        self._env = env
        self.register_comm_hook(None, lambda _, bucket: self._sum(bucket))

    def _sum(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Average a bucket's gradients as torch does without a hook: divided first, then summed."""
        values = bucket.buffer().div_(self._env.world_size)
        work = dist.all_reduce(values, group=self._env.process_group, async_op=True)
        assert work is not None  # this rank is in the group
        summed: torch.futures.Future[Tensor] = work.get_future().then(self._summed)
        return summed

    def _summed(self, future: Any) -> Tensor:
        with self._env.communicator.named(GRADIENTS):
            values: Tensor = future.value()[0]
        return values

    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        try:
            return super()._pre_forward(*inputs, **kwargs)
        except RuntimeError as error:
            if str(error).startswith(_NOT_LOST):
                raise
            with self._env.communicator.named(BUCKETS):
                raise
