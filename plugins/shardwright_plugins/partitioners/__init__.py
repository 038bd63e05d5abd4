"""The built-in partitioners."""

from __future__ import annotations

from shardwright.contracts import Partitioner
from shardwright.hookspecs import hookimpl


@hookimpl
def shardwright_partitioners() -> list[type[Partitioner]]:
    """Offer the built-in partitioners."""
    from shardwright_plugins.partitioners.greedy_perf import GreedyPerf
    from shardwright_plugins.partitioners.longest_first import LongestFirst
    from shardwright_plugins.partitioners.memory_balanced import MemoryBalanced

    return [GreedyPerf, LongestFirst, MemoryBalanced]
