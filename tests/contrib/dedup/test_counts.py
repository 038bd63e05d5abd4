"""Counts of distinct ids reach a stranger's kernel, on real ranks."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tests.contrib.dedup import count_workers

from shardwright_testing import RankPool

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, backend="gloo", initializer=functools.partial(sys.path.extend, list(sys.path))) as made:
        yield made


def train(pool: RankPool, **how: Any) -> dict[int, tuple[int, list[float]]]:
    first, second = pool.run(functools.partial(count_workers.trained, **how), 2)
    assert first == second
    return first


def sightings() -> Counter[int]:
    """Sightings of each key that is seen five times or more."""
    batches = [count_workers.batch(step, rank) for step in range(count_workers.STEPS) for rank in range(2)]
    every = Counter(torch.cat([batch.values() for batch in batches]).tolist())
    return Counter({key: seen for key, seen in every.items() if seen >= 5})


def test_deduplicated_ids_bear_and_use_rows_as_all_ids_do(pool: RankPool) -> None:
    plain, counted = train(pool, is_dedup=False), train(pool, is_dedup=True, count_column="count")
    uses = {key: seen for key, (seen, _) in plain.items()}
    assert uses == sightings()
    assert len(uses) < count_workers.KEYS
    assert {key: seen for key, (seen, _) in counted.items()} == uses
    for key, (_, row) in plain.items():
        torch.testing.assert_close(torch.tensor(counted[key][1]), torch.tensor(row))
    unasked = train(pool, is_dedup=True)  # a key is seen once a batch and feature then
    assert sum(seen for seen, _ in unasked.values()) < sum(uses.values())


@pytest.mark.parametrize("is_dedup", [False, True])
def test_counts_of_the_batch_are_added_up(pool: RankPool, is_dedup: bool) -> None:
    found = train(pool, is_dedup=is_dedup, count_column="count", counts=5)
    batches = [count_workers.batch(step, rank) for step in range(count_workers.STEPS) for rank in range(2)]
    every = Counter(torch.cat([batch.values() for batch in batches]).tolist())
    assert {key: seen for key, (seen, _) in found.items()} == {key: 5 * seen for key, seen in every.items()}
