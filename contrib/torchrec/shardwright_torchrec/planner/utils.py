"""Small functions of TorchRec's planner."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from shardwright_torchrec.planner.types import ShardingOption

_MIB = 1024**2
_GIB = 1024**3


def bytes_to_gb(num_bytes: int) -> float:
    """GiB of a number of bytes."""
    return num_bytes / _GIB


def bytes_to_mb(num_bytes: float) -> float:
    """MiB of a number of bytes."""
    return num_bytes / _MIB


def gb_to_bytes(gb: float) -> int:
    """Bytes of a number of GiB."""
    return int(gb * _GIB)


def mb_to_bytes(mb: float) -> int:
    """Bytes of a number of MiB."""
    return int(mb * _MIB)


def sharder_name(t: type[Any]) -> str:
    """Module and name of a class, with a dot between."""
    return f"{t.__module__}.{t.__name__}"


def placement(compute_device: str, rank: int, local_size: int) -> str:
    """Place of a rank in a plan: `"rank:1/cuda:1"`, `"rank:1/cpu"`."""
    device = compute_device if compute_device == "cpu" else f"{compute_device}:{rank % local_size}"
    return f"rank:{rank}/{device}"


def reset_shard_rank(proposal: Iterable[ShardingOption]) -> None:
    """Forget the ranks of a proposal's shards."""
    for option in proposal:
        for shard in option.shards:
            shard.rank = None


_PARTITION_BY = {
    "column_wise": "device",
    "data_parallel": "uniform",
    "grid_shard": "multi_host",
    "row_wise": "uniform",
    "table_column_wise": "host",
    "table_row_wise": "host",
    "table_wise": "device",
}
"""Sharding types of TorchRec -> the rule for the places of their shards, a value of `PartitionByType`."""


def get_partition_by_type(sharding_type: str) -> str:
    """The rule for the places of a sharding type's shards.

    Raises:
        ValueError: TorchRec has no such type.
    """
    if sharding_type not in _PARTITION_BY:
        raise ValueError(f"no sharding type {sharding_type!r}. Known: {', '.join(_PARTITION_BY)}.")
    return _PARTITION_BY[sharding_type]
