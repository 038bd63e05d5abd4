"""What a step costs by the model where tables are sharded over groups of ranks and averaged: 64 to 4 096 ranks.

    python tests/benchmarks/sharding_groups.py [--workload tables.json] [--worlds 64,512,4096] [--groups 8,64,512,4096]

Each line is a plan for one sharding group: the slowest rank's milliseconds a step by the estimator `roofline`, without
dense layers, and what of them are exchanges of ids, results and gradients, lookup and update, and averaging. A group of
all ranks is model parallelism in one dimension. Hosts are of 8 NVIDIA H100: 80 GiB at 3.35 TB/s, NVLink at 450 GB/s a
way, one port of InfiniBand at 50 GB/s for each device, as NVIDIA publishes of the DGX H100.
"""

from __future__ import annotations

import json as json_format
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

from shardwright import (
    EmbeddingShardingPlanner,
    NoPlanError,
    OptimizerSpec,
    ParameterConstraints,
    TableSpec,
    Topology,
    Workload,
)

GIB = 1 << 30
HOST = 8  # ranks
BATCH = 4096  # samples of a rank
# Rows of 26 tables of 128 columns, as far apart as those of Criteo's terabyte of clicks with 40 million at most.
ROWS = [40_000_000] * 6 + [2_500_000, 600_000, 250_000, 40_000, 20_000, 17_000, 12_000, 10_000]
ROWS += [7_000, 7_000, 2_200, 1_500, 1_000, 976, 155, 108, 63, 36, 14, 3]
COMMUNICATION = "communication"


def tables() -> tuple[list[TableSpec], dict[str, ParameterConstraints]]:
    """The tables that are planned if no workload is given, of one id or, the six largest, of twenty a sample."""
    optimizer = OptimizerSpec("row_wise_adagrad", learning_rate=0.01)
    specs = [TableSpec(f"t{number}", rows, 128, optimizer=optimizer) for number, rows in enumerate(ROWS)]
    pooling = {f"t{number}": 20.0 if rows == ROWS[0] else 1.0 for number, rows in enumerate(ROWS)}
    return specs, {name: ParameterConstraints(pooling_factors=[ids]) for name, ids in pooling.items()}


def machines(ranks: int) -> Topology:
    """Hosts of eight H100."""
    return Topology(
        ranks,
        "cuda",
        local_world_size=HOST,
        hbm_cap=80 * GIB,
        hbm_mem_bw=3.35e9,
        intra_host_bw=450e6,
        inter_host_bw=50e6,
    )


def cases(worlds: list[int], groups: list[int], steps: list[int]) -> Iterator[tuple[int, int, int, bool]]:
    """Ranks, ranks of a group, steps from one averaging to the next, and whether groups are neighbouring ranks."""
    for ranks in worlds:
        for size in groups:
            if size == ranks:
                yield ranks, size, 1, True
            elif size < ranks:
                yield from ((ranks, size, every, is_inter) for every in steps for is_inter in (True, False))


def measure(
    specs: list[TableSpec],
    rules: dict[str, ParameterConstraints],
    case: tuple[int, int, int, bool],
    batch: int,
    seconds: float | None,
) -> dict[str, Any]:
    """The figures of one case."""
    ranks, size, every, is_inter_host = case
    topology = machines(ranks)
    if size < ranks:
        topology = topology.sharding_group(size, sync_every=every, use_inter_host_allreduce=is_inter_host)
    planner = EmbeddingShardingPlanner(
        topology, batch, constraints=rules, estimator="roofline", seconds=seconds
    )
    asked = {
        "ranks": ranks,
        "group": size,
        "every": every,
        "groups": "neighbours" if is_inter_host else "apart",
    }
    try:
        planner.plan_tables(specs)
    except NoPlanError as error:
        return {**asked, "failed": str(error)[:60]}
    statistics = planner.report.statistics
    slowest = max(statistics.ranks, key=lambda rank: rank.time_ms)
    phases = slowest.phases_ms
    averaging = phases.get("averaging", 0.0)
    travel = sum(time for phase, time in phases.items() if COMMUNICATION in phase)
    return {
        **asked,
        "step_ms": round(slowest.time_ms, 3),
        "exchanges_ms": round(travel, 3),
        "compute_ms": round(slowest.time_ms - travel - averaging, 3),
        "averaging_ms": round(averaging, 3),
        "averaged_gb": round(max(rank.averaged_bytes for rank in statistics.ranks) / 1e9, 2),
    }


def numbers(text: str) -> list[int]:
    """The numbers in a list."""
    return [int(number) for number in text.split(",")]


def main(
    workload: Annotated[Path | None, typer.Option(help="Tables, a JSON file.")] = None,
    worlds: Annotated[str, typer.Option(help="Numbers of ranks.")] = "64,512,4096",
    groups: Annotated[str, typer.Option(help="Numbers of ranks of a sharding group.")] = "8,64,512,4096",
    every: Annotated[str, typer.Option(help="Steps from one averaging to the next.")] = "1,100",
    seconds: Annotated[float | None, typer.Option(help="How long to search for each plan at most.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, one object.")] = False,
) -> None:
    """Print what steps cost by the model."""
    specs, rules, batch = *tables(), BATCH
    if workload is not None:
        loaded = Workload.read(workload)
        specs, rules = list(loaded.tables), dict(loaded.constraints)
    jobs = list(cases(numbers(worlds), numbers(groups), numbers(every)))
    shown = track(jobs, "planning", console=Console(stderr=True))
    figures = [measure(specs, rules, job, batch, seconds) for job in shown]
    if json:
        typer.echo(json_format.dumps({"figures": figures}))
        return
    names = list(dict.fromkeys(name for row in figures for name in row))
    table = Table(*names, box=box.MARKDOWN)
    for row in figures:
        table.add_row(*(str(row.get(name, "")) for name in names))
    Console(width=160).print(table)


if __name__ == "__main__":
    typer.run(main)
