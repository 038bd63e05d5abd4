"""Real steps of plans on ranks: forward pass of the collection, its outputs, backward pass and fused update."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from attrs import frozen

from shardwright.modules.embedding_modules import EmbeddingBagCollection
from shardwright.planning.plan.plan import ShardingPlan
from shardwright.planning.tables.spec import EmbeddingBagConfig, TableSpec
from shardwright.planning.tables.workload import Workload
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.sharded.collections.sharders import EmbeddingBagCollectionSharder
from shardwright.runtime.sharded.models.model_parallel import DistributedModelParallel
from shardwright.sparse import KeyedJaggedTensor

PHASES = ("forward", "outputs", "backward")
"""Call of the module (ids out, lookups), waiting for its outputs, and the backward pass with its update."""
_NUM_BATCHES = 4


@frozen
class Measured:
    """Times of one run of a plan, ms: the median over its steps of what the slowest rank took.

    Args:
        step_ms: of a step, from a barrier to the end of the update.
        phases_ms: of each of :data:`PHASES`.
        spread_ms: the quartiles of the steps' times apart.
    """

    step_ms: float
    phases_ms: Mapping[str, float]
    spread_ms: float


def measure_plans(
    data: Mapping[str, Any], texts: Sequence[str], order: Sequence[int], *, steps: int
) -> list[Measured]:
    """Measure plans one after the other; every rank of the process group makes this call.

    Args:
        data: the workload as JSON data.
        texts: plan documents.
        order: the plans to measure, by number; one may come several times.
        steps: steps that count, of each run.

    Returns:
        A figure for each of ``order``, the same on every rank.
    """
    workload = Workload.from_data(data)
    batches = [_batch(workload, number) for number in range(_NUM_BATCHES)]
    return [_measure(workload, ShardingPlan.from_json(texts[number]), batches, steps) for number in order]


def _measure(
    workload: Workload, plan: ShardingPlan, batches: Sequence[KeyedJaggedTensor], steps: int
) -> Measured:
    model, width = _model(workload, plan), _width(workload.tables)
    gradient = torch.rand(batches[0].stride(), width)
    times = np.zeros((len(batches) + steps, len(PHASES)))
    for number, row in enumerate(times):
        batch = batches[number % len(batches)]
        dist.barrier()
        start = time.perf_counter()
        output = model(batch)
        looked_up = time.perf_counter()
        values = output.values()
        there = time.perf_counter()
        values.backward(gradient)
        row[:] = np.diff([start, looked_up, there, time.perf_counter()])
        del output, values
    slowest = torch.from_numpy(np.column_stack([times, times.sum(1)])[len(batches) :])
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    low, middle, high = np.quantile(1e3 * slowest.numpy(), (0.25, 0.5, 0.75), axis=0)
    phases = dict(zip(PHASES, middle.round(4).tolist(), strict=False))
    return Measured(round(float(middle[-1]), 4), phases, round(float(high[-1] - low[-1]), 4))


def _model(workload: Workload, plan: ShardingPlan) -> DistributedModelParallel:
    """The sharded collection; weights are equal, since drawing them takes longer than steps."""
    configs = [
        EmbeddingBagConfig(
            num_embeddings=table.num_embeddings,
            embedding_dim=table.embedding_dim,
            name=table.name,
            data_type=table.data_type,
            feature_names=list(table.feature_names),
            pooling=table.pooling,
            init_fn=_fill,
        )
        for table in workload.tables
    ]
    module = EmbeddingBagCollection(configs, is_weighted=workload.tables[0].is_weighted, device="meta")
    env = ShardingEnv.from_process_group()
    return DistributedModelParallel(
        module, env=env, device=torch.device("cpu"), plan=plan, sharders=_sharders(workload.tables)
    )


def _fill(weight: torch.Tensor) -> None:
    weight.fill_(0.01)


def _sharders(tables: Sequence[TableSpec]) -> list[Any]:
    optimizer = tables[0].optimizer
    if optimizer is None:
        return [EmbeddingBagCollectionSharder()]
    fused = {
        "optimizer": optimizer.name,
        "learning_rate": optimizer.learning_rate,
        **dict(optimizer.parameters),
    }
    return [EmbeddingBagCollectionSharder(fused_params=fused)]


def _width(tables: Sequence[TableSpec]) -> int:
    return sum(table.embedding_dim * len(table.feature_names) for table in tables)


def _batch(workload: Workload, number: int) -> KeyedJaggedTensor:
    """This rank's batch of that number: ids drawn evenly, bags of one length but for a fraction of an id."""
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    size, keys, values, lengths = workload.batch_size or 1, [], [], []
    for table in workload.tables:
        rule = workload.constraints.get(table.path)
        factors = (rule and rule.pooling_factors) or [1.0] * len(table.feature_names)
        for name, factor in zip(table.feature_names, list(factors) * len(table.feature_names), strict=False):
            own = (torch.rand(size, generator=generator) + factor).floor().to(torch.int32)
            keys.append(name)
            lengths.append(own)
            values.append(torch.randint(table.num_embeddings, (int(own.sum()),), generator=generator))
    weights = torch.rand(sum(map(len, values))) if workload.tables[0].is_weighted else None
    return KeyedJaggedTensor(keys, torch.cat(values), weights=weights, lengths=torch.cat(lengths))
