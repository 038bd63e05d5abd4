"""Rows of a trained table of keys are quantized and found by their keys."""

from __future__ import annotations

from pathlib import Path

import pytest
import shardwright_serving as serving
import torch
from shardwright_serving import KnownIds, with_zero_row
from tests.contrib.hash_embedding.test_hash_embedding import (
    DIM,
    KEYS,
    USES,
    WEIGHT,
    Setup,
    batch,
    train,
)
from torch import nn

import shardwright as sw

pytestmark = pytest.mark.usefixtures("plugins")


class Bags(nn.Module):
    """A collection and the values of its outputs."""

    def __init__(self, rows: nn.Module) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, features: sw.KeyedJaggedTensor) -> torch.Tensor:
        return self.rows(features).values()


def test_tables_of_keys_are_exported_with_their_keys_alone(tmp_path: Path) -> None:
    setup, env = Setup(), sw.ShardingEnv.local(device_type="cpu")
    sharded = setup.shard(env, setup.plan(1))
    train(setup, sharded, env, range(2))
    example = sw.KeyedJaggedTensor.from_lists({"a": [[1], []], "b": [[], [2]], "c": [[3], [4]]})
    options = {"precision": "FP16", "forms": ["torchscript"], "check": False}
    with pytest.raises(
        sw.UnsupportedError, match=r"table .*item.*: its ids are keys.*put shardwright_serving\.KnownIds"
    ):
        serving.export_for_inference(Bags(sharded), example, tmp_path / "package", **options)
    saved = sw.save_checkpoint(tmp_path / "saved", Bags(sharded))
    with pytest.raises(sw.UnsupportedError, match=r"item.weight': its ids are keys"):
        serving.export_for_inference(
            Bags(setup.module()), example, tmp_path / "package", checkpoint=saved.path, **options
        )
    state = sharded.full_state_dict()
    born = state[USES].flatten() > 0
    rows = serving.quantize_rows(state[WEIGHT][born], "FP16")
    table = sw.EmbeddingBagConfig(
        name="item",
        num_embeddings=rows.num_rows + 1,
        embedding_dim=DIM,
        feature_names=["a", "b"],
        data_type="FP16",
    )
    collection = serving.QuantEmbeddingBagCollection([table])
    collection.set_rows("item", with_zero_row(rows))
    served = Bags(KnownIds(collection, {"item": state[KEYS][born]}))
    path = serving.export_for_inference(served, example, tmp_path / "package", **options)
    seen = batch(5, 0, 1)
    with torch.no_grad():
        trained = sharded(seen)
    wanted = torch.cat([trained["a"], trained["b"]], dim=1)
    found = serving.load_package(path).predict(seen)["output"]
    assert wanted.any()
    torch.testing.assert_close(found, wanted, rtol=1e-2, atol=1e-3)  # of float16
