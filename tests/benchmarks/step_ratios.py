"""A training step beside another program, both sides in turn, over the cases whose ratios are promised.

    python tests/benchmarks/step_ratios.py --beside "PYTHON step.py"
    python tests/benchmarks/step_ratios.py --lean

The program after --beside gets the options of `shardwright bench step` and prints, as its last line, JSON with
min_ms, median_ms and collectives. --lean compares with lean_loop.py of this folder instead: the types that the other
program may refuse. Ctrl-C ends it early and shows what was measured; --json keeps it in a file after each round.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer
from attrs import evolve

from shardwright.errors import InvalidInputError
from shardwright_plugins.commands.bench.command import run_suite
from shardwright_plugins.commands.bench.sides import Program, Ranks
from shardwright_plugins.commands.bench.step import StepSettings
from shardwright_plugins.commands.bench.suite import Case, Suite

LEAN_LOOP = Path(__file__).with_name("lean_loop.py")
STEPS = 25
EXCHANGES = "table_wise,column_wise,table_column_wise"
LEAN_TYPES = ("table_wise", "row_wise", "table_row_wise", "grid_shard")


def case(
    types: str,
    goal: float | None,
    *,
    batch: int,
    tables: int,
    rows: int,
    dim: int,
    ids: int,
    calls: int | None,
) -> Case:
    """A case under the name that the goals have."""
    name = f"{types.replace(',', ' + ')}, batch {batch}, {tables} x {rows // 1000}k x {dim}, {ids} id"
    name += "" if ids == 1 else "s"
    settings = StepSettings((), 2, batch, tables, rows, dim, ids, STEPS).of_types(types)
    return Case(name, settings, goal, calls)


BESIDE = [
    case("table_wise", 0.65, batch=1024, tables=24, rows=100_000, dim=64, ids=10, calls=4),
    case("table_wise", 0.45, batch=4096, tables=26, rows=100_000, dim=64, ids=1, calls=4),
    case("table_wise", 0.35, batch=64, tables=24, rows=10_000, dim=16, ids=2, calls=4),
    case(EXCHANGES, 0.22, batch=64, tables=24, rows=10_000, dim=16, ids=2, calls=4),
    case("data_parallel", 0.05, batch=1024, tables=24, rows=100_000, dim=64, ids=10, calls=None),
    case("data_parallel", 0.45, batch=1024, tables=24, rows=1_000, dim=64, ids=10, calls=None),
]
LEAN = [
    case(types, None, batch=batch, tables=24, rows=rows, dim=dim, ids=ids, calls=None)
    for types in LEAN_TYPES
    for batch, rows, dim, ids in ((1024, 100_000, 64, 10), (64, 10_000, 16, 2))
]


def main(
    beside: Annotated[str | None, typer.Option(metavar="COMMAND", help="The other program.")] = None,
    lean: Annotated[bool, typer.Option("--lean", help="Compare with lean_loop.py.")] = False,
    rounds: Annotated[int, typer.Option(min=1, help="Of each side, alternating.")] = 5,
    only: Annotated[str, typer.Option(metavar="TEXT", help="Only cases whose name has this.")] = "",
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of a round.")] = STEPS,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Keep what was measured there.")] = None,
) -> None:
    """Measure both sides in turn; print medians, minima, ratios, goals and collectives."""
    if (beside is None) == (not lean):
        raise typer.BadParameter("give either --beside COMMAND or --lean")
    name = "lean loop" if lean else "beside"
    other = Program(
        f"{shlex.quote(sys.executable)} {shlex.quote(str(LEAN_LOOP))}" if lean else str(beside), name
    )
    cases = [with_steps(known, steps) for known in (LEAN if lean else BESIDE) if only in known.name]
    if not cases:
        raise InvalidInputError(f"no case has {only!r} in its name")
    run_suite(Suite(cases, [Ranks(), other], rounds), json=False, keep_going=True, path=json)


def with_steps(known: Case, steps: int) -> Case:
    """The case with another number of timed steps."""
    return evolve(known, settings=evolve(known.settings, steps=steps))


if __name__ == "__main__":
    typer.run(main)
