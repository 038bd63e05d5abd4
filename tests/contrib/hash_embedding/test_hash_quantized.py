"""Rows of a trained table of keys are quantised and found by their keys."""

from __future__ import annotations

from typing import Any

import torch
from tests.contrib.hash_embedding.test_hash_embedding import (
    KEYS,
    USES,
    WEIGHT,
    Setup,
    batch,
    plugins,
    train,
)

import shardwright as sw
from shardwright.modules.quantized.known_ids import KnownIds, with_zero_row
from shardwright.testing import run_simulated

__all__ = ["plugins"]


def test_trained_keys_find_their_quantised_rows() -> None:
    setup = Setup()

    def on_rank(env: sw.ShardingEnv) -> Any:
        sharded = setup.shard(env, setup.plan(2))
        train(setup, sharded, env, range(3))
        seen = batch(5, env.rank, 2)
        with torch.no_grad():
            found = sharded(seen)
        return sharded.state_dict(), seen, torch.cat([found["a"], found["b"]], dim=1)

    for state, seen, wanted in run_simulated(on_rank, 2):
        born = state[USES].flatten() > 0
        rows = sw.quantize_rows(state[WEIGHT][born])
        table = sw.EmbeddingBagConfig(
            name="item",
            num_embeddings=rows.num_rows + 1,
            embedding_dim=rows.num_columns,
            feature_names=["a", "b"],
            data_type="INT8",
        )
        collection = sw.QuantEmbeddingBagCollection([table])
        collection.set_rows("item", with_zero_row(rows))
        found = KnownIds(collection, {"item": state[KEYS][born]})(seen).values()
        bound = float(rows.error_bound().max()) * float(seen.lengths().max()) + 1e-5
        assert found.abs().max() > 0
        assert (found - wanted).abs().max() <= bound
        unborn = wanted.abs().sum(dim=1) == 0
        assert not found[unborn].any()
