"""memory_balanced: the largest shard first, where memory stays most even."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from shardwright.contracts.partitioner import Partitioner
from shardwright.planning.arrays import Floats, Ints
from shardwright.planning.search.placement import Misfit, ProposedShards
from shardwright_plugins.partitioners.greedy_perf import GreedyPerf
from shardwright_plugins.partitioners.longest_first import as_bins


class MemoryBalanced(Partitioner):
    """Places shards by memory alone: the largest first, where the fullest tier of its rank stays least full.

    As TorchRec's ``MemoryBalancedPartitioner`` does, it gives time away for memory that is used evenly; unlike that it
    looks at no other placements of the same time. If something is left without room, it places as ``greedy_perf`` does.
    """

    name: ClassVar[str] = "memory_balanced"

    def place(self, shards: ProposedShards) -> Ints | Misfit:
        """The rank of each shard, or which one did not fit."""
        misfit = shards.fixed_misfit()
        if misfit is not None:
            return misfit
        bins = as_bins(shards)
        weight: Floats = (shards.memory_bytes / np.maximum(shards.capacity_bytes.max(axis=0), 1)).max(axis=1)
        bins.fill(weight)
        # Where moves and swaps come to no end, time is no longer given away: what fits by the other rule fits.
        return bins.bin if bins.repair(400) else GreedyPerf().place(shards)
