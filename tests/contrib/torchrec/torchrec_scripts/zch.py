"""A script of the shape of TorchRec's zero-collision-hashing and golden-training examples. Run by torchrun.

Ids are far beyond the tables' rows; the frequent ones, which the label follows from, earn rows of their own.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel, TrainPipelineSparseDist
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.types import ShardingType
from torchrec.metrics.auc import AUCMetricComputation
from torchrec.metrics.ne import NEMetricComputation
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

FEATURES, ROWS, DIM, BATCH, STEPS = ["user", "item"], 32, 8, 64, 40
FREQUENT, LARGE = 20, 10**15


class Model(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=f"t_{name}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[name])
            for name in FEATURES
        ]
        maps = {
            table.name: MCHManagedCollisionModule(
                zch_size=ROWS,
                device=device,
                eviction_policy=DistanceLFU_EvictionPolicy(),
                eviction_interval=2,
                input_hash_size=2**62,
            )
            for table in tables
        }
        bags = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        self.mc_ebc = ManagedCollisionEmbeddingBagCollection(
            bags, ManagedCollisionCollection(maps, tables), return_remapped_features=True
        )
        self.over = nn.Linear(len(FEATURES) * DIM, 1)

    def forward(self, batch: Batch):
        pooled, remapped = self.mc_ebc(batch.sparse_features)
        logits = self.over(pooled.values())[:, 0]
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)
        return loss, (logits.detach().sigmoid(), batch.labels, remapped.values())


def batches(rank: int):
    """Half of the ids are frequent, half never come again; the label is the parity of a frequent user."""
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        ids = torch.randint(LARGE, (2, BATCH), generator=generator)
        frequent = torch.randint(FREQUENT, (2, BATCH), generator=generator)
        chosen = torch.rand(2, BATCH, generator=generator) < 0.75
        labels = (chosen[0] & (frequent[0] % 2 == 0)).float()
        values = torch.where(chosen, frequent * 7_000_000_007, ids).flatten()
        kjt = KeyedJaggedTensor.from_lengths_sync(
            keys=FEATURES, values=values, lengths=torch.ones(2 * BATCH, dtype=torch.int64)
        )
        yield Batch(torch.empty(BATCH, 0), kjt, labels)


def main() -> None:
    rank, device = int(os.environ["RANK"]), torch.device("cpu")
    dist.init_process_group(backend="gloo")
    torch.manual_seed(0)
    task = Model(device)
    apply_optimizer_in_backward(RowWiseAdagrad, task.mc_ebc.parameters(), {"lr": 0.5})
    sharders = [ManagedCollisionEmbeddingBagCollectionSharder()]
    plan = EmbeddingShardingPlanner(
        topology=Topology(world_size=dist.get_world_size(), compute_device="cpu"),
        constraints={
            f"t_{name}": ParameterConstraints(sharding_types=[ShardingType.ROW_WISE.value])
            for name in FEATURES
        },
        debug=False,
    ).collective_plan(task, sharders, dist.GroupMember.WORLD)
    model = DistributedModelParallel(module=task, device=device, plan=plan, sharders=sharders)
    optimizer = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: torch.optim.Adam(params, lr=0.02),
    )
    metrics = [
        kind(rank, BATCH, n_tasks=1, window_size=10 * BATCH, compute_on_all_ranks=True)
        for kind in (NEMetricComputation, AUCMetricComputation)
    ]
    pipeline, data, steps = TrainPipelineSparseDist(model, optimizer, device), batches(rank), 0
    while True:
        try:
            predictions, labels, rows = pipeline.progress(data)
        except StopIteration:
            break
        steps += 1
        for metric in metrics:
            metric.update(predictions=predictions[None], labels=labels[None], weights=None)
        assert set(rows.tolist()) <= set(range(ROWS))
    reports = [report for metric in metrics for report in metric.compute()]
    values = {f"{report.metric_prefix}{report.name}": float(report.value) for report in reports}
    maps = {name: value for name, value in model.state_dict().items() if "_mch_sorted_raw_ids" in name}
    earned = {int(torch.isin(torch.arange(FREQUENT) * 7_000_000_007, ids).sum()) for ids in maps.values()}
    sys.stdout.write(
        f"rank {rank}: {steps} steps, NE below 0.8: {values['window_ne'] < 0.8}, AUC above 0.8: "
        f"{values['window_auc'] > 0.8}, rows of their own: {earned == {FREQUENT}}\n"
    )
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
