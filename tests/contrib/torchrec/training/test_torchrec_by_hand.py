"""Plans, loops and registries under TorchRec's names, as scripts use them by hand; on one process."""

from __future__ import annotations

import pytest
import torch
from shardwright_torchrec.datasets.random import RandomRecDataset
from shardwright_torchrec.parallel.model_parallel import DistributedModelParallel
from shardwright_torchrec.parallel.pipelines import TrainPipelineSparseDist
from shardwright_torchrec.parallel.sharders import EmbeddingBagCollectionSharder
from torch import nn

import shardwright as sw

ALONE = sw.ShardingEnv.local(device_type="cpu")
BATCH = sw.KeyedJaggedTensor.from_lists({"user": [[1, 2], [], [5]]})


def bags() -> sw.EmbeddingBagCollection:
    return sw.EmbeddingBagCollection([sw.EmbeddingBagConfig(6, 8, name="t", feature_names=["user"])])


def test_registries_have_the_members_of_an_enumeration() -> None:
    members = sw.ShardingType.__members__
    assert members["ROW_WISE"] == "row_wise"
    assert "row_wise" in sw.ShardingType
    assert list(members.values()) == list(sw.ShardingType)
    assert [name.lower() for name in members] == list(members.values())


def test_detached_model_runs_between_steps() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bags = bags()

        def forward(self, batch: sw.KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
            values = self.bags(batch).values()
            return values.sum(), values

    def outputs(*, detaches: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = DistributedModelParallel(
            Model(), ALONE, sharders=[EmbeddingBagCollectionSharder({"lr": 0.1})]
        )
        pipeline = TrainPipelineSparseDist(model, model.fused_optimizer, "cpu")
        batches, found = iter([BATCH] * 4), []
        for _ in range(4):
            found.append(pipeline.progress(batches))
            if detaches:
                model(BATCH)
                assert pipeline.detach() is model
                model(BATCH)
                pipeline.attach(model)
        with pytest.raises(sw.UnsupportedError, match="another TrainPipelineSparseDist"):
            pipeline.attach(nn.Linear(1, 1))
        return found

    torch.testing.assert_close(outputs(detaches=True), outputs(detaches=False))


def test_shardable_parameters_are_the_tables() -> None:
    module = bags()
    assert EmbeddingBagCollectionSharder().shardable_parameters(module) == {
        "t": module.embedding_bags["t"].weight
    }


def test_random_batches_are_torchrecs() -> None:
    """Of TorchRec 1.8.0 with this seed."""
    (batch,) = RandomRecDataset(["a"], 200, manual_seed=1, num_batches=1)
    lengths = batch.sparse_features.lengths()
    assert lengths.dtype == torch.int32
    assert lengths[:8].tolist() == [1, 2, 0, 2, 1, 1, 2, 2]
    assert batch.sparse_features.values()[:8].tolist() == [72, 14, 28, 46, 25, 45, 37, 66]
    (fixed,) = RandomRecDataset(["a"], 9, ids_per_feature=3, num_batches=1)
    assert fixed.sparse_features.lengths().tolist() == [3] * 9
