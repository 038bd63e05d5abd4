"""round_robin: row ``r`` on rank ``r % world_size``, as libraries of hash tables deal their ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import ClassVar

import shardwright as sw

api = 1


class RoundRobin(sw.ShardingType):
    """Rows dealt to all ranks one by one: rows that are asked for often and stand together are spread."""

    name: ClassVar[str] = "round_robin"
    abbreviation: ClassVar[str] = "RR"
    depends_on_shape_only: ClassVar[bool] = True

    def layouts(
        self, table: sw.TableSpec, topology: sw.Topology, constraints: sw.ParameterConstraints
    ) -> Iterable[sw.Layout]:
        """One block a rank."""
        rows = sw.RowsModulo(table.num_embeddings, parts=topology.world_size)
        yield sw.Layout([sw.BlockRun(rows, table.all_columns, rows.num_parts, rank=0)])


@sw.hookimpl
def shardwright_sharding_types() -> Sequence[type[sw.ShardingType]]:
    """Offer the type."""
    return [RoundRobin]
