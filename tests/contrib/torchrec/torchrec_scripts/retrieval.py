"""A script of the shape of TorchRec's two-tower retrieval and its quickstart with an enumerator. Run by torchrun."""

import os
import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.datasets.utils import Batch
from torchrec.distributed import DistributedModelParallel, TrainPipelineBase
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner
from torchrec.distributed.planner.proposers import GreedyProposer, UniformProposer
from torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator, EmbeddingStorageEstimator
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.types import ShardEstimator
from torchrec.modules.mlp import MLP
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

FEATURES, ROWS, DIM, BATCH, STEPS = ["user", "item"], 40, 8, 32, 40


class TwoTower(nn.Module):
    def __init__(self, bags: EmbeddingBagCollection) -> None:
        super().__init__()
        self.ebc = bags
        self.query_proj, self.candidate_proj = (MLP(in_size=DIM, layer_sizes=[16, DIM]) for _ in FEATURES)

    def forward(self, kjt: KeyedJaggedTensor) -> torch.Tensor:
        pooled = self.ebc(kjt)
        return (self.query_proj(pooled["user"]) * self.candidate_proj(pooled["item"])).sum(dim=1)


class TwoTowerTrainTask(nn.Module):
    def __init__(self, two_tower: TwoTower) -> None:
        super().__init__()
        self.two_tower = two_tower
        self.loss_fn = nn.BCEWithLogitsLoss()

    def forward(self, batch: Batch):
        logits = self.two_tower(batch.sparse_features)
        loss = self.loss_fn(logits, batch.labels.float())
        return loss, (loss.detach(), logits.detach(), batch.labels.detach())


class LargestShardsFirst(ShardEstimator):
    """A user's estimator: time goes by the elements of a shard."""

    def __init__(self, topology: Topology, constraints=None) -> None:
        self._perf = EmbeddingPerfEstimator(topology, constraints)

    def estimate(self, sharding_options, sharder_data_map=None) -> None:
        self._perf.estimate(sharding_options, sharder_data_map)
        for option in sharding_options:
            for shard in option.shards:
                shard.perf.fwd_compute = 1e-6 * shard.size[0] * shard.size[1]


def batches(rank: int):
    generator = torch.Generator().manual_seed(rank)
    for _ in range(STEPS):
        ids = torch.randint(ROWS, (2, BATCH), generator=generator)
        labels = (ids[0] % 2 == ids[1] % 2).long()
        kjt = KeyedJaggedTensor.from_lengths_sync(
            keys=FEATURES, values=ids.flatten(), lengths=torch.ones(2 * BATCH, dtype=torch.int64)
        )
        yield Batch(torch.empty(BATCH, 0), kjt, labels)


def main() -> None:
    rank, device = int(os.environ["RANK"]), torch.device("cpu")
    dist.init_process_group(backend="gloo")
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(name=f"t_{name}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[name])
        for name in FEATURES
    ]
    task = TwoTowerTrainTask(TwoTower(EmbeddingBagCollection(tables=tables, device=torch.device("meta"))))
    topology = Topology(world_size=dist.get_world_size(), compute_device="cpu")
    enumerator = EmbeddingEnumerator(
        topology=topology,
        batch_size=BATCH,
        estimator=[LargestShardsFirst(topology), EmbeddingStorageEstimator(topology)],
    )
    apply_optimizer_in_backward(RowWiseAdagrad, task.two_tower.ebc.parameters(), {"lr": 0.5})
    sharders = [EmbeddingBagCollectionSharder()]
    plan = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=BATCH,
        enumerator=enumerator,
        proposer=[GreedyProposer(), UniformProposer()],
        partitioner=GreedyPerfPartitioner(),
        stats=NoopEmbeddingStats(),
    ).collective_plan(task, sharders, dist.GroupMember.WORLD)
    model = DistributedModelParallel(module=task, device=device, plan=plan, sharders=sharders)
    optimizer = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: torch.optim.Adam(params, lr=0.02),
    )
    pipeline, data, losses = TrainPipelineBase(model, optimizer, device), batches(rank), []
    while True:
        try:
            losses.append(float(pipeline.progress(data)[0]))
        except StopIteration:
            break
    model.eval()
    (found,) = {float(F.softplus(torch.zeros(1)))}  # the loss of a guess
    names = sorted(name for name in model.state_dict() if "ebc" in name)
    sys.stdout.write(
        f"rank {rank}: {len(losses)} steps, better than a guess: {losses[-1] < found}, tables {len(names)}\n"
    )
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
