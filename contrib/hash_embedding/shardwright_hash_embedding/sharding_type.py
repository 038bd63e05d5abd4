"""The sharding type: ids to all ranks by their hash."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

import shardwright as sw
from shardwright_hash_embedding.hashing import HashedIds
from shardwright_hash_embedding.settings import HashSettings


class HashRows(sw.ShardingType):
    """The capacity of a table in equal parts, one on each rank; an id belongs to the rank that its hash says.

    For tables whose constraints have :class:`HashSettings` among their ``extras``.
    """

    name: ClassVar[str] = "hash_rows"
    abbreviation: ClassVar[str] = "HASH"
    offered: ClassVar[sw.Offered] = "always"  # asked for by extras, for the tables that have them
    row_maps: ClassVar[tuple[type[sw.RowMap], ...]] = (HashedIds,)

    def layouts(
        self, table: sw.TableSpec, topology: sw.Topology, constraints: sw.ParameterConstraints
    ) -> Iterable[sw.Layout]:
        """One block a rank, each with room for as many ids; none where a rank would have no room."""
        settings = HashSettings.from_extras(constraints.extras or {})
        rows = HashedIds(table.num_embeddings, parts=topology.world_size)
        if settings is None or not rows.num_rows_of(topology.world_size - 1):
            return
        run = sw.BlockRun(rows, table.all_columns, rows.num_parts, rank=0)
        yield sw.Layout([run], extras=settings.to_extras())
