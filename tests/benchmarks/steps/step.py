"""A training step of a sharded collection on ranks of this machine: one case.

    python tests/benchmarks/steps/step.py --types table_wise,row_wise --ranks 2

Prints JSON: the least and the median step in ms, and the collectives of a step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).parents[3]))

from tests.benchmarks.steps.timed_step import StepSettings, measured


def main(
    types: Annotated[str, typer.Option(metavar="T,...", help="Sharding types, dealt to the tables in turn.")],
    ranks: Annotated[int, typer.Option(min=1, help="Processes, one thread each.")] = 2,
    batch: Annotated[int, typer.Option(min=1, help="Samples of each rank.")] = 1024,
    tables: Annotated[int, typer.Option(min=1, help="Equal tables, one feature each.")] = 24,
    rows: Annotated[int, typer.Option(min=1, help="Rows of a table.")] = 100_000,
    dim: Annotated[int, typer.Option(min=1, help="Columns of a table.")] = 64,
    ids: Annotated[int, typer.Option(min=0, help="Ids of a bag.")] = 10,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps.")] = 25,
    hosts: Annotated[int, typer.Option(min=1, help="Hosts that ranks pretend to be on.")] = 1,
    kernel: Annotated[str, typer.Option(help="Compute kernel; the planner's choice by default.")] = "",
    device: Annotated[str, typer.Option(help="Type of the ranks' devices, one a rank.")] = "cpu",
) -> None:
    """Time the step on ranks of this machine."""
    settings = StepSettings((), ranks, batch, tables, rows, dim, ids, steps, hosts, kernel, device)
    typer.echo(json.dumps(measured(settings.of_types(types))))


if __name__ == "__main__":
    typer.run(main)
