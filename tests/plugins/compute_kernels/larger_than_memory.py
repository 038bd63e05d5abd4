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


def planned(
    kernel: str,
    sharding_type: str = "table_wise",
    *,
    rows: int,
    dim: int = DIM,
    optimizer: str = "adam",
    held: float = 0.05,
    ranks: int = 1,
) -> tuple[sw.EmbeddingBagCollection, list[Any], sw.ShardingPlan]:
    """One table, of whose rows its cache holds a part: module, sharders and plan."""
    config = sw.EmbeddingBagConfig(name="t", embedding_dim=dim, num_embeddings=rows, feature_names=["f"])
    module = sw.EmbeddingBagCollection([config], device="meta")
    fused = {"optimizer": optimizer, "learning_rate": 0.1, "cache_load_factor": held}
    sharders = [sw.EmbeddingBagCollectionSharder(fused_params=fused)]
    disk: Any = {"memory_bytes": {"disk": 1 << 40}, "memory_bandwidths": {"disk": 1e6}}
    topology = sw.Topology(world_size=ranks, compute_device="cpu", ddr_cap=1 << 40, **disk)
    rule = sw.ParameterConstraints(
        compute_kernels=[kernel], sharding_types=[sharding_type], min_partition=dim // 2
    )
    plan = sw.EmbeddingShardingPlanner(topology, BATCH, constraints={"t": rule}).plan(module, sharders)
    return module, sharders, plan


def model_of(kernel: str, **sizes: Any) -> sw.DistributedModelParallel:
    """The model of :func:`planned`, in this process alone, with the same weights each time."""
    torch.manual_seed(0)
    module, sharders, plan = planned(kernel, **sizes)
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
        loss = (model(batch_of(rows, generator)).values() - 1).square().mean()
        loss.backward()
        losses.append(loss.item())
    return losses


def main(kernel: str, limit_mib: int, steps: int) -> None:
    rows = 4 * limit_mib * _MIB // (DIM * 4)
    torch.set_num_threads(1)
    # What is imported or started once is there before the limit is set.
    train(model_of(kernel, rows=1000, optimizer="row_wise_adagrad"), 1000, 2)
    limit = data_bytes() + limit_mib * _MIB
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
    try:
        model = model_of(kernel, rows=rows, optimizer="row_wise_adagrad")
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
