from __future__ import annotations

import enum
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.errors import raises

from shardwright import (
    CacheParams,
    EmbeddingOffloadStats,
    InvalidInputError,
    OptimizerSpec,
    ParameterConstraints,
)

# Hits of 100 lookups once a table of 1000 rows has a cache of up to 250, 500, 750 and 1000 rows.
STATS = EmbeddingOffloadStats(0.2, 500, [60, 20, 15, 5], 1000)


@pytest.mark.parametrize(
    ("load_factor", "missed"), [(0.0, 1.0), (0.001, 0.4), (0.25, 0.4), (0.3, 0.2), (0.6, 0.05), (1.0, 0.0)]
)
def test_miss_rate_is_what_bins_up_to_the_caches_size_do_not_serve(load_factor, missed):
    assert STATS.expected_miss_rate(load_factor) == pytest.approx(missed)


def test_miss_rate_of_a_table_that_is_never_looked_up_is_nothing():
    assert EmbeddingOffloadStats(0, 0, [0, 0], 10).expected_miss_rate(0.0) == 0


@given(
    st.lists(st.floats(0, 1e6), min_size=1, max_size=20),
    st.integers(1, 10**9),
    st.floats(0, 1),
    st.floats(0, 1),
)
def test_miss_rate_is_a_part_and_never_rises_with_the_cache(counts, height, one, other):
    stats = EmbeddingOffloadStats(0.5, 1, counts, height)
    small, large = sorted([one, other])
    assert 1 >= stats.expected_miss_rate(small) >= stats.expected_miss_rate(large) >= 0


def test_cache_without_statistics_is_hit_as_often_as_it_is_large():
    assert CacheParams(0.3).miss_rate == pytest.approx(0.7)
    assert CacheParams().held == 0.2
    assert CacheParams(0.3, stats=STATS).miss_rate == pytest.approx(0.2)


class Algorithm(enum.Enum):  # FBGEMM's
    LRU = 0
    LFU = 1


def test_cache_of_fused_params_is_told_from_the_optimizer():
    fused_params = {
        "optimizer": "adam",
        "eps": 1e-8,
        "cache_load_factor": 0.4,
        "cache_algorithm": Algorithm.LFU,
    }
    assert CacheParams.from_fused_params(fused_params) == CacheParams(0.4, "lfu")
    assert OptimizerSpec.from_fused_params(fused_params) == OptimizerSpec("adam", parameters={"eps": 1e-8})
    assert CacheParams.from_fused_params(None) == CacheParams()


@pytest.mark.parametrize(
    "arguments", [{"load_factor": 0}, {"load_factor": 1.5}, {"algorithm": "fifo"}, {"stats": 3}]
)
def test_cache_params_wrong_value_raises(arguments):
    with raises(InvalidInputError, subject=next(iter(arguments))):
        CacheParams(**arguments)


@pytest.mark.parametrize("counts", [[], [1, -1], ["1"], 3])
def test_statistics_without_counts_raise(counts):
    with pytest.raises(InvalidInputError, match="mrc_hist_counts"):
        EmbeddingOffloadStats(0, 0, counts, 1)


def test_constraints_with_a_cache_survive_json():
    rule = ParameterConstraints(cache_params=CacheParams(0.3, "lfu", STATS))
    assert ParameterConstraints.from_data(json.loads(json.dumps(rule.to_data())), "t") == rule
    assert hash(rule.cache_params) == hash(CacheParams(0.3, "lfu", STATS))


def test_constraints_with_something_else_for_a_cache_raise():
    with raises(InvalidInputError, subject="cache_params"):
        ParameterConstraints(cache_params={"size": 3})
