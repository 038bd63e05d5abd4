"""A model with position weights, trained as one process and by ranks."""

from __future__ import annotations

from typing import Any

import torch
from shardwright_torchrec.modules.feature_processors import (
    FeatureProcessedEmbeddingBagCollection,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from torch import Tensor, nn

import shardwright as sw

RATE, STEPS = 0.1, 3
LENGTHS = {"a": 4, "b": 3}
FORMS = ("collection", "by feature")
TYPES = {"t_a": "row_wise", "t_b": "column_wise", "t_c": "data_parallel"}


def processors(form: str) -> Any:
    """Position weights of two of three features."""
    if form == "collection":
        return PositionWeightedModuleCollection(LENGTHS)
    return {name: PositionWeightedModule(length) for name, length in LENGTHS.items()}


class Model(nn.Module):
    """The mean square of what a collection with position weights pools."""

    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        tables = [
            sw.EmbeddingBagConfig(name=f"t_{name}", num_embeddings=9, embedding_dim=8, feature_names=[name])
            for name in (*LENGTHS, "c")
        ]
        bags = sw.EmbeddingBagCollection(tables, is_weighted=True)
        self.pooled = FeatureProcessedEmbeddingBagCollection(bags, processors(form))

    def forward(self, features: sw.KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        values = self.pooled(features).values()
        return values.square().mean(), values.detach()


def batch(step: int, rank: int) -> sw.KeyedJaggedTensor:
    """Three samples, some of whose bags are empty; the same each time."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    lengths = torch.randint(0, 4, (9,), generator=generator)
    values = torch.randint(0, 9, (int(lengths.sum()),), generator=generator)
    return sw.KeyedJaggedTensor(["a", "b", "c"], values, lengths=lengths)


def unsharded(form: str, num_ranks: int) -> dict[str, Tensor]:
    """State after some steps of SGD on the mean of all ranks' losses."""
    own = Model(form)
    optimizer = torch.optim.SGD(own.parameters(), lr=RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(num_ranks):
            (own(batch(step, rank))[0] / num_ranks).backward()
        optimizer.step()
    return own.state_dict()


def train(env: Any, form: str, *, in_pipeline: bool) -> dict[str, Tensor]:
    """The same of ranks; in a pipeline, which exchanges the ids of the next batch ahead where it can."""
    sharder = sw.EmbeddingBagCollectionSharder(fused_params={"optimizer": "sgd", "learning_rate": RATE})
    asked = {
        name: sw.ParameterConstraints(sharding_types=[kind], min_partition=4) for name, kind in TYPES.items()
    }
    topology = sw.Topology(env.world_size, "cpu")
    model = Model(form)
    plan = sw.EmbeddingShardingPlanner(topology, batch_size=3, constraints=asked).plan(model, [sharder])
    sharded = sw.DistributedModelParallel(model, env, "cpu", plan, [sharder])
    dense = [p for _, p in sw.in_backward_optimizer_filter(sharded.named_parameters())]
    optimizer = torch.optim.SGD(dense, lr=RATE)
    batches = (batch(step, env.rank) for step in range(STEPS))
    if in_pipeline:
        pipeline = sw.TrainPipelineSparseDist(sharded, optimizer, torch.device("cpu"))
        for _ in range(STEPS):
            pipeline.progress(batches)
    else:
        for own in batches:
            optimizer.zero_grad()
            sharded(own)[0].backward()
            optimizer.step()
    return sharded.full_state_dict()


def train_all() -> list[dict[str, Tensor]]:
    """Each form by hand, and in a pipeline, on the process group's ranks."""
    env = sw.ShardingEnv.from_process_group(torch.distributed.group.WORLD)
    return [train(env, form, in_pipeline=in_pipeline) for form in FORMS for in_pipeline in (False, True)]
