"""A DLRM-like model trained by the plain loop and by the pipeline, on local ranks over gloo; prints both.

    python tests/benchmarks/train_pipeline.py [--ranks 2] [--batch 1024] [--tables 24] [--rows 100000] [--dim 64]
        [--ids 10] [--hidden 512] [--steps 20] [--rounds 3]

Sparse collections by `table_wise` with row-wise Adagrad; two dense layers of `hidden` units over the pooled output. The
two loops take turns, each on the same batches; the figures are milliseconds a step of the slowest rank, the smallest
of all rounds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwright import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagCollectionSharder,
    EmbeddingBagConfig,
    EmbeddingShardingPlanner,
    KeyedJaggedTensor,
    ParameterConstraints,
    TrainPipelineSparseDist,
    in_backward_optimizer_filter,
)
from shardwright_testing.ranks import RankPool


class Model(nn.Module):
    """Pooled embeddings, then dense layers."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(
                name=f"t{index}",
                num_embeddings=options.rows,
                embedding_dim=options.dim,
                feature_names=[f"f{index}"],
            )
            for index in range(options.tables)
        ]
        self.bags = EmbeddingBagCollection(configs, device="meta")
        width = options.tables * options.dim
        self.over = nn.Sequential(nn.Linear(width, options.hidden), nn.ReLU(), nn.Linear(options.hidden, 1))

    def forward(self, features: KeyedJaggedTensor) -> tuple[torch.Tensor, torch.Tensor]:
        output = self.over(self.bags(features).values())
        return output.square().mean(), output.detach()


def sharded(options: argparse.Namespace) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = Model(options)
    sharders = [EmbeddingBagCollectionSharder(fused_params={"optimizer": "row_wise_adagrad"})]
    constraints = {"*": ParameterConstraints(sharding_types=["table_wise"])}
    plan = EmbeddingShardingPlanner(constraints=constraints, batch_size=options.batch).collective_plan(
        model, sharders
    )
    wrapped = DistributedModelParallel(model, plan=plan, sharders=sharders)
    dense = [parameter for _, parameter in in_backward_optimizer_filter(wrapped.named_parameters())]
    return wrapped, torch.optim.SGD(dense, lr=0.01)


def batches(options: argparse.Namespace) -> list[KeyedJaggedTensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    num_bags = options.tables * options.batch
    return [
        KeyedJaggedTensor(
            keys=[f"f{index}" for index in range(options.tables)],
            values=torch.randint(0, options.rows, (num_bags * options.ids,), generator=generator),
            lengths=torch.full((num_bags,), options.ids, dtype=torch.int32),
        )
        for _ in range(4)
    ]


def run(options: argparse.Namespace) -> dict[str, float]:
    """Milliseconds a step of either loop on this rank, the smallest of all rounds."""
    model, optimizer = sharded(options)
    pipeline = TrainPipelineSparseDist(model, optimizer, "cpu")
    endless, others = itertools.cycle(batches(options)), itertools.cycle(batches(options))

    def plain_step() -> None:
        optimizer.zero_grad()
        model(next(others))[0].backward()
        optimizer.step()

    loops = {"plain": plain_step, "pipeline": lambda: pipeline.progress(endless)}
    best = dict.fromkeys(loops, float("inf"))
    for _ in range(options.rounds):
        for name, step in loops.items():
            for _ in range(3):
                step()
            dist.barrier()
            start = time.perf_counter()
            for _ in range(options.steps):
                step()
            dist.barrier()
            best[name] = min(best[name], (time.perf_counter() - start) * 1e3 / options.steps)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    defaults = {
        "ranks": 2, "batch": 1024, "tables": 24, "rows": 100_000, "dim": 64, "ids": 10, "hidden": 512,
        "steps": 20, "rounds": 3,
    }  # fmt: skip
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    options = parser.parse_args()
    with RankPool(options.ranks, backend="gloo") as pool:
        by_rank = pool.run(run, options.ranks, options, timeout_s=600.0)
    slowest = {name: max(own[name] for own in by_rank) for name in by_rank[0]}
    print(json.dumps({**slowest, "ratio": slowest["pipeline"] / slowest["plain"]}))


if __name__ == "__main__":
    main()
