"""Sharded equals unsharded: what the conformance kit trains and compares, for the project's own tests."""

from __future__ import annotations

from collections.abc import Sequence

from tests.equality.collectives import expected_collectives

from shardwright_testing.equality import training
from shardwright_testing.equality.cases import BATCHES, Case, Table, layouts_of, shard_case, shardings_of
from shardwright_testing.equality.training import (
    NUM_STEPS,
    RankResult,
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


def assert_equals_unsharded(
    case: Case, results: Sequence[RankResult], *, collectives: Sequence[int] | None = None
) -> None:
    """Compare all ranks with one process, and their collectives with what dataflows promise, or what is given."""
    promised = expected_collectives(case, NUM_STEPS) if collectives is None else collectives
    training.assert_equals_unsharded(case, results, collectives=promised)
