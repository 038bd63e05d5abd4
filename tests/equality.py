"""Sharded equals unsharded: what the conformance kit trains and compares, for the project's own tests."""

from __future__ import annotations

from shardwright_testing.equality.cases import BATCHES, Case, Table, layouts_of, shard_case, shardings_of
from shardwright_testing.equality.collectives import expected_collectives
from shardwright_testing.equality.training import (
    NUM_STEPS,
    RankResult,
    assert_equals_unsharded,
    count_profiled,
    count_simulated,
    sharder_spec,
    train_rank,
    train_simulated,
)

__all__ = [
    "BATCHES",
    "NUM_STEPS",
    "Case",
    "RankResult",
    "Table",
    "assert_equals_unsharded",
    "count_profiled",
    "count_simulated",
    "expected_collectives",
    "layouts_of",
    "shard_case",
    "sharder_spec",
    "shardings_of",
    "train_rank",
    "train_simulated",
]
