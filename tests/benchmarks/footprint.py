"""What shardwright itself takes: the time to import it beside torch's, and memory of each rank beside its tables.

    python tests/benchmarks/footprint.py imports [--beside-python PYTHON]
    python tests/benchmarks/footprint.py memory [--types table_wise,row_wise] [--ranks 2]

Imports are timed in fresh processes, in turn. Memory is a rank's peak while it plans, shards and trains, above what
it had before, beside the bytes of its blocks: weights and optimizer state.
"""

from __future__ import annotations

import json as json_format
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
import typer
from attrs import evolve
from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[2]))

from tests.benchmarks.steps.timed_step import StepSettings, bench_batch, bench_model

from shardwright.errors import ShardwrightError
from shardwright.host import host
from shardwright_testing.ranks import RankPool

app = typer.Typer(help=__doc__, no_args_is_help=True)

IMPORTS = {
    "torch": "import torch",
    "shardwright": "import shardwright",
    "shardwright, to plan": "from shardwright import EmbeddingShardingPlanner, Topology, TableSpec",
    "shardwright, to train (brings torch)": "from shardwright import DistributedModelParallel",
}
PEER_IMPORTS = {"torch, other python": "import torch", "torchrec, other python": "import torchrec"}
TIMED = "import time; start = time.perf_counter()\n{}\nprint(time.perf_counter() - start)"
MIB = 1 << 20
TIMEOUT_S = 300.0
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object.")]


@app.command()
def imports(
    rounds: Annotated[int, typer.Option(min=1, help="Fresh processes for each.")] = 5,
    beside_python: Annotated[str | None, typer.Option(help="An interpreter that has torchrec.")] = None,
    json: Json = False,
) -> None:
    """Time imports in fresh processes."""
    jobs = [(name, sys.executable, code) for name, code in IMPORTS.items()]
    if beside_python is not None:
        jobs += [(name, beside_python, code) for name, code in PEER_IMPORTS.items()]
    times: dict[str, list[float]] = {name: [] for name, *_ in jobs}
    turns = [job for _ in range(rounds) for job in jobs]
    for name, python, code in track(turns, "importing", console=Console(stderr=True)):
        times[name].append(import_ms(python, code))
    figures = {
        name: {"min_ms": round(min(own), 1), "median_ms": round(median(own), 1)}
        for name, own in times.items()
    }
    show(figures, json=json, title="import, in a fresh process")


def import_ms(python: str, code: str) -> float:
    """Milliseconds that ``code`` takes as the first thing in a process."""
    words = [python, "-W", "ignore", "-c", TIMED.format(code)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    return 1e3 * float(done.stdout.split()[-1])


@app.command()
def memory(
    types: Annotated[
        str | None, typer.Option(metavar="T,...", help="All that there are, by default.")
    ] = None,
    ranks: Annotated[int, typer.Option(min=1)] = 2,
    batch: Annotated[int, typer.Option(min=1)] = 1024,
    tables: Annotated[int, typer.Option(min=1)] = 24,
    rows: Annotated[int, typer.Option(min=1)] = 100_000,
    dim: Annotated[int, typer.Option(min=1)] = 64,
    ids: Annotated[int, typer.Option(min=0)] = 10,
    steps: Annotated[int, typer.Option(min=1)] = 5,
    json: Json = False,
) -> None:
    """Measure each rank's peak memory beside its blocks', for each sharding type alone."""
    settings = StepSettings((), ranks, batch, tables, rows, dim, ids, steps)
    names = types.split(",") if types else host().sharding_types.names
    figures: dict[str, dict[str, float]] = {}
    try:
        for name in track(names, "measuring", console=Console(stderr=True)):
            figures |= memory_of(name, settings.of_types(name))
    except KeyboardInterrupt:
        typer.echo("interrupted: shown is what was measured until then", err=True)
    title = f"memory above what a rank had before: {' '.join(settings.options()[2:])}"
    show(figures, json=json, title=title)


def memory_of(name: str, settings: StepSettings) -> dict[str, dict[str, float]]:
    """The figures of each rank in fresh processes; none, and a line that says why, where it fails."""
    try:
        with RankPool(settings.ranks, backend="gloo") as pool:
            measured = pool.run(peak_memory, settings.ranks, settings, timeout_s=TIMEOUT_S)
    except ShardwrightError as error:
        typer.echo(f"{name}: {str(error).strip().splitlines()[-1]}", err=True)
        return {}
    return {f"{name}, rank {rank}": own for rank, own in enumerate(measured)}


def peak_memory(settings: StepSettings) -> dict[str, float]:
    """On a rank: MiB of its blocks, and its peaks above the start, when sharded and after some steps."""
    tiny = evolve(settings, rows=8, batch=2)
    train(bench_model(tiny), tiny)  # imports what is imported on first use, and starts the backend's threads
    before = forget_peak()
    model = bench_model(settings)
    after_sharding = peak_bytes() - before
    train(model, settings)
    held, peak = block_bytes(model), peak_bytes() - before
    return {
        "tables_mib": round(held / MIB, 1),
        "after_sharding_mib": round(after_sharding / MIB, 1),
        "peak_mib": round(peak / MIB, 1),
        "ratio": round(peak / held, 3) if held else float("inf"),
    }


def train(model: Any, settings: StepSettings) -> None:
    """Some steps, each with a batch of its own."""
    gradient = torch.rand(settings.batch, settings.tables * settings.dim)
    for number in range(settings.steps):
        model(bench_batch(settings, number)).values().backward(gradient)


def block_bytes(model: Any) -> int:
    """Bytes of the weights and optimizer state of this rank's blocks."""
    lookups = model.module.engine.lookups
    return sum(
        tensor.numel() * tensor.element_size()
        for lookup in lookups
        for index in range(len(lookup.blocks))
        for tensor in (lookup.weight(index), *lookup.optimizer_state(index).values())
    )


def forget_peak() -> int:
    """Bytes resident now; peaks are counted from here on (Linux, ``proc(5)``: clear_refs)."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_bytes("VmRSS")


def peak_bytes() -> int:
    """The most bytes resident since :func:`forget_peak`."""
    return status_bytes("VmHWM")


def status_bytes(name: str) -> int:
    """A line of ``/proc/self/status``, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


def show(figures: dict[str, dict[str, float]], *, json: bool, title: str) -> None:
    """Print the figures as a table, or as JSON."""
    if json:
        typer.echo(json_format.dumps({"title": title, "figures": figures}))
        return
    if not figures:
        return
    table = Table(title=title, box=box.SIMPLE_HEAD)
    table.title_justify = "left"
    table.add_column("", no_wrap=True)
    for name in next(iter(figures.values())):
        table.add_column(name.replace("_", " "), justify="right")
    for name, own in figures.items():
        table.add_row(name, *(f"{value:g}" for value in own.values()))
    Console().print(table)


if __name__ == "__main__":
    app()
