"""TorchScript of collections that are cut over one process gives what the whole ones give."""

from __future__ import annotations

import warnings

import pytest
import shardwright_serving as serving
import torch
from tests.contrib.serving.tables.test_sharded_quantized import batch, collection, plan_of
from torch import nn

import shardwright as sw


class Pooled(nn.Module):
    def __init__(self, bags: nn.Module) -> None:
        super().__init__()
        self.bags = bags

    def forward(self, features: sw.KeyedJaggedTensor) -> sw.KeyedTensor:
        return self.bags(features)


@pytest.mark.parametrize("kind", ["table_wise", "grid_shard"])
def test_scripted_shards_of_one_process_equal_unsharded(kind: str) -> None:
    precisions = {"b": "INT4", "c": "FP8"}
    model = Pooled(serving.quantize_embeddings(collection("MEAN", is_weighted=True), per_table=precisions))
    served = serving.shard_for_serving(model, plan_of(model, kind, 4, "quant_torch"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that TorchScript is deprecated
        script = torch.jit.script(served)
    found, wanted = script(batch(0)), model(batch(0))
    assert found.keys() == wanted.keys()
    torch.testing.assert_close(found.values(), wanted.values(), rtol=1e-4, atol=1e-5)
