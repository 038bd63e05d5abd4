"""Times of steps, and a plan that follows its data, in a training whose popularity drifts: what they cost and save.

    python -m tests.benchmarks.following overhead   # steps with StepTimes and without, in turn
    python -m tests.benchmarks.following drift [STEPS] [EVERY]  # steps with a Replanner and without, on each rank

Two ranks of gloo on this machine, one thread each.
"""

from __future__ import annotations

import json
import time
from typing import Annotated, Any

import numpy as np
import torch
import torch.distributed as dist
import typer

import shardwright as sw
from shardwright_plugins.following import Replanner, StepTimes
from shardwright_plugins.measuring.phases import keep_memory
from shardwright_plugins.measuring.processor import processor
from shardwright_testing.ranks import RankPool

RANKS, TABLES, ROWS, DIM, BATCH = 2, 16, 50_000, 64, 512
EVEN, HEAVY, LIGHT = 10, 18, 2
_MOST_S_A_STEP = 0.1
SHARDERS = [sw.EmbeddingBagCollectionSharder({"optimizer": "row_wise_adagrad", "learning_rate": 0.02})]


def _model(tables: int, rows: int, dim: int, batch: int, ids: float) -> sw.DistributedModelParallel:
    keep_memory()
    torch.manual_seed(0)
    configs = [
        sw.EmbeddingBagConfig(
            name=f"t{index}", num_embeddings=rows, embedding_dim=dim, feature_names=[f"f{index}"]
        )
        for index in range(tables)
    ]
    module = sw.EmbeddingBagCollection(configs, device="meta")
    rules = {"*": sw.ParameterConstraints(pooling_factors=[ids], sharding_types=["table_wise"])}
    planner = sw.EmbeddingShardingPlanner(sw.Topology(RANKS, "cpu"), batch, constraints=rules)
    plan = planner.collective_plan(module, SHARDERS)
    return sw.DistributedModelParallel(module, plan=plan, sharders=SHARDERS, device="cpu")


def _batches(rows: int, batch: int, ids: list[int]) -> list[sw.KeyedJaggedTensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    lengths = torch.tensor(ids, dtype=torch.int32).repeat_interleave(batch)
    keys = [f"f{index}" for index in range(len(ids))]
    return [
        sw.KeyedJaggedTensor(
            keys, torch.randint(rows, (int(lengths.sum()),), generator=generator), lengths=lengths
        )
        for _ in range(4)
    ]


def _step(model: sw.DistributedModelParallel, features: sw.KeyedJaggedTensor, gradient: torch.Tensor) -> None:
    model(features).values().backward(gradient)


def overhead(tables: int, rows: int, dim: int, batch: int, ids: int, rounds: int) -> dict[str, Any]:
    """Times of a step, and of this rank's thread in it, ms, with clocks and without, in turn: the quickest tenth."""
    model = _model(tables, rows, dim, batch, ids)
    batches, gradient = _batches(rows, batch, [ids] * tables), torch.rand(batch, tables * dim)
    times, took = StepTimes(model), {True: list[tuple[float, float]](), False: list[tuple[float, float]]()}
    for number in range(rounds):
        is_measured = number % 2 == 0
        if is_measured:
            times.start()
        for index in range(40):
            dist.barrier()
            start, busy = time.perf_counter(), time.thread_time()
            _step(model, batches[index % 4], gradient)
            if index >= 5:
                took[is_measured].append((time.perf_counter() - start, time.thread_time() - busy))
        times.stop()
    with_clocks, without = (1e3 * np.quantile(took[key], 0.1, axis=0) for key in (True, False))
    return {
        "with_ms": with_clocks.round(4).tolist(),
        "without_ms": without.round(4).tolist(),
        "more": (with_clocks / without - 1).round(4).tolist(),
    }


def drift(steps: int, every: int, *, follows: bool) -> dict[str, Any]:
    """Train while popularity drifts from one half of the tables to the other, three times."""
    model = _model(TABLES, ROWS, DIM, BATCH, EVEN)
    on_first = [own.ranks == [0] for own in model.plan.plan[""].values()]
    kinds = [
        _batches(ROWS, BATCH, [EVEN] * TABLES),
        *(
            _batches(ROWS, BATCH, [HEAVY if own == is_first else LIGHT for own in on_first])
            for is_first in (True, False)
        ),
    ]
    gradient = torch.rand(BATCH, TABLES * DIM)
    replanner = Replanner(model, every=every, move_cost=500.0) if follows else None
    took, busy = [], []
    for step in range(steps):
        start, started = time.perf_counter(), time.thread_time()
        _step(model, kinds[step * len(kinds) // steps][step % 4], gradient)
        if replanner is not None:
            replanner.step()
        took.append(1e3 * (time.perf_counter() - start))
        busy.append(1e3 * (time.thread_time() - started))
    looks = [] if replanner is None else replanner.looks
    if replanner is not None:
        replanner.close()
    return {
        "all_s": sum(took) / 1e3,
        "median_ms": _late_medians(took),
        "median_ms_of_thread": _late_medians(busy),
        "moves": [(look.step, look.moved_bytes) for look in looks if look.is_taken],
        "looks": len(looks),
    }


def _late_medians(times: list[float]) -> list[float]:
    """Medians of the second half of each third of the steps."""
    thirds = np.array_split(np.array(times), 3)
    return [round(float(np.median(third[len(third) // 2 :])), 3) for third in thirds]


app = typer.Typer(add_completion=False, help=__doc__)


@app.command("overhead")
def print_overhead() -> None:
    """Steps with StepTimes and without, in turn."""
    shapes = {"small": (8, 10_000, 16, 64, 2, 20), "middle": (TABLES, ROWS, DIM, BATCH, EVEN, 20)}
    with RankPool(RANKS, backend="gloo") as pool:
        _print(
            {name: pool.run(overhead, RANKS, *shape, timeout_s=200.0)[0] for name, shape in shapes.items()}
        )


@app.command("drift")
def print_drift(
    steps: Annotated[int, typer.Argument(min=3, help="Of each training.")] = 3000,
    every: Annotated[int, typer.Argument(min=1, help="Steps from one look to the next.")] = 200,
) -> None:
    """Steps with a Replanner and without, on each rank."""
    timeout_s = 60 + _MOST_S_A_STEP * steps
    with RankPool(RANKS, backend="gloo") as pool:
        _print(
            {
                name: pool.run(drift, RANKS, steps, every, follows=follows, timeout_s=timeout_s)
                for name, follows in (("without", False), ("with", True))
            }
        )


def _print(found: dict[str, Any]) -> None:
    print(json.dumps({"processor": processor(), **found}, indent=1))


if __name__ == "__main__":
    app()
