"""A training step beside another program, both sides in turn, over the cases whose ratios are promised.

    python tests/benchmarks/step_ratios.py --beside "PYTHON step.py"

Ours is steps/step.py of this folder. The program after --beside gets the same options and prints, as its last
line, JSON with min_ms, median_ms and collectives. Ctrl-C ends it early; each case is printed as soon as it is
measured, and --json keeps all in a file.
"""

from __future__ import annotations

import json as json_format
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from attrs import evolve, frozen

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.benchmarks.steps.timed_step import StepSettings

from shardwright.errors import InvalidInputError

OURS = [sys.executable, str(Path(__file__).with_name("steps") / "step.py")]
STEPS = 25
EXCHANGES = "table_wise,column_wise,table_column_wise"
TIMEOUT_S = 600.0


@frozen
class Case:
    """A step to be timed.

    Args:
        name: the name that the goals have.
        settings: its work.
        goal: largest ratio of our time to the other program's.
        max_collectives: collectives of a step at most.
    """

    name: str
    settings: StepSettings
    goal: float
    max_collectives: int | None


def case(
    types: str,
    goal: float,
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


def main(
    beside: Annotated[str, typer.Option(metavar="COMMAND", help="The other program.")],
    rounds: Annotated[int, typer.Option(min=1, help="Of each side, alternating.")] = 5,
    only: Annotated[str, typer.Option(metavar="TEXT", help="Only cases whose name has this.")] = "",
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of a round.")] = STEPS,
    json: Annotated[Path | None, typer.Option(metavar="FILE", help="Keep what was measured there.")] = None,
) -> None:
    """Measure both sides in turn; print medians, minima, ratios, goals and collectives."""
    other = shlex.split(beside)
    cases = [with_steps(known, steps) for known in BESIDE if only in known.name]
    if not cases:
        raise InvalidInputError(f"no case has {only!r} in its name")
    results = []
    for known in cases:
        sides: dict[str, list[dict[str, Any]]] = {"shardwright": [], "beside": []}
        for _ in range(rounds):
            for name, words in (("shardwright", OURS), ("beside", other)):
                sides[name].append(figures_of([*words, *known.settings.options()]))
        results.append(result_of(known, sides))
        typer.echo(line_of(results[-1]))
        if json is not None:
            json.write_text(json_format.dumps(results, indent=2) + "\n")


def figures_of(words: Sequence[str]) -> dict[str, Any]:
    """The last line that a program prints, as JSON.

    Raises:
        InvalidInputError: it prints none with ``min_ms`` and ``median_ms``.
    """
    done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    try:
        figures: dict[str, Any] = json_format.loads(done.stdout.strip().splitlines()[-1])
        float(figures["min_ms"]), float(figures["median_ms"])
    except (IndexError, KeyError, TypeError, ValueError) as error:
        told = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise InvalidInputError(
            f"{shlex.join(words)!r} ended with exit code {done.returncode}: {told}"
        ) from error
    return figures


def result_of(known: Case, sides: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """The least minimum and the median of medians of both sides, and our part of the other's."""
    summaries = {
        name: {
            "min_ms": min(one["min_ms"] for one in rounds),
            "median_ms": median(one["median_ms"] for one in rounds),
            "collectives": rounds[0].get("collectives"),
        }
        for name, rounds in sides.items()
    }
    ours, other = summaries["shardwright"], summaries["beside"]
    ratio = {name: round(ours[name] / other[name], 4) for name in ("min_ms", "median_ms")}
    told = {"case": known.name, "goal": known.goal, "max_collectives": known.max_collectives}
    return {**told, **summaries, "ratio": ratio, "every_round": sides}


def line_of(result: dict[str, Any]) -> str:
    """A result in a line."""
    ours, other = result["shardwright"], result["beside"]
    return (
        f"{result['case']}: {ours['min_ms']:.2f} / {other['min_ms']:.2f} ms, "
        f"ratio {result['ratio']['min_ms']:.2f} (goal {result['goal']:.2f}), "
        f"collectives {ours['collectives']} / {other['collectives']}"
    )


def with_steps(known: Case, steps: int) -> Case:
    """The case with another number of timed steps."""
    return evolve(known, settings=evolve(known.settings, steps=steps))


if __name__ == "__main__":
    typer.run(main)
