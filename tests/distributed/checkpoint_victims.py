"""A process that trains and saves without an end, to be killed while it does; run as a program of two ranks."""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist

import shardwright as sw

ROWS, DIM = 40_000, 16


def model() -> sw.DistributedModelParallel:
    table = sw.EmbeddingBagConfig(name="t", num_embeddings=ROWS, embedding_dim=DIM, feature_names=["f"])
    layout = sw.Layout(
        [
            sw.BlockRun(
                sw.RowsRange(ROWS, parts=dist.get_world_size()),
                sw.ColumnRange(0, DIM),
                dist.get_world_size(),
                rank=0,
            )
        ]
    )
    sharding = sw.EmbeddingModuleShardingPlan({"t": sw.ParameterSharding("row_wise", "fused_torch", layout)})
    return sw.DistributedModelParallel(
        sw.EmbeddingBagCollection([table], device="meta"), plan=sw.ShardingPlan({"": sharding})
    )


def main(rank: int, world_size: int, store: str, folder: str, asynchronous: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    made = model()
    for step in range(1, 1_000_000):
        for parameter in made.parameters():
            parameter.detach().fill_(step)
        sw.save_checkpoint(folder, made, step=step, keep=2, asynchronous=asynchronous == "async")
        print(step, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:])
