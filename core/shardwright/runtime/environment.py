"""The ranks that share a model: their number, this one's place, and how they talk."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from attrs import field, frozen

from shardwright.contracts.comm_backend import CommBackend, Communicator
from shardwright.errors import DistributedError
from shardwright.fingerprint import compare_fingerprints
from shardwright.plugins import host
from shardwright.runtime.lockstep import Lockstep, by_rank

# All collections over one process group make their calls in one order, whoever made their environments.
_LOCKSTEPS: WeakKeyDictionary[Any, Lockstep] = WeakKeyDictionary()


@frozen
class ShardingEnv:
    """The ranks a module is sharded over, as one of them sees them.

    Args:
        communicator: the collectives among them.
        device_type: type of the devices whose tensors the communicator sends.
        process_group: the process group behind it; ``None`` for simulated ranks.
        local_world_size: ranks on this rank's host; all of them unless the launcher says otherwise.
        lockstep: the calls that this rank makes, in order.
    """

    communicator: Communicator = field(repr=False)
    device_type: str = "cpu"
    process_group: Any = field(default=None, repr=False)
    local_world_size: int = 1
    lockstep: Lockstep = field(factory=Lockstep, repr=False, eq=False)

    @property
    def rank(self) -> int:
        """This rank."""
        return self.communicator.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.communicator.world_size

    @classmethod
    def from_process_group(cls, process_group: Any = None, *, device_type: str | None = None) -> ShardingEnv:
        """The ranks of a process group; every rank of it makes this call.

        All ranks compare what plugins they have, since a job whose ranks differ there would hang later, and how many
        ranks they take a host to have, since ranks that differ there would add up other sums.

        Args:
            process_group: the group; the world by default.
            device_type: ``"cpu"``, ``"cuda"``, ...; by default the accelerator if the group's backend and this
                machine have one, else the CPU.

        Raises:
            DistributedError: no process group, or no comm backend for it; ranks differ in ``LOCAL_WORLD_SIZE``.
            PluginMismatchError: the ranks' plugins differ; names ranks and plugins, on every rank.
        """
        if not dist.is_initialized():
            raise DistributedError(
                "no process group: call torch.distributed.init_process_group first (torchrun sets what it needs)"
            )
        group = dist.group.WORLD if process_group is None else process_group
        backend, device_type = _choose_backend(group, device_type)
        communicator = backend.connect(group)
        local = _compare_ranks(communicator)
        return cls(communicator, device_type, group, local, _LOCKSTEPS.setdefault(group, Lockstep()))


def _local_world_size(world_size: int) -> int:
    """Ranks on this host: what the launcher says, or all."""
    told = os.environ.get("LOCAL_WORLD_SIZE") or str(world_size)
    if not told.isdecimal() or int(told) == 0:
        raise DistributedError(
            f"LOCAL_WORLD_SIZE is {told!r}; it must be the number of ranks on this host, at least 1"
        )
    return min(int(told), world_size)


def _choose_backend(group: Any, device_type: str | None) -> tuple[CommBackend, str]:
    """The comm backend that serves ``group`` on ``device_type``, and the device type."""
    name_of = dict(pair.split(":") for pair in str(dist.get_backend_config(group)).split(","))
    candidates = [device_type] if device_type else [*_accelerators(), "cpu"]
    backends = host().comm_backends
    for device in candidates:
        name = name_of.get(device, "")
        if name in backends and device in backends[name].devices:
            return backends.create(name), device
    wanted = sorted(set(name_of.values()))
    known = [f"{name} ({', '.join(backends[name].devices)})" for name in sorted(backends)]
    raise DistributedError(
        f"no comm backend for the process group's {wanted} on {device_type or 'this machine'}. "
        f"Known: {', '.join(known)}."
    )


def _accelerators() -> list[str]:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return [accelerator.type] if accelerator else []


def _compare_ranks(communicator: Communicator) -> int:
    """Compare plugins, and how many ranks a host has, with the other ranks; returns the latter."""
    # A rank whose plugins or variables cannot even be read takes part all the same, so that nobody waits for it.
    mine, problem = None, ""
    try:
        mine = (_local_world_size(communicator.world_size), host().fingerprint())
    except DistributedError as error:
        problem = str(error)
    except Exception as error:
        problem = f"plugins could not be loaded: {type(error).__name__}: {error}"
    gathered = communicator.all_gather_objects((mine, problem))
    problems = [f"rank {rank}: {problem}" for rank, (_, problem) in enumerate(gathered) if problem]
    if problems:
        raise DistributedError("; ".join(problems))
    locals_, fingerprints = zip(*(mine for mine, _ in gathered), strict=True)
    compare_fingerprints(fingerprints)
    check_local_world_sizes(locals_)
    return int(locals_[0])


def check_local_world_sizes(sizes: Sequence[int]) -> None:
    """Check that all ranks take a host to have equally many ranks.

    Args:
        sizes: what each rank takes, in rank order.

    Raises:
        DistributedError: they differ; the same text on every rank.
    """
    if len(set(sizes)) > 1:
        raise DistributedError(
            f"the ranks differ in how many of them a host has: {by_rank([f'LOCAL_WORLD_SIZE {n}' for n in sizes])}. "
            "Give every rank the same; where hosts differ, 1, so that each rank stands for a host"
        )
