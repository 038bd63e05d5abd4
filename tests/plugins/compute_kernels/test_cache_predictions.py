"""Hit rates predicted from a sample of batches, beside those of the cache of rows."""

from __future__ import annotations

from itertools import product
from typing import Any

import attrs
import numpy as np
import pytest
from tests.plugins.compute_kernels.loops import CPU, block_spec, kernel_of
from tests.plugins.compute_kernels.test_row_cache import ALGORITHMS, bags_of

import shardwright as sw
from shardwright_plugins.profiles import cache_statistics

ROWS, BATCH, SAMPLE, WARM, MEASURED = 8_000, 400, 150, 50, 50


def zipf_batches(exponent: float, count: int) -> list[Any]:
    """Ids whose frequency is a power of their rank, ranks being scattered over the table."""
    random = np.random.default_rng(7)
    scattered = random.permutation(ROWS)
    total = np.cumsum(np.arange(1, ROWS + 1) ** -exponent)
    ranks = [np.searchsorted(total, random.random(BATCH) * total[-1]) for _ in range(count)]
    return [scattered[own] for own in ranks]


def measured_hit_rate(batches: list[Any], cache: sw.CacheParams, warm: int) -> float:
    spec = block_spec(ROWS, 4, optimizer=sw.OptimizerSpec("sgd", 0.1))
    spec = attrs.evolve(spec, request=attrs.evolve(spec.request, cache=cache))
    lookup: Any = kernel_of("mapped_caching").build([spec], device=CPU)
    before = (0, 0)
    for number, batch in enumerate(batches):
        if number == warm:
            before = (lookup.num_hits, lookup.num_misses)
        lookup.prefetch(bags_of([batch.tolist()]))
    hits, misses = lookup.num_hits - before[0], lookup.num_misses - before[1]
    return float(hits / (hits + misses))


@pytest.mark.parametrize(
    ("algorithm", "load_factor", "exponent"),
    [
        pytest.param(*case, marks=() if case[1:] == (0.2, 1.05) else pytest.mark.slow)
        for case in product(ALGORITHMS, (0.04, 0.2), (0.8, 1.05, 1.3))
    ],
)
def test_predicted_hit_rate_on_zipf_ids_is_the_measured_one_within_2_percent(
    algorithm: str, load_factor: float, exponent: float
) -> None:
    """The sample comes first; what is measured are later batches."""
    batches = zipf_batches(exponent, SAMPLE + WARM + MEASURED)
    stats = cache_statistics(batches[:SAMPLE], ROWS, algorithm=algorithm)
    cache = sw.CacheParams(load_factor, algorithm, stats)
    assert 1 - cache.miss_rate == pytest.approx(measured_hit_rate(batches, cache, SAMPLE + WARM), abs=0.02)
    assert stats.expected_lookups == pytest.approx(np.mean([len(set(own)) for own in batches]), rel=0.02)
