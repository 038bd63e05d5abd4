"""hot_rows: the rows that carry most lookups on every rank, the others cut over all ranks.

A few rows get most of the lookups (Zipf's law), and replicating those saves the exchange of most ids and, of sequences,
most vectors: the idea of RecShard (Sethi et al. 2022, arXiv:2201.10095) and FlexShard (Sethi et al. 2023,
arXiv:2301.02959).
"""

from __future__ import annotations

from collections.abc import Sequence

import shardwright as sw
from shardwright_hot_rows.counts import AccessCounts
from shardwright_hot_rows.row_map import HotAndCold
from shardwright_hot_rows.sharding_type import HotRows

__all__ = ["AccessCounts", "HotAndCold", "HotRows"]

api = 1


@sw.hookimpl
def shardwright_sharding_types() -> Sequence[type[sw.ShardingType]]:
    """Offer the type."""
    return [HotRows]
