"""Places of ranks on hosts, from the launcher's environment, and a port for them to meet."""

from __future__ import annotations

import os
import socket

import torch
import torch.distributed as dist

_groups: dict[tuple[dist.ProcessGroup, str], tuple[dist.ProcessGroup, dist.ProcessGroup]] = {}
"""World and backend -> the groups that were made of it."""


def _from_environment(*names: str) -> int | None:
    found = [os.environ[name] for name in names if name in os.environ]
    return int(found[0]) if found else None


def get_free_port() -> int:
    """Number of a port of this host that nothing listens at now."""
    with socket.create_server(("localhost", 0)) as server:
        return int(server.getsockname()[1])


def get_local_size(world_size: int | None = None) -> int:
    """Ranks of this host; all ranks unless the launcher says otherwise.

    Args:
        world_size: number of ranks; the process group's by default.
    """
    told = _from_environment("LOCAL_WORLD_SIZE", "MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE")
    world_size = dist.get_world_size() if world_size is None else world_size
    return told if told and told <= world_size and world_size % told == 0 else world_size


def get_local_rank(world_size: int | None = None, rank: int | None = None) -> int:
    """Number of this rank on its host.

    Args:
        world_size: number of ranks; the process group's by default.
        rank: number of the rank; the process group's by default.
    """
    told = _from_environment("LOCAL_RANK", "MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK")
    size = get_local_size(world_size)
    if told is not None and 0 <= told < size:
        return told
    return (dist.get_rank() if rank is None else rank) % size


def get_group_rank(world_size: int | None = None, rank: int | None = None) -> int:
    """Number of this rank's host."""
    rank = dist.get_rank() if rank is None else rank
    return (rank - get_local_rank(world_size, rank)) // get_local_size(world_size)


def get_num_groups(world_size: int | None = None) -> int:
    """Number of hosts."""
    world_size = dist.get_world_size() if world_size is None else world_size
    return world_size // get_local_size(world_size)


def intra_and_cross_node_pg(
    device: torch.device | None = None, backend: str | None = None
) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """The group of this rank's host, and that of the ranks in its place on all hosts; every rank makes this call.

    A second call gives the same groups.

    Args:
        device: device of the tables; no groups on `meta`.
        backend: backend of the groups; the world's by default.
    """
    world = dist.group.WORLD
    if world is None or (device is not None and device.type == "meta"):
        return None, None
    key = (world, backend or dist.get_backend(world))
    if key not in _groups:
        ranks = torch.arange(dist.get_world_size()).reshape(-1, get_local_size())
        own, _ = dist.new_subgroups_by_enumeration(ranks.tolist(), backend=key[1])
        across, _ = dist.new_subgroups_by_enumeration(ranks.T.tolist(), backend=key[1])
        _groups[key] = (own, across)
    return _groups[key]
