"""A small model of pooled tables, and batches with as many ids a bag as a test wants."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import shardwright as sw

NUM_TABLES, ROWS, DIM, BATCH = 6, 200, 8, 4
IDS = 5
SHARDERS = [sw.EmbeddingBagCollectionSharder({"optimizer": "sgd", "learning_rate": 0.1})]


def bags() -> sw.EmbeddingBagCollection:
    return sw.EmbeddingBagCollection(
        [
            sw.EmbeddingBagConfig(
                name=f"t{number}", num_embeddings=ROWS, embedding_dim=DIM, feature_names=[f"f{number}"]
            )
            for number in range(NUM_TABLES)
        ],
        device="meta",
    )


def planner(
    ranks: int, *kernels: str, ids: float = IDS, estimator: str = "roofline"
) -> sw.EmbeddingShardingPlanner:
    """A planner for whole tables; kernels are dealt to the tables."""
    rules = {
        f"t{number}": sw.ParameterConstraints(
            sharding_types=["table_wise"],
            compute_kernels=[kernels[number % len(kernels)]],
            pooling_factors=[ids],
        )
        for number in range(NUM_TABLES)
    }
    topology = sw.Topology(ranks, "cpu")
    return sw.EmbeddingShardingPlanner(
        topology, BATCH, constraints=rules, estimator=estimator, progress=False
    )


def model(env: sw.ShardingEnv, *kernels: str, update: str = "in_backward") -> sw.DistributedModelParallel:
    torch.manual_seed(0)
    module = bags()
    plan = planner(env.world_size, *(kernels or ("fused_torch",))).plan(module, SHARDERS)
    return sw.DistributedModelParallel(
        module, env=env, device="cpu", plan=plan, sharders=SHARDERS, update=update
    )


def alone(*kernels: str, update: str = "in_backward") -> sw.DistributedModelParallel:
    return model(sw.ShardingEnv.local(device_type="cpu"), *kernels, update=update)


def batch(seed: int, ids: Sequence[int] = (IDS,) * NUM_TABLES) -> sw.KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(ids, dtype=torch.int32).repeat_interleave(BATCH)
    values = torch.randint(ROWS, (int(lengths.sum()),), generator=generator)
    return sw.KeyedJaggedTensor([f"f{number}" for number in range(len(ids))], values, lengths=lengths)


def train(sharded: sw.DistributedModelParallel, features: sw.KeyedJaggedTensor) -> None:
    sharded(features).values().square().sum().backward()
