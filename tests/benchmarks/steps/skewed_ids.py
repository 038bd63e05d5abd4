"""Steps on ids that follow Zipf's law, by row map: measured, and predicted by `engine` with and without a profile.

Usage: python -m tests.benchmarks.steps.skewed_ids [--exponents 0 1.0 1.3] [--shares 0.5 0.9] [--steps 12] [--tables 6]
[--ids 20] [--rounds 2]

Two ranks on this machine, gloo, one thread each. A profile of eight other steps has the number of distinct rows of a
step; access counts of 30 batches say which rows are hot.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from attrs import frozen

sys.path.insert(0, str(Path(__file__).parents[3] / "contrib" / "hot_rows"))
sys.path.insert(0, str(Path(__file__).parents[3] / "contrib" / "round_robin"))

import shardwright_hot_rows
import shardwright_round_robin
from shardwright_hot_rows import AccessCounts, sharding_type

import shardwright as sw
from shardwright.host import PluginHost, use_host
from shardwright.planning.tables.workload import Workload
from shardwright_plugins.following.predicted import Predicted, Prices
from shardwright_plugins.measuring.steps import Measured, measure_plan
from shardwright_plugins.profiles import Profile
from shardwright_testing.ranks import RankPool

ROWS, DIM, BATCH, RANKS = 200_000, 64, 1024, 2
TYPES = ("table_wise", "row_wise", "round_robin", "hot_rows")
BATCHES, TIMEOUT_S = 4, 200.0
PHASES = {
    "input_communication": ("input_communication", "id_partition"),
    "forward_compute": ("forward_compute",),
    "forward_communication": ("forward_communication",),
    "backward_communication": ("backward_communication",),
    "backward_compute": ("backward_compute",),
}
"""Phase that is measured -> those that are predicted of it. Mixing, waits and what any step takes are beside."""


def plugin_host() -> PluginHost:
    return PluginHost(plugins={"hot_rows": shardwright_hot_rows, "round_robin": shardwright_round_robin})


def workload_of(tables: int, ids: int) -> dict[str, Any]:
    optimizer = {"name": "row_wise_adagrad", "learning_rate": 0.02, "eps": 1e-8}
    return {
        "name": "skewed ids",
        "batch_size_per_rank": BATCH,
        "tables": [
            {
                "name": f"t{index}",
                "num_embeddings": ROWS,
                "embedding_dim": DIM,
                "pooling_factor": ids,
                "optimizer": optimizer,
                "feature_names": [f"f{index}"],
            }
            for index in range(tables)
        ],
    }


class Zipf:
    """Ids of which the row of rank ``k`` in frequency has a part that falls as ``k ** -exponent``; 0 is even."""

    def __init__(self, exponent: float) -> None:
        self._total = np.cumsum(np.arange(1.0, ROWS + 1) ** -exponent)
        self._row = np.random.default_rng(7).permutation(ROWS)

    def draw(self, count: int, seed: int) -> torch.Tensor:
        drawn = np.random.default_rng(seed).random(count) * self._total[-1]
        return torch.from_numpy(self._row[np.searchsorted(self._total, drawn)])

    def batch(self, tables: int, ids: int, seed: int, samples: int = BATCH) -> sw.KeyedJaggedTensor:
        keys = [f"f{index}" for index in range(tables)]
        values = torch.cat([self.draw(samples * ids, 100 * seed + index) for index in range(tables)])
        return sw.KeyedJaggedTensor(
            keys, values, lengths=torch.full((tables * samples,), ids, dtype=torch.int32)
        )


def measured(
    data: Mapping[str, Any], texts: Sequence[str], exponent: float, ids: int, steps: int
) -> list[Measured]:
    """Times of plans; every rank makes this call."""
    workload, zipf = Workload.from_data(data), Zipf(exponent)
    first, tables = 1000 * (1 + torch.distributed.get_rank()), len(workload.tables)
    batches = [zipf.batch(tables, ids, first + number) for number in range(BATCHES)]
    with use_host(plugin_host()):
        return [measure_plan(workload, sw.ShardingPlan.from_json(text), batches, steps) for text in texts]


@frozen
class Planned:
    """A plan of all tables by one type, and its prices without and with a profile, ms."""

    name: str
    plan: sw.ShardingPlan
    prices: Sequence[Predicted]


def planned(
    workload: Workload, rules: Mapping[str, sw.ParameterConstraints], name: str, extras: Any, ids: int
) -> Planned:
    rule = sw.ParameterConstraints(
        sharding_types=[name],
        compute_kernels=["fused_numba"],
        pooling_factors=[float(ids)],
        extras=extras,
    )
    found = []
    for seen in (
        {path: rule for path in rules},
        {path: rule.filled_from(own) for path, own in rules.items()},
    ):
        planner = sw.EmbeddingShardingPlanner(
            sw.Topology(RANKS, "cpu"), BATCH, constraints=seen, estimator="engine", progress=False
        )
        found.append(planner.plan_tables(workload.tables))
    prices = [Prices.by(plan).of(plan) for plan in found]
    layout = found[0].plan[""]["t0"].layout
    told = " ".join([name, *((layout.variant or "").split()[:1] if layout else [])])
    return Planned(told, found[0], [price for price in prices if price])


def profiled(tables: int, zipf: Zipf, ids: int, workload: Workload) -> Mapping[str, sw.ParameterConstraints]:
    profile = Profile(list(workload.tables))
    for seed in range(8):
        profile.add(zipf.batch(tables, ids, 10**5 + seed, samples=RANKS * BATCH))
    return profile.constraints()


def plans(
    workload: Workload, zipf: Zipf, ids: int, shares: Sequence[float]
) -> tuple[list[Planned], Mapping[str, sw.ParameterConstraints]]:
    rules = profiled(len(workload.tables), zipf, ids, workload)
    found = [planned(workload, rules, name, None, ids) for name in TYPES if name != "hot_rows"]
    counts = AccessCounts.measured([zipf.draw(BATCH * ids, 10**6 + seed) for seed in range(30)], ROWS)
    offered = sharding_type.SHARES
    for share in shares:
        sharding_type.SHARES = (share,)  # one layout, which the planner has to take
        found.append(planned(workload, rules, "hot_rows", counts.to_extras(), ids))
    sharding_type.SHARES = offered
    return found, rules


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--exponents", type=float, nargs="+", default=[0.0, 1.0, 1.3])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.9])
    for option, default in (("--steps", 12), ("--tables", 6), ("--ids", 20), ("--rounds", 2)):
        parser.add_argument(option, type=int, default=default)
    asked = parser.parse_args()
    data = workload_of(asked.tables, asked.ids)
    with use_host(plugin_host()), RankPool(RANKS, backend="gloo") as pool:
        for exponent in asked.exponents:
            found, rules = plans(Workload.from_data(data), Zipf(exponent), asked.ids, asked.shares)
            cache: Any = next(iter(rules.values())).cache_params
            told = cache.stats.expected_lookups / (RANKS * BATCH * asked.ids)
            print(f"exponent {exponent}: {told:.0%} of a step's ids are distinct rows")
            work = asked.rounds * [own.plan.to_json() for own in found]
            runs = pool.run(
                measured, RANKS, data, work, exponent, asked.ids, asked.steps, timeout_s=TIMEOUT_S
            )[0]
            for index, own in enumerate(found):
                print_beside(own, min(runs[index :: len(found)], key=lambda run: run.step_ms))


def print_beside(own: Planned, run: Measured) -> None:
    """Milliseconds measured, predicted without and with the profile: of the step, and of its phases."""
    steps = [price.step_ms for price in own.prices]
    print(
        f"  {own.name:<24} measured {run.step_ms:6.1f}, predicted {steps[0]:6.1f}, profiled {steps[1]:6.1f}"
    )
    for phase in PHASES:
        ms = [sum(max(price.phases_ms.get(name, [0.0])) for name in PHASES[phase]) for price in own.prices]
        print(f"    {phase:<32} {run.phases_ms[phase]:6.2f} {ms[0]:17.2f} {ms[1]:16.2f}")


if __name__ == "__main__":
    main()
