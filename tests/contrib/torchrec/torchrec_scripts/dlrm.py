"""A script of the shape of DLRM's reference and of TorchRec's golden training.

Run by torchrun. Click logs are random, but clicks follow from one category, so that a loss can fall.
"""

import os
import sys

import torch
import torch.distributed as dist
import torchmetrics
import torchrec
from torch.utils.data import DataLoader, IterableDataset
from torchrec.datasets.criteo import DEFAULT_CAT_NAMES, DEFAULT_INT_NAMES
from torchrec.datasets.random import RandomRecDataset
from torchrec.datasets.utils import Batch
from torchrec.distributed import TrainPipelineSparseDist
from torchrec.distributed.comm import get_local_size
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation
from torchrec.distributed.types import ShardingType
from torchrec.models.dlrm import DLRM, DLRM_DCN, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

CATEGORIES, ROWS, DIM, BATCH, STEPS = DEFAULT_CAT_NAMES[:6], 50, 16, 64, 30


class Clicks(IterableDataset):
    """Random batches whose label is the parity of the first category."""

    def __init__(self, seed: int) -> None:
        self.data = RandomRecDataset(
            keys=CATEGORIES,
            batch_size=BATCH,
            hash_size=ROWS,
            ids_per_feature=1,
            num_dense=len(DEFAULT_INT_NAMES),
            manual_seed=seed,
            num_batches=STEPS,
            num_generated_batches=STEPS,
        )

    def __iter__(self):
        for batch in self.data:
            labels = batch.sparse_features[CATEGORIES[0]].values() % 2
            yield Batch(batch.dense_features, batch.sparse_features, labels)


def build(kind: str, device: torch.device) -> DLRMTrain:
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(name=f"t_{name}", embedding_dim=DIM, num_embeddings=ROWS, feature_names=[name])
        for name in CATEGORIES
    ]
    bags = torchrec.EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    sizes = dict(
        dense_in_features=len(DEFAULT_INT_NAMES),
        dense_arch_layer_sizes=[32, DIM],
        over_arch_layer_sizes=[32, 1],
        dense_device=device,
    )
    if kind == "dcn":
        return DLRMTrain(DLRM_DCN(bags, dcn_num_layers=2, dcn_low_rank_dim=8, **sizes))
    return DLRMTrain(DLRM(bags, **sizes))


def evaluate(pipeline: TrainPipelineSparseDist, batches) -> tuple[float, int]:
    """Area under the curve and number of samples, of all ranks."""
    pipeline._model.eval()
    auroc = torchmetrics.AUROC(task="binary").to(pipeline._device)
    with torch.no_grad():
        while True:
            try:
                _loss, logits, labels = pipeline.progress(batches)
            except StopIteration:
                break
            auroc(torch.sigmoid(logits), labels)
    samples = torch.tensor(sum(map(len, auroc.target)), device=pipeline._device)
    dist.all_reduce(samples)
    return auroc.compute().item(), int(samples)


def main(kind: str) -> None:
    rank, device = int(os.environ["RANK"]), torch.device("cpu")
    dist.init_process_group(backend="gloo")
    model = build(kind, device)
    bags = model.model.sparse_arch.embedding_bag_collection
    apply_optimizer_in_backward(torchrec.optim.RowWiseAdagrad, bags.parameters(), {"lr": 0.1})
    planner = EmbeddingShardingPlanner(
        topology=Topology(
            local_world_size=get_local_size(), world_size=dist.get_world_size(), compute_device=device.type
        ),
        batch_size=BATCH,
        storage_reservation=HeuristicalStorageReservation(percentage=0.05),
        constraints={
            "t_cat_0": torchrec.distributed.planner.ParameterConstraints(
                sharding_types=[ShardingType.TABLE_WISE.value]
            ),
            "t_cat_1": torchrec.distributed.planner.ParameterConstraints(
                sharding_types=[ShardingType.COLUMN_WISE.value], min_partition=8
            ),
        },
        debug=False,
    )
    plan = planner.collective_plan(model, get_default_sharders(), dist.GroupMember.WORLD)
    model = DistributedModelParallel(
        module=model, device=device, plan=plan, sharders=[EmbeddingBagCollectionSharder()]
    )
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: torch.optim.Adagrad(params, lr=0.05),
    )
    optimizer = CombinedOptimizer([model.fused_optimizer, dense])
    pipeline = TrainPipelineSparseDist(model, optimizer, device, execute_all_batches=True)
    batches = iter(DataLoader(Clicks(seed=rank), batch_size=None))
    losses = []
    pipeline._model.train()
    assert pipeline._device == device
    while True:
        try:
            loss, _logits, _labels = pipeline.progress(batches)
        except StopIteration:
            break
        losses.append(float(loss))
    area, samples = evaluate(pipeline, iter(DataLoader(Clicks(seed=100 + rank), batch_size=None)))
    # One write: the ranks share a pipe.
    sys.stdout.write(
        f"rank {rank}: {len(losses)} steps, loss fell: {losses[-1] < 0.7 * losses[0]}, "
        f"AUROC of {samples} samples above 0.9: {area > 0.9}\n"
    )
    sys.stdout.flush()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
