"""What real ranks do with TorchRec's names; importable by their processes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from shardwright_torchrec.distributed.comm import intra_and_cross_node_pg
from shardwright_torchrec.inference.state_dict_transform import (
    state_dict_gather,
    state_dict_to_device,
)
from shardwright_torchrec.metrics.computations import (
    AUCMetricComputation,
    NEMetricComputation,
    RecMetricComputation,
)
from shardwright_torchrec.modules.configs import EmbeddingBagConfig
from shardwright_torchrec.modules.managed_collisions.embedding import ManagedCollisionEmbeddingBagCollection
from shardwright_torchrec.modules.managed_collisions.maps import (
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from shardwright_torchrec.modules.managed_collisions.policies import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
)
from shardwright_torchrec.parallel.model_parallel import DistributedModelParallel
from shardwright_torchrec.parallel.sharders import EmbeddingBagCollectionSharder
from shardwright_torchrec.planner.planners import EmbeddingShardingPlanner
from torch.distributed._shard.sharded_tensor import Shard, init_from_local_shards

import shardwright as sw

BATCH, WINDOW = 8, 24


def samples(seed: int, batches: int) -> list[dict[str, torch.Tensor]]:
    """Batches of predictions, two of them equal, labels and weights."""
    generator = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(batches):
        p, y, w = (torch.rand(BATCH, generator=generator) for _ in range(3))
        p[3] = p[4]
        made.append({"p": p, "l": (y > 0.5).float(), "w": w})
    return made


def metrics(rank: int = 0, window: int = WINDOW, *, everywhere: bool = False) -> list[RecMetricComputation]:
    """Normalized entropy and area under the curve of one task."""
    kinds = (NEMetricComputation, AUCMetricComputation)
    return [kind(rank, BATCH, 1, window, compute_on_all_ranks=everywhere) for kind in kinds]


def count(module: RecMetricComputation, batch: dict[str, torch.Tensor]) -> None:
    """Add a batch of one task."""
    p, y, w = (batch[name][None] for name in "plw")
    module.update(predictions=p, labels=y, weights=w)


def values(modules: list[RecMetricComputation]) -> dict[str, float]:
    """Values of metrics of one task."""
    found = [report for module in modules for report in module.compute()]
    return {report.metric_prefix + report.name: float(report.value) for report in found}


def measure() -> dict[str, float]:
    """Values of all ranks, of which rank 1 has seen one batch more."""
    rank = dist.get_rank()
    modules = metrics(rank, 1000)
    for batch in samples(rank, rank):  # rank 0 has seen none when it computes for the first time
        for module in modules:
            count(module, batch)
    values(modules)
    for batch in samples(rank, 2 + rank)[rank:]:
        for module in modules:
            count(module, batch)
    return values(modules)


def lead() -> dict[str, Any]:
    """Groups of hosts, and whole tensors of shards."""
    rank, world = dist.get_rank(), dist.group.WORLD
    assert world is not None
    seen: dict[str, Any] = {}
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    own, across = intra_and_cross_node_pg()
    seen["groups"] = [dist.get_process_group_ranks(one) for one in (own, across)]
    seen["again"] = intra_and_cross_node_pg() == (own, across)
    del os.environ["LOCAL_WORLD_SIZE"]
    shards = [Shard.from_tensor_and_offsets(torch.full((2, 3), float(rank)), [2 * rank, 0], rank)]
    state = {"w": init_from_local_shards(shards, 4, 3), "b": torch.ones(2)}
    whole = {"w": torch.zeros(4, 3), "b": torch.zeros(2)}
    state_dict_gather(state_dict_to_device(state, world, torch.device("cpu")), whole)
    seen["whole"] = {name: value.tolist() for name, value in whole.items()}
    return seen


ZCH_ROWS, ZCH_STEPS, TABLES = 12, 6, ("a", "b")


def mapped_model() -> torch.nn.Module:
    """Two tables behind maps that are brought up to date each second step, and a filter that draws for one of them."""
    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=ZCH_ROWS, embedding_dim=8, feature_names=[f"f_{name}"])
        for name in TABLES
    ]
    policies = (
        LFU_EvictionPolicy(),
        DistanceLFU_EvictionPolicy(
            threshold_filtering_func=lambda counts: (torch.rand(len(counts)) > 0.3, 0)
        ),
    )
    maps = {
        name: MCHManagedCollisionModule(ZCH_ROWS, torch.device("cpu"), policy, eviction_interval=2)
        for name, policy in zip(TABLES, policies, strict=True)
    }
    collection = ManagedCollisionCollection(maps, tables)
    return torch.nn.ModuleDict(
        {"mc": ManagedCollisionEmbeddingBagCollection(sw.EmbeddingBagCollection(tables), collection, True)}
    )


def mapped_batch(step: int, *ranks: int) -> sw.KeyedJaggedTensor:
    """Four bags a rank of two features, of some ranks together; small numbers more often."""
    lengths, ids = [], []
    for feature in range(len(TABLES)):
        for rank in ranks:
            generator = torch.Generator().manual_seed(100 * feature + 10 * step + rank)
            lengths.append(torch.randint(4, (4,), generator=generator))
            drawn = torch.rand(int(lengths[-1].sum()), generator=generator)
            ids.append((drawn**3 * 60).long() * 10**12)
    return sw.KeyedJaggedTensor(
        keys=[f"f_{name}" for name in TABLES], values=torch.cat(ids), lengths=torch.cat(lengths)
    )


def train_mapped(
    steps: Sequence[int], *, loaded: Path | None = None, saved: Path | None = None
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Train sharded; pooled rows by step, the maps, and whole tables.

    Args:
        steps: numbers of the steps' batches.
        loaded: a checkpoint to begin with.
        saved: where to save one at the end.
    """
    sharders = [EmbeddingBagCollectionSharder({"optimizer": "sgd", "learning_rate": 0.5})]
    constraints = {
        "a": sw.ParameterConstraints(sharding_types=["row_wise"]),
        "b": sw.ParameterConstraints(sharding_types=["table_wise"]),
    }
    unsharded = mapped_model()
    planner = EmbeddingShardingPlanner(constraints=constraints, debug=False)
    plan = planner.collective_plan(unsharded, sharders)
    model = DistributedModelParallel(unsharded, plan=plan, sharders=sharders)
    if loaded is not None:
        sw.load_checkpoint(loaded, model)
    torch.manual_seed(dist.get_rank())  # filters that draw must agree all the same
    pooled = []
    for step in steps:
        values, _ = model.module["mc"](mapped_batch(step, dist.get_rank()))
        values.values().sum().backward()
        pooled.append(values.values().detach())
    if saved is not None:
        sw.save_checkpoint(saved, model)
    maps = {name: value for name, value in model.state_dict().items() if "_mch" in name}
    return pooled, maps, model.full_state_dict()
