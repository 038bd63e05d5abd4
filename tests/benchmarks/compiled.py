"""A step of a sharded DLRM whose dense part is compiled, beside the same step as it is; one process, one thread.

`python tests/benchmarks/compiled.py --steps 30 --rounds 5` prints the least time of a step of each, ms. Both take
turns. The first compiled steps, which compile, are not counted.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import nn

import shardwright as sw

TABLES, ROWS, DIM, BATCH, IDS = 8, 10_000, 32, 512, 4


class Model(nn.Module):
    """Two collections, and layers that work on the products of their columns."""

    def __init__(self) -> None:
        super().__init__()
        configs = [
            sw.EmbeddingBagConfig(ROWS, DIM, name=f"t{number}", feature_names=[f"f{number}"])
            for number in range(TABLES)
        ]
        self.first = sw.EmbeddingBagCollection(configs[: TABLES // 2], device="meta")
        self.second = sw.EmbeddingBagCollection(configs[TABLES // 2 :], device="meta")
        width = TABLES * DIM
        self.crosses = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.over = nn.Sequential(nn.Linear(width, 128), nn.GELU(), nn.LayerNorm(128), nn.Linear(128, 1))

    def forward(self, features: sw.KeyedJaggedTensor) -> torch.Tensor:
        own = torch.cat([self.first(features).values(), self.second(features).values()], 1)
        crossed = own
        for layer in self.crosses:
            crossed = own * torch.tanh(layer(crossed)) + crossed
        return self.over(crossed).squeeze(1)


def batch() -> sw.KeyedJaggedTensor:
    ids = torch.randint(0, ROWS, (TABLES * BATCH * IDS,))
    lengths = torch.full((TABLES * BATCH,), IDS)
    return sw.KeyedJaggedTensor([f"f{number}" for number in range(TABLES)], ids, lengths=lengths)


def ms_of_step(model: Any, optimizer: Any, steps: int) -> float:
    features = batch()
    start = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        model(features).square().mean().backward()
        optimizer.step()
    return (time.perf_counter() - start) * 1e3 / steps


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    models: dict[str, Any] = {}
    for name in ("eager", "compiled"):
        own = sw.DistributedModelParallel(Model(), env=sw.ShardingEnv.local(device_type="cpu"))
        dense = [own for _, own in sw.in_backward_optimizer_filter(own.named_parameters())]
        called = torch.compile(own) if name == "compiled" else own
        models[name] = called, torch.optim.SGD(dense, lr=0.01)
    for called, optimizer in models.values():
        ms_of_step(called, optimizer, 3)
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(options.rounds):
        for name, (called, optimizer) in models.items():
            times[name].append(ms_of_step(called, optimizer, options.steps))
    for name, own in times.items():
        print(f"{name}: {min(own):.2f} ms a step")


if __name__ == "__main__":
    main()
