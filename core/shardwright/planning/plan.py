"""The sharding plan: for each table of each module its sharding type, kernel and shards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import attrs
from attrs import field, frozen

from shardwright.errors import InvalidInputError, PlanError
from shardwright.planning.layouts import Block, ColumnRange, Dataflow, Exchange, Layout, RowMap, RowPart, RowsSplit


@frozen
class ShardMetadata:
    """One shard: its offsets and sizes in the table ``[rows, columns]`` and where it lives (``"rank:0/cpu"``).

    For row maps that are no ranges, ``shard_offsets[0]`` is 0 and ``shard_sizes[0]`` counts the part's rows.
    """

    shard_offsets: list[int]
    shard_sizes: list[int]
    placement: str


@frozen
class EnumerableShardingSpec:
    """The shards of a table, in TorchRec's form."""

    shards: list[ShardMetadata]


@frozen(hash=False)
class ParameterSharding:
    """How one table is sharded.

    Args:
        sharding_type: name of the sharding type.
        compute_kernel: name of the compute kernel.
        layout: its blocks, each on a rank.
        device: type of the device of its shards.
    """

    sharding_type: str
    compute_kernel: str
    layout: Layout = field(repr=False)
    device: str = field(default="cpu", repr=False)

    @layout.validator
    def _all_placed(self, attribute: Any, value: Layout) -> None:
        if any(block.rank is None for block in value.blocks):
            raise InvalidInputError("each block of a plan's layout needs a rank")

    @property
    def ranks(self) -> list[int]:
        """The rank of each shard."""
        return [_rank(block) for block in self.layout.blocks]

    @property
    def sharding_spec(self) -> EnumerableShardingSpec:
        """The shards in TorchRec's form."""
        return EnumerableShardingSpec([_metadata(block, self.device) for block in self.layout.blocks])

    def __repr__(self) -> str:
        return (
            f"ParameterSharding(sharding_type={self.sharding_type!r}, compute_kernel={self.compute_kernel!r}, "
            f"ranks={self.ranks}, sharding_spec={self.sharding_spec})"
        )


def _rank(block: Block) -> int:
    assert block.rank is not None  # the validator of ParameterSharding
    return block.rank


def _metadata(block: Block, device: str) -> ShardMetadata:
    bounds = block.rows.bounds
    suffix = f":{block.rank}" if device != "cpu" else ""
    return ShardMetadata(
        shard_offsets=[bounds[0] if bounds else 0, block.columns.start],
        shard_sizes=[block.num_rows, block.num_columns],
        placement=f"rank:{block.rank}/{device}{suffix}",
    )


class EmbeddingModuleShardingPlan(dict[str, ParameterSharding]):
    """The plan of one module: table name -> :class:`ParameterSharding`."""
