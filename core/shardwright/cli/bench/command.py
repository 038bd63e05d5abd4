"""The `bench` commands: start the ranks, run both sides in turn, print a table."""

from __future__ import annotations

import json as json_format
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright.cli.bench.plan import plan
from shardwright.errors import InvalidInputError

if TYPE_CHECKING:
    from shardwright.cli.bench.step import StepSettings

bench = typer.Typer(help="Time things, beside another program where one is given.", no_args_is_help=True)

_TIMEOUT_S = 600.0


@bench.callback()
def _group() -> None:
    """Time things, beside another program where one is given."""


bench.command()(plan)


@bench.command()
def step(
    types: Annotated[str, typer.Option(metavar="T,...", help="Sharding types, dealt to the tables in turn.")],
    ranks: Annotated[int, typer.Option(min=1, help="Processes, one thread each.")] = 2,
    batch: Annotated[int, typer.Option(min=1, help="Samples of each rank.")] = 1024,
    tables: Annotated[int, typer.Option(min=1, help="Equal tables, one feature each.")] = 24,
    rows: Annotated[int, typer.Option(min=1, help="Rows of a table.")] = 100_000,
    dim: Annotated[int, typer.Option(min=1, help="Columns of a table.")] = 64,
    ids: Annotated[int, typer.Option(min=0, help="Ids of a bag.")] = 10,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of a round.")] = 25,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; both sides run in each.")] = 1,
    beside: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND", help="Another program, called with the same options; prints JSON with min_ms."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, one object.")] = False,
) -> None:
    """Time a training step of a sharded collection alone: fused row-wise Adagrad, one process a rank, on the CPU."""
    from shardwright.cli.bench.step import StepSettings

    settings = StepSettings(tuple(types.split(",")), ranks, batch, tables, rows, dim, ids, steps)
    ours: list[Mapping[str, Any]] = []
    theirs: list[Mapping[str, Any]] = []
    for _ in range(rounds):
        ours.append(_run_ours(settings))
        if beside is not None:
            theirs.append(_run_other(beside, settings))
    result = {"shardwright": _summary(ours), **({"beside": _summary(theirs)} if theirs else {})}
    if theirs:
        result["ratio"] = {
            key: round(result["shardwright"][key] / result["beside"][key], 3)
            for key in ("min_ms", "median_ms")
        }
    if json:
        typer.echo(json_format.dumps({"settings": settings.options(), "rounds": rounds, **result}))
    else:
        _print(settings, result)


def _run_ours(settings: StepSettings) -> Mapping[str, Any]:
    from shardwright.cli.bench.step import time_step
    from shardwright.plugins import host
    from shardwright.testing.ranks import RankPool

    backend = next(
        name for name, entry in host().comm_backends.entries.items() if "cpu" in entry.item.devices
    )
    with RankPool(settings.ranks, backend=backend) as pool:
        results: list[Mapping[str, Any]] = pool.run(time_step, settings.ranks, settings, timeout_s=_TIMEOUT_S)
    return results[0]


def _run_other(command: str, settings: StepSettings) -> Mapping[str, Any]:
    """The last line that another program prints, as JSON.

    Raises:
        InvalidInputError: it failed, or its last line is no JSON with ``min_ms`` and ``median_ms``.
    """
    words = [*shlex.split(command), *settings.options()]
    done = subprocess.run(words, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    lines = done.stdout.strip().splitlines()
    try:
        figures: Mapping[str, Any] = json_format.loads(lines[-1])
        float(figures["min_ms"]), float(figures["median_ms"])
    except (IndexError, KeyError, TypeError, ValueError) as error:
        told = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise InvalidInputError(
            f"{command!r} ended with exit code {done.returncode} and no JSON with min_ms and median_ms; it said: {told}"
        ) from error
    return figures


def _summary(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The least minimum and the median of medians over all rounds."""
    return {
        "min_ms": min(figures["min_ms"] for figures in rounds),
        "median_ms": median(figures["median_ms"] for figures in rounds),
        "collectives": rounds[-1].get("collectives"),
    }


def _print(settings: StepSettings, result: Mapping[str, Mapping[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=" ".join(settings.options()))
    for column in ("", "minimum ms", "median ms", "collectives a step"):
        table.add_column(column, justify="left" if not column else "right")
    for side, figures in result.items():
        cells = [str(figures[key]) for key in ("min_ms", "median_ms")]
        table.add_row(side, *cells, str(figures.get("collectives", "")))
    Console().print(table)
