"""The `bench` commands: run both sides in turn, show a table with bars or print JSON."""

from __future__ import annotations

import json as json_format
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shardwright.errors import UnsupportedError
from shardwright_plugins.commands.bench.plan import plan
from shardwright_plugins.commands.bench.truth.command import truth

if TYPE_CHECKING:
    from shardwright_plugins.commands.bench.suite import Suite

bench = typer.Typer(help="Time things, beside another program where one is given.")

_PIPE_WIDTH = 140  # a pipe has no width of its own
_INTERRUPTED = 130  # as shells tell of a program that Ctrl-C ended


@bench.callback(invoke_without_command=True)
def _group(context: typer.Context) -> None:
    """Time things, beside another program where one is given. Alone: a step of every sharding type."""
    if context.invoked_subcommand is None:
        step()


bench.command()(plan)
bench.command()(truth)


@bench.command()
def step(
    types: Annotated[
        str | None,
        typer.Option(
            metavar="T,...",
            help="Sharding types, dealt to the tables in turn. Without this, every type there is, one by one.",
        ),
    ] = None,
    ranks: Annotated[int, typer.Option(min=1, help="Processes, one thread each.")] = 2,
    batch: Annotated[int, typer.Option(min=1, help="Samples of each rank.")] = 1024,
    tables: Annotated[int, typer.Option(min=1, help="Equal tables, one feature each.")] = 24,
    rows: Annotated[int, typer.Option(min=1, help="Rows of a table.")] = 100_000,
    dim: Annotated[int, typer.Option(min=1, help="Columns of a table.")] = 64,
    ids: Annotated[int, typer.Option(min=0, help="Ids of a bag.")] = 10,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of a round.")] = 25,
    hosts: Annotated[
        int, typer.Option(min=1, help="Hosts that the ranks pretend to be on, in equal parts.")
    ] = 1,
    rounds: Annotated[int, typer.Option(min=1, help="Rounds; both sides run in each.")] = 1,
    kernel: Annotated[
        str, typer.Option(help="Compute kernel of all tables; the planner's choice by default.")
    ] = "",
    device: Annotated[str, typer.Option(help="Type of the ranks' devices, one a rank.")] = "cpu",
    beside: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND", help="Another program, called with the same options; prints JSON with min_ms."
        ),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON, one object.")] = False,
) -> None:
    """Time a training step of a sharded collection alone: fused row-wise Adagrad, one process a rank.

    Ctrl-C ends it early; what was measured until then is shown.
    """
    from shardwright.host import host
    from shardwright_plugins.commands.bench.sides import Program, Ranks
    from shardwright_plugins.commands.bench.step import StepSettings
    from shardwright_plugins.commands.bench.suite import Case, Suite, each_type

    settings = StepSettings((), ranks, batch, tables, rows, dim, ids, steps, hosts, kernel, device)
    if types is None:
        cases = each_type(settings, host().sharding_types.names)
    else:
        cases = [Case(types, settings.of_types(types))]
    sides = [Ranks(is_kept=True)] if beside is None else [Ranks(), Program(beside)]
    run_suite(Suite(cases, sides, rounds), json=json, keep_going=types is None)


@bench.command()
def kernels(
    threads: Annotated[int, typer.Option(min=1, help="Of the one process.")] = 1,
    steps: Annotated[int, typer.Option(min=1, help="Timed steps of each kernel.")] = 20,
    keep: Annotated[bool, typer.Option(help="Keep the figures for planning on this machine.")] = True,
    device: Annotated[
        str, typer.Option(help="With another than cpu: beside the bandwidth of its memory; nothing is kept.")
    ] = "cpu",
    kernel: Annotated[
        str, typer.Option(metavar="K,...", help="Compute kernels; by default all that run optimizers.")
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="Print JSON, one object.")] = False,
) -> None:
    """Time compute kernels' lookups and updates on this CPU, and keep the figures, which plans go by."""
    import torch

    if device != "cpu":
        return _kernels_on(torch.device(device), kernel, steps, json=json)

    from shardwright_plugins.commands.bench.kernels import QUICK, least_ms
    from shardwright_plugins.compute_kernels import _cpu_speeds

    torch.set_num_threads(threads)
    figures, reasons = least_ms(_kernels_asked(kernel), QUICK, steps=steps)
    if json:
        data = {
            "processor": _cpu_speeds.processor(),
            "threads": threads,
            "min_ms": figures,
            "left_out": reasons,
        }
        typer.echo(json_format.dumps(data))
    else:
        typer.echo(
            f"{_cpu_speeds.processor()}, {threads} thread{'s' * (threads > 1)}: forward and backward, least ms"
        )
        for name, least in sorted(figures.items(), key=lambda pair: pair[1]):
            typer.echo(f"  {name:20s} {least:8.2f}")
        for reason in reasons:
            typer.echo(f"  left out: {reason}")
    if keep:
        typer.echo(f"kept in {_cpu_speeds.keep(figures)}", err=True)


def _kernels_asked(asked: str) -> list[str]:
    """The kernels that ``--kernel`` names, or all that run optimizers.

    Raises:
        UnknownPluginError: there is none of a name.
    """
    from shardwright.host import host

    registry = host().compute_kernels
    if asked:
        return [registry.canonical(name.strip()) for name in asked.split(",")]
    return [name for name in registry.names if registry.create(name).fuses_optimizer]


def _kernels_on(device: Any, asked: str, steps: int, *, json: bool) -> None:
    """Time the kernels on a device, with a large batch and a small one."""
    import attrs
    import torch

    from shardwright_plugins.commands.bench.device_kernels import LARGE, SMALL, copy_bandwidth, measure

    if not torch.accelerator.is_available():
        raise UnsupportedError(
            f"kernels are to be timed on {device.type!r}, and torch sees no accelerator here"
        )
    fusing, copied = _kernels_asked(asked), copy_bandwidth(device)
    name = torch.get_device_module(device).get_device_name(device)
    data: dict[str, Any] = {"device": name, "copy_gb_s": copied / 1e9, "cases": []}
    for work in (LARGE, SMALL):
        figures, reasons = measure(fusing, work, device, steps=steps)
        data["cases"].append(
            {**attrs.asdict(work), "kernels": [attrs.asdict(own) for own in figures], "left_out": reasons}
        )
        torch.accelerator.empty_cache()
    if json:
        typer.echo(json_format.dumps(data))
        return
    typer.echo(f"{name}: copies {copied / 1e9:.0f} GB/s; least ms, and bandwidth as a part of that")
    for case in data["cases"]:
        typer.echo("{tables} tables of {rows} x {dim}, batch {batch}, {ids} ids".format_map(case))
        for own in case["kernels"]:
            parts = [
                f"{own[f'{what}_ms']:8.3f} {own[f'{what}_bandwidth'] / copied:4.0%}"
                for what in ("lookup", "update")
            ]
            typer.echo(f"  {own['kernel']:20s} lookup {parts[0]}   update {parts[1]}")
        for reason in case["left_out"]:
            typer.echo(f"  left out: {reason}")


def run_suite(suite: Suite, *, json: bool, keep_going: bool, path: Path | None = None) -> None:
    """Run a suite with a progress bar, and show what was measured, also if it is interrupted.

    Args:
        suite: cases and sides to measure.
        json: print JSON instead of a table.
        keep_going: a case that fails is noted, and the rest goes on.
        path: a file that holds what was measured so far, after each round.

    Raises:
        ShardwrightError: a side failed, and ``keep_going`` is not set.
    """
    from rich.console import Console

    from shardwright_plugins.commands._progress import track
    from shardwright_plugins.commands.bench.suite import run_to_the_end, write_json
    from shardwright_plugins.commands.bench.table import bench_table

    with track(Console(stderr=True), "measured", suite.num_measurements) as tracker:

        def keep(note: str) -> None:
            if path is not None:
                write_json(path, suite.to_data())
            tracker.advance(note)

        came_to_its_end = run_to_the_end(suite, keep_going=keep_going, after_each=keep)
    if json:
        typer.echo(json_format.dumps(_printed(suite)))
    else:
        Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH).print(bench_table(suite))
    if not came_to_its_end:
        typer.echo("interrupted: shown is what was measured until then", err=True)
        raise typer.Exit(_INTERRUPTED)


def _printed(suite: Suite) -> dict[str, Any]:
    """One object: the only case itself, or all."""
    cases = suite.to_data()
    return cases[0] if len(cases) == 1 else {"cases": cases}
