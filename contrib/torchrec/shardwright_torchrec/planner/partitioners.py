"""TorchRec's partitioners, and scripts' own in shardwright's planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

import shardwright as sw
from shardwright_torchrec.planner.types import (
    DeviceHardware,
    PartitionByType,
    Partitioner,
    Perf,
    PlannerError,
    Shard,
    ShardingOption,
    Storage,
)

_FREE = -1


class SortBy(Enum):
    """Order in which options are placed: largest first, or slowest first."""

    STORAGE = "storage"
    PERF = "perf"


@dataclass
class Ranks:
    """The ranks that a partitioner places shards on.

    Args:
        devices: memory left and time taken of each rank.
        local_world_size: ranks of a host, neighbours.
    """

    devices: list[DeviceHardware]
    local_world_size: int

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return len(self.devices)


class GreedyPerfPartitioner(Partitioner):
    """Gives each shard to the rank that has taken the least time and has room, inside the planner.

    Args:
        sort_by: not needed: slowest first, and largest first where that leaves a shard without room.
        balance_modules: not supported.
    """

    plugin: ClassVar[str] = "greedy_perf"

    def __init__(self, sort_by: SortBy = SortBy.STORAGE, balance_modules: bool = False) -> None:
        _refuse_balance(self, balance_modules)

    def partition(self, *arguments: Any, **further: Any) -> Any:
        """Refuse, by name: nothing is placed beside a planner.

        Raises:
            UnsupportedError: always.
        """
        name = type(self).__name__
        how = (
            f"give it as EmbeddingShardingPlanner(partitioner={name}()). A partitioner"
            if type(self).__module__ == __name__
            else f"{name}, which changes one of these, cannot. One"
        )
        raise sw.UnsupportedError(
            f"TorchRec's partitioners place shards inside a planner: {how} that places them itself derives from "
            "torchrec.distributed.planner.types.Partitioner"
        )


class MemoryBalancedPartitioner(GreedyPerfPartitioner):
    """Gives each shard to the rank with the most memory left, inside the planner.

    Args:
        max_search_count: not needed.
        tolerance: not needed.
        balance_modules: not supported.
    """

    plugin: ClassVar[str] = "memory_balanced"

    def __init__(
        self, max_search_count: int = 10, tolerance: float = 0.02, balance_modules: bool = False
    ) -> None:
        super().__init__(SortBy.STORAGE, balance_modules)


def _refuse_balance(partitioner: Partitioner, balance_modules: bool) -> None:
    if balance_modules:
        raise sw.UnsupportedError(
            f"{type(partitioner).__name__}(balance_modules=True) is not supported: shards of all modules are placed "
            "together"
        )


class OwnPartitioner(sw.Partitioner):
    """A partitioner that a script has written.

    Args:
        partitioner: the script's.
    """

    name: ClassVar[str] = "own_partitioner"

    def __init__(self, partitioner: Partitioner) -> None:
        self.partitioner = partitioner

    def place(self, shards: sw.ProposedShards) -> npt.NDArray[np.int64] | sw.Misfit:
        """The script's placement, or a shard that did not fit.

        Raises:
            PlanningError: a shard was given no rank.
        """
        if not len(shards):
            return shards.rank  # all are where their layouts have put them
        proposal, order = _proposal(shards)
        try:
            self.partitioner.partition(proposal, _ranks(shards))
        except PlannerError:
            return shards.misfit(int(np.argmax(shards.memory_bytes.sum(axis=1))), shards.fixed_bytes.copy())
        ranks = np.full(len(shards), _FREE)
        for place, shard in order:
            if shard.rank is None:
                raise sw.PlanningError(
                    f"{type(self.partitioner).__name__}.partition() left a shard without a rank"
                )
            ranks[place] = shard.rank
        return ranks


def _proposal(shards: sw.ProposedShards) -> tuple[list[ShardingOption], list[tuple[int, Shard]]]:
    """The shards as options, one a table; and each shard with its position."""
    tables: dict[int, list[tuple[int, Shard]]] = {}
    for place, table in enumerate(shards.table.tolist()):
        tables.setdefault(table, []).append((place, _shard(shards, place)))
    options = [_option(shards, table, own) for table, own in tables.items()]
    return options, [placed for own in tables.values() for placed in own]


def _shard(shards: sw.ProposedShards, place: int) -> Shard:
    memory = dict(zip(shards.tiers, shards.memory_bytes[place].tolist(), strict=True))
    fixed = int(shards.rank[place])
    return Shard(
        [0, 0],
        [0, 0],
        Storage(memory.get("hbm", 0), memory.get("ddr", 0)),
        Perf(float(shards.cost_ms[place]), 0.0, 0.0, 0.0),
        None if fixed == _FREE else fixed,
    )


def _option(shards: sw.ProposedShards, table: int, own: Sequence[tuple[int, Shard]]) -> ShardingOption:
    first = own[0][0]
    kind = PartitionByType.DEVICE
    if own[0][1].rank is not None:
        kind = PartitionByType.UNIFORM
    elif int(shards.gang[first]) != _FREE:
        kind = PartitionByType.HOST
    found = [shard for _, shard in own]
    return ShardingOption(f"table_{table}", None, ("", None), [1.0], 1, "", kind.value, "", found)


def _ranks(shards: sw.ProposedShards) -> Ranks:
    """The ranks with what shards that are not among these leave of them."""
    left = shards.capacity_bytes - shards.fixed_bytes
    rows = [dict(zip(shards.tiers, row, strict=True)) for row in left.tolist()]
    devices = [
        DeviceHardware(rank, Storage(row.get("hbm", 0), row.get("ddr", 0)), Perf(float(time), 0, 0, 0))
        for rank, (row, time) in enumerate(zip(rows, shards.fixed_ms.tolist(), strict=True))
    ]
    return Ranks(devices, shards.local_world_size)
