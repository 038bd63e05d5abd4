"""A script of the shape of quickstarts: a planner put together by hand, training with metrics, evaluation.

Run by torchrun. The planner has an enumerator, estimators, proposers, a partitioner and statistics of its own; a click
follows from one feature, so that normalized entropy can fall.
"""

import os
import sys

import torch
import torch.distributed as dist
import torchrec
from torch import nn
from torchrec.distributed import DistributedModelParallel, ShardingEnv, TrainPipelineBase
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.proposers import GreedyProposer, UniformProposer
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator, EmbeddingStorageEstimator
from torchrec.distributed.planner.stats import EmbeddingStats
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.types import ModuleSharder, ShardingType
from torchrec.metrics.ne import NEMetricComputation
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

FEATURES, ROWS, DIM, BATCH, STEPS = ("user", "item", "shop"), 40, 8, 32, 40


class Sharder(EmbeddingBagCollectionSharder, ModuleSharder[nn.Module]):
    """Whole tables and halves of them, with fused updates."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return [ShardingType.TABLE_WISE.value, ShardingType.ROW_WISE.value]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        return [EmbeddingComputeKernel.FUSED.value]


class Model(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        tables = [
            torchrec.EmbeddingBagConfig(
                name=name, embedding_dim=DIM, num_embeddings=ROWS, feature_names=[name]
            )
            for name in FEATURES
        ]
        self.ebc = torchrec.EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        self.over = nn.Linear(DIM * len(FEATURES), 1, device=device)

    def forward(self, batch):
        kjt, labels = batch
        logits = self.over(self.ebc(kjt).values()).squeeze(-1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, labels)
        return loss, (logits.detach().sigmoid(), labels)


def batches(rank: int):
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        ids = torch.randint(ROWS, (len(FEATURES) * BATCH,), generator=generator)
        lengths = torch.ones(len(FEATURES) * BATCH, dtype=torch.int32)
        kjt = torchrec.KeyedJaggedTensor(keys=list(FEATURES), values=ids, lengths=lengths)
        yield kjt, (ids[:BATCH] % 2).float()


def plan(model: nn.Module, topology: Topology):
    constraints = {"shop": ParameterConstraints(sharding_types=[ShardingType.ROW_WISE.value])}
    enumerator = EmbeddingEnumerator(
        topology=topology,
        batch_size=BATCH,
        constraints=constraints,
        estimator=[EmbeddingPerfEstimator(topology), EmbeddingStorageEstimator(topology)],
    )
    sharders = [Sharder({"optimizer": "exact_row_wise_adagrad", "learning_rate": 0.5})]
    options = enumerator.enumerate(model, sharders)
    assert {option.name for option in options} == set(FEATURES)
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=BATCH,
        enumerator=enumerator,
        storage_reservation=FixedPercentageStorageReservation(percentage=0.1),
        proposer=[GreedyProposer(), UniformProposer()],
        partitioner=GreedyPerfPartitioner(),
        stats=EmbeddingStats(),
        constraints=constraints,
    )
    return planner.collective_plan(model, sharders, dist.GroupMember.WORLD), sharders


def main() -> None:
    rank, device = int(os.environ["RANK"]), torch.device("cpu")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = Model(device)
    topology = Topology(world_size=dist.get_world_size(), compute_device=device.type)
    sharding, sharders = plan(model, topology)
    model = DistributedModelParallel(
        model, ShardingEnv.from_process_group(dist.GroupMember.WORLD), device, sharding, sharders
    )
    dense = KeyedOptimizerWrapper(
        {name: value for name, value in model.named_parameters() if name.startswith("over")},
        lambda params: torch.optim.Adam(params, lr=0.1),
    )
    pipeline = TrainPipelineBase(model, CombinedOptimizer([model.fused_optimizer, dense]), device)
    measured, stream = NEMetricComputation(rank, BATCH, n_tasks=1, window_size=100_000), batches(rank)
    for step in range(STEPS):
        predictions, labels = pipeline.progress(stream)
        if step >= STEPS // 2:
            measured.update(
                predictions=predictions[None], labels=labels[None], weights=torch.ones_like(labels)[None]
            )
    entropy = [float(found.value) for found in measured.compute() if found.metric_prefix == "window_"]
    kinds = {name: part.sharding_type for name, part in sharding.plan["ebc"].items()}
    sys.stdout.write(
        f"rank {rank}: shop is {kinds['shop']}, {len(entropy)} NE, below 0.8: {all(value < 0.8 for value in entropy)}\n"
    )
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
