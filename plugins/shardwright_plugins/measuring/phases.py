"""Times of the phases of real steps, by the names that estimators give them.

What kernels take is measured in their calls. A rank that has looked up waits in the exchange for the slowest. That wait
is no transport, so phases end when the last rank has ended them.

Legend: W ranks, N steps.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
from collections.abc import Mapping

import numpy as np
import torch
import torch.distributed as dist

from shardwright.planning.arrays import Floats
from shardwright.runtime.sharded.collections.sharded_collection import ShardedCollection
from shardwright.runtime.sharded.models.model_parallel import DistributedModelParallel
from shardwright_plugins.following.clocks import KernelClock

KERNEL_MARKS = ("lookup", "update_ahead", "update")
"""Kernel calls: lookups, and updates before and after the outputs were there."""
MARKS = ("forward", "outputs", "backward", *KERNEL_MARKS)
"""Columns of a rank's times: call of the module, wait for its outputs, backward pass, and kernels' parts of these."""
_TRIM, _TOP, _LARGEST = -1, -2, -3
"""Parameters of ``mallopt``: M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_THRESHOLD (malloc.h of glibc)."""


def kernel_clock(model: DistributedModelParallel) -> KernelClock:
    """The clock of all kernels of a model."""
    engines = [module.engine for module in model.modules() if isinstance(module, ShardedCollection)]
    return KernelClock([lookup for engine in engines for lookup in engine.lookups])


def keep_memory() -> None:
    """Have the allocator keep what is freed, as far as it is glibc's.

    Else it gives large results back after some steps, and takes them again: 3 300 page faults and 7 ms of a step of 22,
    in one run of a plan and not in the next (AMD EPYC in a virtual machine).
    """
    for parameter, value in ((_LARGEST, 1 << 30), (_TRIM, (1 << 31) - 1), (_TOP, 64 << 20)):
        _of_glibc("mallopt", parameter, value)


def give_back_memory() -> None:
    """Have the allocator give back what it kept, as far as it is glibc's.

    Else tables of each further plan take memory beside what those before them left in pieces, of other sizes: four
    ranks of 6 GiB each, as their plans say, had 8 GiB.
    """
    gc.collect()
    _of_glibc("malloc_trim", 0)


def _of_glibc(name: str, *arguments: int) -> None:
    with contextlib.suppress(OSError, AttributeError):
        getattr(ctypes.CDLL(None), name)(*arguments)


def phases_of(times: Floats) -> tuple[Floats, Mapping[str, Floats]]:
    """Time of each step and of its phases, s: ``[N]`` each; every rank makes this call, and gets the same.

    Args:
        times: this rank's :data:`MARKS` of each step, ``[N, marks]``, from a barrier on.
    """
    gathered = torch.empty(dist.get_world_size(), *times.shape, dtype=torch.float64)
    dist.all_gather(list(gathered.unbind()), torch.from_numpy(times))
    every = gathered.numpy()
    spans, kernels = every[..., :3], dict(zip(KERNEL_MARKS, np.moveaxis(every[..., 3:], -1, 0), strict=True))
    forward, outputs, backward = np.moveaxis(np.cumsum(spans, axis=-1).max(0), -1, 0)
    lookup = kernels["lookup"].max(0)
    ahead, update = kernels["update_ahead"].max(0), kernels["update"].max(0)
    phases = {
        "input_communication": forward - (kernels["lookup"] + kernels["update_ahead"]).max(0),
        "forward_compute": lookup,
        "forward_communication": outputs - forward,
        "backward_communication": backward - outputs - update,
        "backward_compute": ahead + update,
    }
    # A rank that is ahead may update before the others' outputs are there: then its exchange takes nothing.
    return backward, {name: np.maximum(own, 0.0) for name, own in phases.items()}
