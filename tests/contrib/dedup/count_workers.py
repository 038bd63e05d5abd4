"""Ranks that train tables of keys, with and without dedup; importable by their processes."""

from __future__ import annotations

from typing import Any

import numpy as np
import shardwright_hash_embedding
import torch
from shardwright_dedup import DedupEmbeddingCollectionSharder
from shardwright_hash_embedding import HashSettings

import shardwright as sw
from shardwright.host import PluginHost, use_host

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
