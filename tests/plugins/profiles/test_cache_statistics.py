"""Cache statistics from samples of batches that can be reckoned by hand."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pytest

import shardwright as sw
from shardwright_plugins.profiles import cache_statistics

CYCLE = [[number % 4] for number in range(40)]  # a row is used again after three others


@pytest.mark.parametrize(("rows_held", "misses"), [(1, 1.0), (3, 1.0), (4, 0.0), (10, 0.0)])
def test_cycle_hits_as_soon_as_the_cache_holds_all_of_it(rows_held: int, misses: float) -> None:
    stats = cache_statistics(CYCLE, 10)
    assert stats.expected_miss_rate(rows_held / 10) == misses
    assert stats.expected_lookups == 1


def test_lfu_keeps_what_is_used_most_and_lru_what_was_used_last() -> None:
    batches = [[0] if number % 3 else [1 + number] for number in range(90)]  # a hot row among rows used once
    lfu, lru = (cache_statistics(batches, 100, algorithm=name) for name in ("lfu", "lru"))
    assert lfu.expected_miss_rate(0.01) == pytest.approx(1 / 3)
    assert lru.expected_miss_rate(0.01) == pytest.approx(2 / 3)
    assert lru.expected_miss_rate(0.02) == pytest.approx(1 / 3)
    assert lfu.expected_miss_rate(1.0) == 0.0


def test_cacheability_is_less_where_few_rows_are_used_again_and_again() -> None:
    hot = cache_statistics(CYCLE, 100)
    cold = cache_statistics([[number] for number in range(40)], 100)
    assert hot.cacheability < 0.1 < 0.9 < cold.cacheability


@pytest.mark.parametrize("algorithm", ["lru", "lfu"])
def test_sample_of_a_huge_table_takes_memory_for_the_sample_alone(algorithm: str) -> None:
    """Ten thousand million rows, of which a sample has some hundred; a number for each row would be 40 GB."""
    generator = np.random.default_rng(0)
    seen = generator.integers(0, 10**10, 200)
    batches = [generator.choice(seen, 50) for _ in range(20)]
    cache_statistics(CYCLE, 10, algorithm=algorithm)  # what the first call imports takes memory too
    tracemalloc.start()
    try:
        stats = cache_statistics(batches, 10**10, algorithm=algorithm)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20  # of the sample 8 kB
    assert stats.expected_miss_rate(0.01) < 0.1  # of that many rows all of the sample's


@pytest.mark.parametrize(
    ("batches", "told"),
    [
        ([[1]], "a sample of 1 batches says nothing of reuse"),
        ([[1], [2, 10]], "batch 1 of the sample has ids from 2 to 10; the table has 10 rows"),
        ([[-1], [2]], "batch 0 of the sample has ids from -1 to -1"),
        ([[1], [1.5]], "batch 1 of the sample is float64: give whole numbers"),
        ([None, [1]], "batch 0 of the sample is object: give whole numbers"),
        ([[1, [2, 3]], [1]], "batch 0 of the sample is no array of ids"),
    ],
)
def test_sample_that_is_too_small_or_of_another_table_is_refused(batches: Any, told: str) -> None:
    with pytest.raises(sw.InvalidInputError, match=told):
        cache_statistics(batches, 10)
