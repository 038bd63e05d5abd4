"""`shardwright bench plan`: plans all workloads of a folder, a fresh process each, beside another planner if given."""

from __future__ import annotations

import json as json_format
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from attrs import field, frozen

from shardwright.cli.tables import console
from shardwright.errors import InvalidInputError

_TIMEOUT_S = 3600.0
_COLUMNS = (
    *("workload", "tables", "ms", "bound ms", "gap", "seconds", "MB"),
    *("beside ms", "seconds", "ours rated ms", "fits"),
)


@frozen
class PlanSettings:
    """Settings that every workload is planned with.

    Args:
        topology: options of ``shardwright plan`` that the other planner has as well, by name.
        own: options that only ``shardwright plan`` has.
        beside: the command of the other planner, if there is one.
        beside_seconds: limit of its search, s.
    """

    topology: Mapping[str, Any]
    own: Mapping[str, Any] = field(factory=dict)
    beside: str | None = None
    beside_seconds: int = 25

    def words(self, *groups: Mapping[str, Any]) -> list[str]:
        """Options as words of a command line."""
        given = {name: value for group in (self.topology, *groups) for name, value in group.items()}
        return [
            word for name, value in given.items() if value is not None for word in (f"--{name}", str(value))
        ]


def plan(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Workload files, *.json.")],
    ranks: Annotated[int, typer.Option(min=1, help="Ranks to shard over.")] = 8,
    local: Annotated[int | None, typer.Option(min=1, help="Ranks of one host; all by default.")] = None,
    hbm_gib: Annotated[float, typer.Option(help="Device memory of a rank, GiB.")] = 32.0,
    ddr_gib: Annotated[float, typer.Option(help="Host memory of a rank, GiB.")] = 128.0,
    batch: Annotated[int, typer.Option(min=1, help="Samples of a rank and step.")] = 8192,
    estimator: Annotated[str | None, typer.Option(metavar="NAME", help="The model of time.")] = None,
    storage_estimator: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model of memory.")
    ] = None,
    proposer: Annotated[str | None, typer.Option(metavar="NAME", help="The search.")] = None,
    partitioner: Annotated[str | None, typer.Option(metavar="NAME", help="What places shards.")] = None,
    objective: Annotated[str | None, typer.Option(metavar="NAME", help="What is minimised.")] = None,
    seconds: Annotated[float | None, typer.Option(help="How long each search may take.")] = None,
    beside: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="Another planner: called as COMMAND plan WORKLOAD and COMMAND rate WORKLOAD --plan FILE with "
            "--ranks, --local, --hbm-gib, --ddr-gib, --batch and --seconds; prints JSON with max_ms.",
        ),
    ] = None,
    beside_seconds: Annotated[int, typer.Option(help="How long the other planner may search.")] = 25,
    output: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the figures as JSON.")] = None,
) -> None:
    """Plan every workload of a folder: time, value, bound and gap, each in a fresh process."""
    from shardwright.cli.plans import check_writable, write_text

    check_writable(output)
    topology = {
        "ranks": ranks,
        "local": local or ranks,
        "hbm-gib": hbm_gib,
        "ddr-gib": ddr_gib,
        "batch": batch,
    }
    own: dict[str, Any] = {"estimator": estimator, "proposer": proposer, "partitioner": partitioner}
    own["storage-estimator"] = storage_estimator
    own.update(objective=objective, seconds=seconds)
    settings = PlanSettings(topology, own, beside, beside_seconds)
    results = []
    for workload in workloads_in(folder):
        results.append(bench_workload(workload, settings))
        typer.echo(f"{workload.stem}: {_told(results[-1])}", err=True)
        for side in ("beside", "rated"):
            if "error" in results[-1].get(side, {}):
                typer.echo(f"{workload.stem}, {side}: {results[-1][side]['error']}", err=True)
    _print(settings, results)
    if output is not None:
        figures = {"settings": {**topology, **own}, "beside": beside, "workloads": results}
        write_text(output, json_format.dumps(figures, indent=1) + "\n")


def workloads_in(folder: Path) -> list[Path]:
    """The workload files of a folder, by name: JSON files with tables.

    Raises:
        InvalidInputError: there are none.
    """
    from shardwright.planning.documents import WORKLOAD

    found = []
    for path in sorted(folder.glob("*.json")):
        data = WORKLOAD.read(path)
        if isinstance(data, Mapping) and data.get("tables"):
            found.append(path)
    if not found:
        raise InvalidInputError(f"there is no workload in {str(folder)!r}: no *.json with a list of tables")
    return found


def bench_workload(workload: Path, settings: PlanSettings) -> dict[str, Any]:
    """The figures of one workload, of both planners.

    Args:
        workload: the file.
        settings: settings to plan with.
    """
    result: dict[str, Any] = {"workload": workload.stem}
    with tempfile.TemporaryDirectory() as folder:
        document = Path(folder) / "plan.json"
        result["shardwright"] = _ours(workload, settings, document)
        if settings.beside is not None:
            words = shlex.split(settings.beside)
            limit = {"seconds": settings.beside_seconds}
            result["beside"] = _other([*words, "plan", str(workload), *settings.words(limit)])
            if document.exists():
                asked = [*words, "rate", str(workload), "--plan", str(document), *settings.words()]
                result["rated"] = _other(asked)
    return result


def _ours(workload: Path, settings: PlanSettings, document: Path) -> dict[str, Any]:
    words = [sys.executable, "-m", "shardwright", "plan", str(workload), "--quiet", "--output", str(document)]
    code, told, peak_bytes = _run([*words, *settings.words(settings.own)])
    if code != 0:
        return {"error": (told.strip().splitlines() or [f"exit code {code}"])[-1]}
    made = json_format.loads(document.read_text(encoding="utf-8"))
    objective = made["objective"]
    return {
        "tables": sum(len(tables) for tables in made["modules"].values()),
        **{name: objective[name] for name in ("value_ms", "lower_bound_ms", "gap")},
        "seconds": made["inputs"]["seconds"]["value"],
        "peak_mb": round(peak_bytes / 1e6, 1),
    }


def _run(words: Sequence[str]) -> tuple[int, str, int]:
    """Exit code, what was written on standard error, and the largest resident memory of a process of its own."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=errors)
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except BaseException:
            process.kill()
            process.wait()
            raise
        process.returncode = os.waitstatus_to_exitcode(status)
        errors.seek(0)
        # Linux counts ru_maxrss in KiB, macOS in bytes.
        unit = 1 if sys.platform == "darwin" else 1024
        return process.returncode, errors.read(), usage.ru_maxrss * unit


def _other(words: Sequence[str]) -> dict[str, Any]:
    """The last line that the other planner prints, as JSON; what went wrong where it is none."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except OSError as error:
        raise InvalidInputError(f"cannot run {words[0]!r}: {error.strerror}") from error
    lines = done.stdout.strip().splitlines()
    try:
        figures: dict[str, Any] = json_format.loads(lines[-1])
        float(figures["max_ms"])
    except (IndexError, KeyError, TypeError, ValueError):
        told = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        return {"error": f"exit code {done.returncode}: {told}"}
    return figures


def _told(result: Mapping[str, Any]) -> str:
    ours = result["shardwright"]
    return ours.get("error") or f"{ours['value_ms']:.4g} ms, {_percent(ours['gap'])}, {ours['seconds']} s"


def _percent(gap: float | None) -> str:
    return "no bound" if gap is None else f"{gap:.2%}"


def _print(settings: PlanSettings, results: Sequence[Mapping[str, Any]]) -> None:
    from rich.table import Table

    shown = _COLUMNS if settings.beside is not None else _COLUMNS[:7]
    table = Table(title=" ".join(settings.words(settings.own)))
    for column in shown:
        table.add_column(column, justify="left" if column == "workload" else "right")
    for result in results:
        table.add_row(*list(_cells(result))[: len(shown)])
    console().print(table)


def _cells(result: Mapping[str, Any]) -> Iterator[str]:
    ours = result["shardwright"]
    yield result["workload"]
    if "error" in ours:
        yield from ("", "no plan", "", "", "", "")
    else:
        yield str(ours["tables"])
        yield from (f"{ours[name]:.4g}" for name in ("value_ms", "lower_bound_ms"))
        yield _percent(ours["gap"])
        yield from (str(ours[name]) for name in ("seconds", "peak_mb"))
    for side in (result.get("beside", {}), result.get("rated", {})):
        yield f"{side['max_ms']:.4g}" if "max_ms" in side else "failed"
        yield str(side.get("seconds", side.get("fits", "")))
