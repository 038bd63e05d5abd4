"""Counts of distinct ids reach a stranger's kernel, on real ranks."""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import shardwright_hash_embedding
import torch
from shardwright_dedup import DedupEmbeddingCollectionSharder
from shardwright_hash_embedding import HashSettings

import shardwright as sw
from shardwright.host import PluginHost, use_host
from shardwright_testing import RankPool

pytestmark = pytest.mark.distributed

STEPS, KEYS = 4, 40
FUSED = {"optimizer": "sgd", "learning_rate": 0.25}


def batch(step: int, rank: int) -> sw.KeyedJaggedTensor:
    """Four bags of six keys of two features, some of them often."""
    drawn = np.random.default_rng(10 * step + rank).random(48) ** 2 * KEYS
    keys = torch.from_numpy(drawn.astype(np.int64)) * 1_000_003
    return sw.KeyedJaggedTensor(["a", "b"], keys, lengths=torch.full((8,), 6, dtype=torch.int32))


def trained(*, is_dedup: bool, count_column: str = "", counts: int = 0) -> dict[int, tuple[Any, ...]]:
    """Train on this rank; uses and row of each key.

    Args:
        is_dedup: distinct keys are sent.
        count_column: column that the table asks for.
        counts: number of sightings that the batch says each id stands for; 0 if it says nothing.
    """
    table = sw.EmbeddingConfig(200, 4, "item", feature_names=["a", "b"])
    kind = DedupEmbeddingCollectionSharder if is_dedup else sw.EmbeddingCollectionSharder
    rules = HashSettings("lfu", min_sightings=5, count_column=count_column)
    with use_host(PluginHost(plugins={"hash_embedding": shardwright_hash_embedding})):
        planner = sw.EmbeddingShardingPlanner(batch_size=4, constraints={"item": rules.constraints()})
        module, sharders = sw.EmbeddingCollection([table], device="meta"), [kind(FUSED)]
        plan = planner.collective_plan(module, sharders)
        model = sw.DistributedModelParallel(module, plan=plan, sharders=sharders)
        for step in range(STEPS):
            own = batch(step, torch.distributed.get_rank())
            if counts:
                columns = {count_column: torch.full_like(own.values(), counts)}
                own = sw.KeyedJaggedTensor(own.keys(), own.values(), lengths=own.lengths(), columns=columns)
            outputs = model(own)
            sum((rows.values() ** 2).sum() for rows in outputs.values()).backward()
        state = model.full_state_dict()
    uses, keys, rows = (state[f"embeddings.item.{name}"] for name in ("row_uses", "row_keys", "weight"))
    used = uses.squeeze(1) > 0
    pairs = zip(uses[used].flatten().tolist(), rows[used].tolist(), strict=True)
    return dict(zip(keys[used].flatten().tolist(), pairs, strict=True))


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, backend="gloo", initializer=functools.partial(sys.path.extend, list(sys.path))) as made:
        yield made


def train(pool: RankPool, **how: Any) -> dict[int, tuple[int, list[float]]]:
    first, second = pool.run(functools.partial(trained, **how), 2)
    assert first == second
    return first


def sightings(least: int = 1) -> dict[int, int]:
    """Sightings of each key that is seen so often or more."""
    batches = [batch(step, rank).values() for step in range(STEPS) for rank in range(2)]
    every = Counter(torch.cat(batches).tolist())
    return {key: seen for key, seen in every.items() if seen >= least}


def test_deduplicated_ids_bear_and_use_rows_as_all_ids_do(pool: RankPool) -> None:
    plain, counted = train(pool, is_dedup=False), train(pool, is_dedup=True, count_column="count")
    uses = {key: seen for key, (seen, _) in plain.items()}
    assert uses == sightings(5)
    assert len(uses) < KEYS
    assert {key: seen for key, (seen, _) in counted.items()} == uses
    for key, (_, row) in plain.items():
        torch.testing.assert_close(torch.tensor(counted[key][1]), torch.tensor(row))
    unasked = train(pool, is_dedup=True)  # a key is seen once a batch and feature then
    assert sum(seen for seen, _ in unasked.values()) < sum(uses.values())


@pytest.mark.parametrize("is_dedup", [False, True])
def test_counts_of_the_batch_are_added_up(pool: RankPool, is_dedup: bool) -> None:
    found = train(pool, is_dedup=is_dedup, count_column="count", counts=5)
    assert {key: seen for key, (seen, _) in found.items()} == {
        key: 5 * seen for key, seen in sightings().items()
    }
