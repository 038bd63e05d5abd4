"""TorchScript of models with quantized collections gives what they give, saved and loaded, and cut over one process."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import shardwright_serving as serving
import torch
from tests.contrib.serving.packages.models import BATCHES, PER_TABLE, Model, batch
from tests.contrib.serving.tables import test_sharded_quantized as cut
from tests.programs import printed_by
from torch import nn

import shardwright as sw


class Pooled(nn.Module):
    """The collection of pooled rows alone, of a model that has more or is one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.bags = getattr(model, "bags", model)

    def forward(self, features: sw.KeyedJaggedTensor) -> sw.KeyedTensor:
        return self.bags(features)


class Sequences(nn.Module):
    def __init__(self, model: Any) -> None:
        super().__init__()
        self.rows = model.rows

    def forward(self, features: sw.KeyedJaggedTensor) -> sw.JaggedTensor:
        return self.rows(features)["h"]


def scripted(model: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that TorchScript is deprecated
        saved = io.BytesIO()
        torch.jit.save(
            torch.jit.script(model), saved
        )  # puts what it compiles into the model, which still runs
        saved.seek(0)
        return torch.jit.load(saved)


@pytest.mark.parametrize("kind", [Pooled, Sequences])
def test_scripted_model_gives_what_the_quantized_model_gives(kind: type[nn.Module]) -> None:
    model = kind(serving.quantize_embeddings(Model(), per_table=PER_TABLE))
    script = scripted(model)
    for seed, lengths in enumerate(BATCHES):
        _, features = batch(lengths, seed)
        found, wanted = script(features), model(features)
        assert type(found) is type(wanted)
        torch.testing.assert_close(found.values(), wanted.values(), rtol=1e-4, atol=1e-5)
        if kind is Pooled:
            torch.testing.assert_close(found["g@four"], wanted["g@four"], rtol=1e-4, atol=1e-5)
            assert (found.keys(), found.length_per_key()) == (wanted.keys(), wanted.length_per_key())
        else:
            torch.testing.assert_close(found.offsets(), wanted.offsets(), check_dtype=False)


FRESH = """
import sys, warnings, torch, shardwright as sw
warnings.simplefilter("ignore")
from shardwright_serving.scripting import install
install()
model, (features, wanted) = torch.jit.load(sys.argv[1]), torch.load(sys.argv[2])
features = sw.KeyedJaggedTensor(**features)
torch.testing.assert_close(model(features)["g@four"], wanted, rtol=1e-4, atol=1e-5)
"""


@pytest.mark.slow
def test_scripted_model_is_loaded_in_a_fresh_process(tmp_path: Path) -> None:
    model = Pooled(serving.quantize_embeddings(Model(), per_table=PER_TABLE))
    _, features = batch(BATCHES[0])
    parts = {
        "keys": features.keys(),
        "values": features.values(),
        "weights": features.weights(),
        "lengths": features.lengths(),
    }
    torch.save((parts, model(features)["g@four"]), tmp_path / "batch.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.jit.save(torch.jit.script(model), tmp_path / "model.pt")
    printed_by("-c", FRESH, tmp_path / "model.pt", tmp_path / "batch.pt")


@pytest.mark.parametrize("kind", ["table_wise", "grid_shard"])
def test_scripted_shards_of_one_process_equal_unsharded(kind: str) -> None:
    bags = serving.quantize_embeddings(
        cut.collection("MEAN", is_weighted=True), per_table={"b": "INT4", "c": "FP8"}
    )
    model, features = Pooled(bags), cut.batch(0)
    script = scripted(serving.shard_for_serving(model, cut.plan_of(model, kind, 4, "quant_torch")))
    found, wanted = script(features), model(features)
    assert found.keys() == wanted.keys()
    torch.testing.assert_close(found.values(), wanted.values(), rtol=1e-4, atol=1e-5)
