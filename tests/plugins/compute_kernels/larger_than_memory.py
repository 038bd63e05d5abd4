"""A process that trains a table of four times the memory it may have, and prints what came of it as JSON.

Usage: python -m tests.plugins.compute_kernels.larger_than_memory KERNEL LIMIT_MIB [STEPS]

Memory is what the process may allocate for data beyond what imports took (``RLIMIT_DATA``: heap and private maps;
pages of mapped files do not count, as the kernel takes them back whenever it needs them).
"""

from __future__ import annotations

import json
import resource
import sys
import time
from typing import Any

import torch

import shardwright as sw

DIM, IDS, BATCH = 64, 8, 256
_MIB = 1 << 20


def data_bytes() -> int:
    """What counts against ``RLIMIT_DATA`` now."""
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmData"))


def model_of(kernel: str, rows: int) -> Any:
    config = sw.EmbeddingBagConfig(name="t", embedding_dim=DIM, num_embeddings=rows, feature_names=["f"])
    bags = sw.EmbeddingBagCollection([config], device="meta")
    module = torch.nn.ModuleDict({"bags": bags})
    fused = {"optimizer": "row_wise_adagrad", "learning_rate": 0.1, "cache_load_factor": 0.05}
    sharders = [sw.EmbeddingBagCollectionSharder(fused_params=fused)]
    disk: Any = {"memory_bytes": {"disk": 1 << 40}, "memory_bandwidths": {"disk": 1e6}}
    topology = sw.Topology(world_size=1, compute_device="cpu", ddr_cap=1 << 40, **disk)
    rule = sw.ParameterConstraints(compute_kernels=[kernel])
    plan = sw.EmbeddingShardingPlanner(topology, BATCH, constraints={"t": rule}).plan(module, sharders)
    env = sw.ShardingEnv.local(device_type="cpu")
    return sw.DistributedModelParallel(module, env=env, plan=plan, sharders=sharders)


def batch_of(rows: int, generator: torch.Generator) -> sw.KeyedJaggedTensor:
    """Few rows often, all of them sometimes."""
    ids = (torch.rand(BATCH * IDS, generator=generator) ** 4 * rows).long()
    return sw.KeyedJaggedTensor(["f"], ids, lengths=torch.full((BATCH,), IDS))


def train(model: Any, rows: int, steps: int) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    losses = []
    for _ in range(steps):
        loss = (model.module["bags"](batch_of(rows, generator)).values() - 1).square().mean()
        loss.backward()
        losses.append(loss.item())
    return losses


def main(kernel: str, limit_mib: int, steps: int) -> None:
    rows = 4 * limit_mib * _MIB // (DIM * 4)
    torch.set_num_threads(1)
    train(
        model_of(kernel, 1000), 1000, 2
    )  # what is imported or started once is there before the limit is set
    limit = data_bytes() + limit_mib * _MIB
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        model = model_of(kernel, rows)
    except RuntimeError as error:
        print(json.dumps({"refused": str(error).splitlines()[0]}))
        return
    start = time.perf_counter()
    losses = train(model, rows, steps)
    seconds = time.perf_counter() - start
    print(
        json.dumps(
            {"table_mib": 4 * limit_mib, "losses": [losses[0], losses[-1]], "steps_per_s": steps / seconds}
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 30)
