"""Sharded models are exported through checkpoints, whatever plan they have."""

from __future__ import annotations

from pathlib import Path

import pytest
import shardwright_serving as serving
import torch
from tests.contrib.serving.packages.models import BATCHES, EXAMPLE, PER_TABLE, Model, batch
from tests.contrib.serving.packages.test_export_for_inference import assert_predicts, export
from torch import nn

import shardwright as sw


@pytest.fixture(scope="module")
def sharded() -> sw.DistributedModelParallel:
    """The model, its tables cut by columns where they can be."""
    rules = {"*": sw.ParameterConstraints(sharding_types=["column_wise"], min_partition=4)}
    topology = sw.Topology(world_size=1, compute_device="cpu")
    planner = sw.EmbeddingShardingPlanner(topology=topology, constraints=rules)
    sharders = [sw.EmbeddingBagCollectionSharder(), sw.EmbeddingCollectionSharder()]
    plan = planner.plan(Model("meta"), sharders)
    return sw.DistributedModelParallel(Model(), env=sw.ShardingEnv.local(device_type="cpu"), plan=plan)


def test_sharded_model_is_exported_through_a_checkpoint_that_goes(
    tmp_path: Path, sharded: sw.DistributedModelParallel
) -> None:
    path = export(tmp_path, sharded, forms=["torchscript"])
    assert_predicts(path, "torchscript", Model())
    assert [one.name for one in tmp_path.iterdir()] == ["package"]


def test_checkpoint_of_a_sharded_model_is_exported_by_a_model_on_meta(
    tmp_path: Path, sharded: sw.DistributedModelParallel
) -> None:
    saved = sw.save_checkpoint(tmp_path / "saved", sharded)
    path = export(tmp_path, Model("meta"), checkpoint=saved.path, forms=["torchscript"])
    assert_predicts(path, "torchscript", Model())
    other = Model("meta")
    other.over.insert(1, nn.Linear(8, 8))
    with pytest.raises(sw.CheckpointError, match=r"has no tensor 'model.over.1.weight'"):
        export(tmp_path / "other", other, checkpoint=saved.path, forms=["torchscript"])


def test_collections_cut_for_serving_are_exported(tmp_path: Path) -> None:
    quantized = serving.quantize_embeddings(Model(), "INT8", per_table=PER_TABLE)
    rules = {"*": sw.ParameterConstraints(sharding_types=["row_wise"])}
    planner = sw.EmbeddingShardingPlanner(sw.Topology(2, "cpu"), constraints=rules)
    sharders = [serving.QuantEmbeddingBagCollectionSharder(), serving.QuantEmbeddingCollectionSharder()]
    placed = serving.shard_for_serving(quantized, planner.plan(quantized, sharders))
    path = serving.export_for_inference(
        placed, batch(EXAMPLE), tmp_path / "package", forms=["torchscript"], check=False
    )
    package = serving.load_package(path)
    for seed, lengths in enumerate(BATCHES):
        dense, features = batch(lengths, seed)
        wanted = quantized(dense, features)
        torch.testing.assert_close(package.predict(features, dense), wanted, rtol=1e-4, atol=1e-5)


def test_weights_of_a_sharded_module_need_its_wrapper(
    tmp_path: Path, sharded: sw.DistributedModelParallel
) -> None:
    with pytest.raises(
        sw.InvalidInputError, match="no weights here: give the DistributedModelParallel around"
    ):
        serving.export_for_inference(sharded.module, batch(EXAMPLE), tmp_path / "package")
    quantized = sw.DistributedModelParallel(serving.quantize_embeddings(Model()), env=sharded.env)
    with pytest.raises(
        sw.UnsupportedError, match=r"cut over ranks: give model.unshard\(\), which every rank"
    ):
        serving.export_for_inference(quantized, batch(EXAMPLE), tmp_path / "package")
