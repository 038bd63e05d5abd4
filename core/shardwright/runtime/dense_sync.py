"""What is replicated is kept alike by ``DistributedDataParallel``; here its failures get names.

It makes three kinds of collectives: it copies rank 0's values when it is made, it sums buckets of gradients while a
backward pass goes on, and once, before the second forward pass, it agrees on these buckets. Where a rank is lost, its
own errors say at most that a connection was closed. So the first and the last kind follow a meeting of all ranks, and
sums are started by a hook, and waited for by a callback at the end of the backward pass, before those of
``DistributedDataParallel`` itself. Nothing of that runs on another thread; a bucket takes some 30 microseconds more.
"""

from __future__ import annotations

from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from shardwright.runtime.compiling import untraced
from shardwright.runtime.environment import ShardingEnv

COPIES = "the copying of dense parameters from rank 0"
GRADIENTS = "the sum of the dense gradients"
BUCKETS = "the agreement on buckets of dense gradients"
_NOT_LOST = "Expected to have finished reduction"  # what a user is to do about parameters without gradients


@final
class DenseDataParallel(DistributedDataParallel):
    """``DistributedDataParallel`` whose errors name the collective and the ranks that are lost.

    Args:
        module: what is replicated; on the CPU, where collectives are waited for by the host.
        env: the ranks, with a process group.
        options: of ``DistributedDataParallel``.

    Raises:
        DistributedError: a rank was lost before it copied rank 0's values, or its parameters are others.
    """

    def __init__(self, module: torch.nn.Module, env: ShardingEnv, **options: Any) -> None:
        _meet(env, COPIES)
        with env.communicator.named(COPIES):
            super().__init__(module, process_group=env.process_group, **options)
        # Not this module itself: what holds hooks is not seen by the garbage collector.
        self._env, self._sums = env, _Sums(env)
        self.register_comm_hook(self._sums, lambda sums, bucket: sums.start(bucket))

    @untraced
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._sums.are_to_be_dealt_anew and torch.is_grad_enabled():
            self._sums.are_to_be_dealt_anew = False
            _meet(self._env, BUCKETS)
        try:
            return super()._pre_forward(*inputs, **kwargs)
        except RuntimeError as error:
            if str(error).startswith(_NOT_LOST):
                raise
            with self._env.communicator.named(BUCKETS):
                raise


def _meet(env: ShardingEnv, what: str) -> None:
    """Wait, without a collective, until every rank is here: that ends in time to ask who is missing."""
    env.communicator.meet(env.lockstep.place(what), what)


@final
class _Sums:
    """The sums of one module's buckets.

    Args:
        env: the ranks.

    Attributes:
        are_to_be_dealt_anew: all were made once, and the ranks have not agreed on the buckets to come.
    """

    def __init__(self, env: ShardingEnv) -> None:
        self._communicator, self._group = env.communicator, env.process_group
        self._world_size = env.world_size
        self._is_first_pass, self.are_to_be_dealt_anew = True, False

    def start(self, bucket: Any) -> torch.futures.Future[Tensor]:
        """Begin to average a bucket's gradients as torch does without a hook: divided first, then summed, in place.

        Returns:
            The bucket, as if it were done: it is when the backward pass ends.
        """
        values = bucket.buffer().div_(self._world_size)
        with self._communicator.named(GRADIENTS):
            work = self._group.allreduce([values])
        # Each callback waits for one, so that a backward pass that fails leaves nothing to the next.
        Variable._execution_engine.queue_callback(partial(self._finish, work))
        if self._is_first_pass and bucket.is_last():
            self._is_first_pass, self.are_to_be_dealt_anew = False, True
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(values)
        return done

    def _finish(self, work: Any) -> None:
        with self._communicator.named(GRADIENTS):
            self._communicator.wait_for(work)
