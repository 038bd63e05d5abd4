"""Makes the checkpoint in the folder ``torchrec`` beside this: by TorchRec 1.8.0, with torch 2.13.0, on two ranks.

    torchrun --standalone --nproc-per-node 2 torchrec_writes.py torchrec

Four tables in all ways that it can cut them on CPUs, with its fused row-wise Adagrad. Beside the checkpoint stands
``after.pt``: the weights one step after it, whole.
"""

import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

ROWS = {"user": 20, "item": 12, "shop": 10}
DIM, STEPS = 8, 3


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=[name])
                for name, rows in ROWS.items()
            ],
            device=torch.device("meta"),
        )

    def forward(self, features):
        return self.bags(features).values()


class Sharder(EmbeddingBagCollectionSharder):
    def sharding_types(self, compute_device_type):
        return [*super().sharding_types(compute_device_type), "row_wise"]


def main(folder: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    module = Model()
    sharder = Sharder(
        fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.125, "eps": 1e-8}
    )
    tables = construct_module_sharding_plan(
        module.bags,
        {"user": row_wise(), "item": column_wise(ranks=[0, 1]), "shop": table_wise(rank=1)},
        sharder=sharder,
        local_size=2,
        world_size=2,
        device_type="cpu",
    )
    for sharding in tables.values():
        sharding.compute_kernel = "fused"
    model = DistributedModelParallel(
        module, device=torch.device("cpu"), plan=ShardingPlan({"bags": tables}), sharders=[sharder]
    )
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    rest = [KeyedOptimizerWrapper(dense, lambda params: torch.optim.SGD(params, lr=0.1))] if dense else []
    optimizer = CombinedOptimizer([model.fused_optimizer, *rest])
    for step in range(STEPS):
        train(model, step)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(folder))
    train(model, STEPS)
    after = {name: whole(value) for name, value in model.state_dict().items()}
    if dist.get_rank() == 0:
        torch.save(after, os.path.join(folder, "after.pt"))
    dist.destroy_process_group()


def train(model: torch.nn.Module, step: int) -> None:
    """Each rank has two examples; the loss weighs the columns differently."""
    ids = torch.arange(2 * len(ROWS)) + 3 * step + dist.get_rank()
    lengths = torch.ones(2 * len(ROWS), dtype=torch.int32)
    pooled = model(KeyedJaggedTensor(keys=list(ROWS), values=ids % 10, lengths=lengths))
    (pooled * torch.linspace(-1.0, 2.0, pooled.shape[1])).sum().backward()


def whole(value):
    if not isinstance(value, ShardedTensor):
        return value
    gathered = torch.empty(value.size()) if dist.get_rank() == 0 else None
    value.gather(0, gathered)
    return gathered


if __name__ == "__main__":
    main(sys.argv[1])
