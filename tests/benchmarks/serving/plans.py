"""Plans for serving by estimated and by measured latency: real ranks over gloo, one thread each, lookups only.

    python -m tests.benchmarks.serving.plans [--data-type INT8] [--rounds 5] [--batches 20]

Each plan is that of the planner under other constraints. All plans of a round are timed in turn; of each the least time
of all rounds is kept. A batch's time is that of the slower rank, from a barrier to the last result.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from itertools import combinations
from typing import Annotated, Any

import shardwright_serving as serving
import torch
import torch.distributed as dist
import typer

import shardwright as sw
from shardwright.planning.plan.sharding import aligned
from shardwright_testing.ranks import RankPool

RANKS = 2
BATCH = 256
DIM = 64
IDS = {"big": 10, "hot": 20}
ROWS = {"big": 200_000, "hot": 1_000}
COUNT = {"big": 4, "hot": 12}
CLEARLY = 1.3
"""Ratio of two estimates from which on the measured order is compared: nearer ones are the model's noise."""
SHARDERS = [sw.EmbeddingBagCollectionSharder(), serving.QuantEmbeddingBagCollectionSharder()]
LAYOUTS: Mapping[str, Mapping[str, tuple[str, ...] | None]] = {
    "planner": {"big": None, "hot": None},
    "planner, big ones not copied": {"big": ("table_wise", "column_wise", "row_wise"), "hot": None},
    "data_parallel": dict.fromkeys(COUNT, ("data_parallel",)),
    "table_wise": dict.fromkeys(COUNT, ("table_wise",)),
    "row_wise": dict.fromkeys(COUNT, ("row_wise",)),
    "column_wise": dict.fromkeys(COUNT, ("column_wise",)),
    "big table_wise, hot row_wise": {"big": ("table_wise",), "hot": ("row_wise",)},
}


def collection(data_type: str) -> Any:
    """The collection of all tables, of floats or quantized, without memory."""
    tables = [
        sw.EmbeddingBagConfig(
            name=f"{kind}_{index}",
            num_embeddings=ROWS[kind],
            embedding_dim=DIM,
            feature_names=[f"f_{kind}_{index}"],
            data_type=data_type,
        )
        for kind, count in COUNT.items()
        for index in range(count)
    ]
    kind = sw.EmbeddingBagCollection if data_type == "FP32" else serving.QuantEmbeddingBagCollection
    return kind(tables, device="meta")


def planned(
    types: Mapping[str, tuple[str, ...] | None], estimator: str, data_type: str
) -> tuple[sw.ShardingPlan, float]:
    """A plan under constraints on the sharding types, and its estimated latency, ms."""
    constraints = {
        f"{kind}_*": sw.ParameterConstraints(sharding_types=allowed, pooling_factors=[float(IDS[kind])])
        for kind, allowed in types.items()
    }
    planner = sw.EmbeddingShardingPlanner(
        topology=sw.Topology(RANKS, "cpu"),
        constraints=constraints,
        estimator=estimator,
        batch_size=BATCH,
        objective="serving",
    )
    plan = planner.plan(collection(data_type), SHARDERS)
    return plan, plan.document["objective"]["value_ms"]


def measure(plans: Mapping[str, str], data_type: str, rounds: int, batches: int) -> dict[str, list[float]]:
    """Time each plan's batches on this rank; every rank calls this.

    Returns:
        Plan -> milliseconds of each batch of all rounds.
    """
    models = {name: _sharded(text, data_type) for name, text in plans.items()}
    features = [_batch(number) for number in range(4)]
    times: dict[str, list[float]] = {name: [] for name in plans}
    with torch.inference_mode():
        for _ in range(rounds):
            for name, model in models.items():
                for number in range(batches):
                    dist.barrier()
                    start = time.perf_counter()
                    model(features[number % len(features)]).values()
                    times[name].append(1e3 * (time.perf_counter() - start))
    return times


def _sharded(text: str, data_type: str) -> Any:
    plan = sw.ShardingPlan.from_json(text)
    return sw.DistributedModelParallel(collection(data_type), plan=plan, sharders=SHARDERS)


def _batch(number: int) -> Any:
    generator = torch.Generator().manual_seed(1000 * number + dist.get_rank())
    kinds = [(kind, index) for kind, count in COUNT.items() for index in range(count)]
    values = [torch.randint(0, ROWS[kind], (BATCH * IDS[kind],), generator=generator) for kind, _ in kinds]
    lengths = [torch.full((BATCH,), IDS[kind], dtype=torch.int32) for kind, _ in kinds]
    names = [f"f_{kind}_{index}" for kind, index in kinds]
    return sw.KeyedJaggedTensor(keys=names, values=torch.cat(values), lengths=torch.cat(lengths))


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Of all plans in turn.")] = 5,
    batches: Annotated[int, typer.Option(min=1, help="Timed batches of a plan and round.")] = 20,
    data_type: Annotated[
        str, typer.Option(metavar="TYPE", help="FP32, or a precision of served rows.")
    ] = "FP32",
    estimator: Annotated[str, typer.Option(metavar="NAME", help="The model of costs.")] = "roofline",
) -> None:
    """Print estimated and measured latencies, and how many pairs of plans are in the same order by both."""
    plans = {name: planned(types, estimator, data_type) for name, types in LAYOUTS.items()}
    with RankPool(RANKS, backend="gloo") as pool:
        texts = {name: plan.to_json() for name, (plan, _) in plans.items()}
        by_rank = pool.run(measure, RANKS, texts, data_type, rounds, batches, timeout_s=300.0)
    measured = {name: min(map(max, *(own[name] for own in by_rank))) for name in plans}
    rows = [
        (name, f"{estimate:.3f}", f"{measured[name]:.3f}", f"{measured[name] / estimate:.2f}")
        for name, (_, estimate) in sorted(plans.items(), key=lambda item: item[1][1])
    ]
    print(aligned(("plan", "estimated ms", "measured ms", "ratio"), rows))
    pairs = [
        (one, other)
        for one, other in combinations(sorted(plans, key=lambda name: plans[name][1]), 2)
        if plans[other][1] > CLEARLY * plans[one][1]
    ]
    kept = sum(measured[one] < measured[other] for one, other in pairs)
    print(
        f"{kept} of {len(pairs)} pairs of plans whose estimates differ by {CLEARLY} or more are in that order"
    )


if __name__ == "__main__":
    typer.run(main)
