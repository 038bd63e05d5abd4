"""Real steps of plans on ranks: forward pass of the collection, its outputs, backward pass and fused update."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from attrs import frozen

from shardwright.modules.embedding_modules import EmbeddingBagCollection
from shardwright.planning.arrays import Floats
from shardwright.planning.plan.plan import ShardingPlan
from shardwright.planning.tables.spec import EmbeddingBagConfig, TableSpec
from shardwright.planning.tables.workload import Workload
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.ranks.group_store import this_host
from shardwright.runtime.sharded.collections.sharders import EmbeddingBagCollectionSharder
from shardwright.runtime.sharded.models.model_parallel import DistributedModelParallel
from shardwright.sparse import KeyedJaggedTensor
from shardwright_plugins.following.clocks import LOOKUP, UPDATE, KernelClock
from shardwright_plugins.measuring.phases import MARKS, give_back_memory, keep_memory, kernel_clock, phases_of

__all__ = ["Measured", "drawn_batches", "measure_each", "measure_plan"]

_NUM_BATCHES = 4

_QUIET = 0.04
_UNSTEADY = 0.1
"""Distance of the quartiles of a run's steps, as a part of the median, from which on the run is unsteady."""
MOST_TRIES = 3
_LONGEST_S = 1.0
"""Time of a run of a plan, s, after which fewer steps must do; slow kernels take seconds a step."""
_WARM, _FEWEST = 2, 5


@frozen
class Measured:
    """Times of one run of a plan, ms: medians over its steps.

    Args:
        step_ms: time of a step, from a barrier to the end of the slowest rank's update.
        phases_ms: time of each phase, by the names that estimators give them (``phases.py``).
        spread_ms: the quartiles of the steps' times apart.
        others: the part of the machine's processors that other programs took meanwhile; 0 where that is not known.
    """

    step_ms: float
    phases_ms: Mapping[str, float]
    spread_ms: float
    others: float

    @property
    def is_steady(self) -> bool:
        """True if other programs took little and steps took about the same time: a second run tells no more."""
        return self.others < _QUIET and self.spread_ms < _UNSTEADY * self.step_ms


def measure_each(
    work: Sequence[tuple[Mapping[str, Any], str]], *, steps: int, most_tries: int = MOST_TRIES
) -> list[Measured]:
    """Measure plans one after the other; every rank of the process group makes this call.

    Args:
        work: pairs of a workload as JSON data and a plan document; one may come several times.
        steps: steps that count, of each run.
        most_tries: runs of a plan at most, while other programs disturb them.

    Returns:
        A figure for each pair, the same on every rank.
    """
    found = []
    for data, text in work:
        workload = Workload.from_data(data)
        batches = drawn_batches(workload)
        found.append(measure_plan(workload, ShardingPlan.from_json(text), batches, steps, most_tries))
        give_back_memory()
    return found


def drawn_batches(workload: Workload) -> list[KeyedJaggedTensor]:
    """Batches of this rank for a workload, whose ids are drawn evenly."""
    return [_batch(workload, number) for number in range(_NUM_BATCHES)]


def measure_plan(
    workload: Workload,
    plan: ShardingPlan,
    batches: Sequence[KeyedJaggedTensor],
    steps: int,
    most_tries: int = MOST_TRIES,
) -> Measured:
    """Run steps until other programs leave the machine alone, a few times at most; the quickest run counts.

    Args:
        workload: the tables.
        plan: the plan, of as many ranks as the process group has; every one of them makes this call.
        batches: this rank's batches, which steps take in turn.
        steps: steps that count.
        most_tries: runs at most.
    """
    keep_memory()
    model = _model(workload, plan)
    clock = kernel_clock(model)
    gradient = torch.rand(batches[0].stride(), _width(workload.tables))
    _times(model, clock, batches, gradient, len(batches))  # compiles, and touches all memory
    warm = torch.tensor(_times(model, clock, batches, gradient, _WARM)[:, :3].sum() / _WARM)
    dist.all_reduce(warm, op=dist.ReduceOp.MAX)
    steps = min(steps, max(_FEWEST, int(_LONGEST_S / float(warm))))
    tries: list[Measured] = []
    while len(tries) < most_tries and not (tries and tries[-1].others < _QUIET):
        others = OtherPrograms()
        times = _times(model, clock, batches, gradient, steps)
        tries.append(_summary(times, others.share()))
    return min(tries, key=lambda run: run.step_ms)


def _times(
    model: DistributedModelParallel,
    clock: KernelClock,
    batches: Sequence[KeyedJaggedTensor],
    gradient: torch.Tensor,
    steps: int,
) -> Floats:
    """Seconds of this rank's steps, as :data:`MARKS` has them: ``[steps, marks]``."""
    times = np.zeros((steps, len(MARKS)))
    for number, row in enumerate(times):
        batch = batches[number % len(batches)]
        dist.barrier()
        clock.start()
        start = time.perf_counter()
        output = model(batch)
        looked_up = time.perf_counter()
        values = output.values()
        there, ahead = time.perf_counter(), clock.total(UPDATE)
        values.backward(gradient)
        spans = np.diff([start, looked_up, there, time.perf_counter()])
        row[:] = *spans, clock.total(LOOKUP), ahead, clock.total(UPDATE) - ahead
        del output, values
    return times


def _summary(times: Floats, others: float) -> Measured:
    """Medians, the same on every rank."""
    whole, phases = phases_of(times)
    low, middle, high = 1e3 * np.quantile(whole, (0.25, 0.5, 0.75))
    medians = {name: round(1e3 * float(np.median(own)), 4) for name, own in phases.items()}
    return Measured(round(float(middle), 4), medians, round(float(high - low), 4), round(others, 3))


class OtherPrograms:
    """Tells what other programs than the ranks did while this existed; every rank of the group makes one."""

    def __init__(self) -> None:
        self._start = _clocks()

    def share(self) -> float:
        """The part of a host's processors that others took, the most of all hosts, the same on every rank.

        It is 0 where Linux does not tell.
        """
        passed = [now - then for now, then in zip(_clocks(), self._start, strict=True)]
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, (this_host(), *passed))
        shares = [0.0]
        for host in {name for name, *_ in told}:
            here = [own for name, *own in told if name == host]
            busy, total, _ = here[0]
            if total:
                shares.append((busy - sum(own for *_, own in here)) / total)
        return max(shares)


def _clocks() -> tuple[float, float, float]:
    """Seconds that processors were busy, that passed on all of them, and that this process took."""
    own = sum(os.times()[:2])
    try:
        words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    except OSError:
        return 0.0, 0.0, own
    ticks = [int(word) / os.sysconf("SC_CLK_TCK") for word in words]
    idle = ticks[3] + ticks[4]
    return sum(ticks) - idle, sum(ticks), own


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
