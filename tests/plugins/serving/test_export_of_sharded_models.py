"""Sharded models are exported through checkpoints, whatever plan they have."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.core.serving.models import Model
from tests.core.serving.test_export_for_inference import assert_predicts, export
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
    with pytest.raises(sw.CheckpointError, match=r"has no weights 'over.1.weight' of the model"):
        export(tmp_path / "other", other, checkpoint=saved.path, forms=["torchscript"])
