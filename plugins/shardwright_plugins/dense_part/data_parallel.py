"""The dense part of a model, kept equal on all ranks by ``DistributedDataParallel``; its failures get names here.

It makes three kinds of collectives: it copies rank 0's values when it is made, it sums buckets of gradients while a
backward pass goes on, and once, before the second forward pass, it agrees on these buckets. Where a rank is lost, its
own errors say at most that a connection was closed, and dtypes that differ end the process. So the values are copied
here, after they were compared; the agreement follows a meeting of all ranks; and sums are started by a hook, and waited
for by a callback at the end of the backward pass, before those of ``DistributedDataParallel`` itself. Nothing of that
runs on another thread; a bucket takes some 30 microseconds more.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

from shardwright.runtime.ranks.devices import is_host
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.sharded.tables.same_weights import copy_from_first
from shardwright.runtime.step.compiling import untraced

GRADIENTS = "the sum of the dense gradients"
BUCKETS = "the agreement on buckets of dense gradients"
_BUILD_ALIKE = "Build the same model, with the same dtypes and the same parameters frozen, on every rank"
_NOT_LOST = "Expected to have finished reduction"  # what a user is to do about parameters without gradients

# Buffers are copied when the model is wrapped, not in each step: under its new name where torch has it.
_BUFFERS_ONCE: Mapping[str, Any] = (
    {"forward_sync_buffers": False}
    if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    else {"broadcast_buffers": False}
)


def data_parallel(
    module: torch.nn.Module,
    env: ShardingEnv,
    device: torch.device,
    ignored: Collection[str],
    options: Mapping[str, Any],
) -> DistributedDataParallel | None:
    """Wrap the dense part of a model, if it has parameters that are trained; every rank makes this call.

    Args:
        module: the model with its sharded collections.
        env: all ranks, with a process group.
        device: this rank's device.
        ignored: names of the parameters and buffers of sharded tables.
        options: keyword arguments of ``DistributedDataParallel``.

    Raises:
        DistributedError: the dense part differs on some ranks; on all.
    """
    compare_dense_values(module, env, ignored)
    if all(name in ignored or not own.requires_grad for name, own in module.named_parameters()):
        return None
    options = {"gradient_as_bucket_view": True, **_BUFFERS_ONCE, **options}
    if is_host(device):
        return DenseDataParallel(module, env, **options)
    return DistributedDataParallel(module, **options, device_ids=[device], process_group=env.process_group)


@final
class DenseDataParallel(DistributedDataParallel):
    """``DistributedDataParallel`` whose errors name the collective and the ranks that are lost.

    Args:
        module: module that is replicated; on the CPU, where the host waits for collectives.
        env: the ranks, with a process group.
        options: keyword arguments of ``DistributedDataParallel``.

    Raises:
        DistributedError: a rank was lost before it copied rank 0's values.
    """

    def __init__(self, module: torch.nn.Module, env: ShardingEnv, **options: Any) -> None:
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        for _, value in _dense_values(module, ignored):
            copy_from_first(value, env.communicator)
        super().__init__(module, process_group=env.process_group, init_sync=False, **options)
        # Not this module itself: what holds hooks is not seen by the garbage collector.
        self._env, self._sums = env, _Sums(env)
        self.register_comm_hook(self._sums, lambda sums, bucket: sums.start(bucket))

    @untraced
    def _pre_forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if self._sums.are_to_be_dealt_anew and torch.is_grad_enabled():
            self._sums.are_to_be_dealt_anew = False
            self._env.agree(BUCKETS)
        started = time.monotonic()
        try:
            return super()._pre_forward(*inputs, **kwargs)
        except RuntimeError as error:
            if str(error).startswith(_NOT_LOST):
                raise
            with self._env.communicator.named(BUCKETS, started):
                raise


def compare_dense_values(module: torch.nn.Module, env: ShardingEnv, ignored: Collection[str]) -> None:
    """Check that what is replicated is of one form on all ranks; else copying and summing it would go wrong.

    Args:
        module: module that is replicated.
        env: the ranks.
        ignored: names of parameters and buffers that are not replicated.

    Raises:
        DistributedError: naming the first parameter or buffer that differs, and what it is on which ranks; on all. Or
            a rank was lost before.
    """
    forms = {repr(name): _form(value) for name, value in _dense_values(module, ignored)}
    env.agree("the dense part of the model", forms, _BUILD_ALIKE)


def _dense_values(module: torch.nn.Module, ignored: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Names of the parameters and buffers that are replicated, and these."""
    for name, value in chain(module.named_parameters(), module.named_buffers()):
        if name not in ignored:
            yield name, value


def _form(value: Tensor) -> str:
    """Dtype and shape, and whether it is trained."""
    frozen = "" if value.requires_grad or not isinstance(value, torch.nn.Parameter) else ", frozen"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{frozen}"


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

    @untraced
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

    @untraced
    def _finish(self, work: Any) -> None:
        with self._communicator.named(GRADIENTS):
            self._communicator.wait_for(work)
