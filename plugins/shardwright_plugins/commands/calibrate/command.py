"""The command `calibrate`: options, and what is printed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shardwright.errors import InvalidInputError, UnsupportedError

if TYPE_CHECKING:
    from shardwright_plugins.estimators.engine.machine import Machine


def calibrate(
    output: Annotated[Path, typer.Option(metavar="machine.json", help="Write the machine document.")],
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes, one thread each, as many as will train; 2 by default. Under torchrun those it started.",
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="Type of the ranks' devices; only cpu is measured.")] = "cpu",
    kernel: Annotated[
        str, typer.Option(metavar="K,...", help="Compute kernels; by default all that run here.")
    ] = "",
    precision: Annotated[
        str,
        typer.Option(metavar="P,...", help="Data types of rows beside fp32, in a kernel's time: fp16, bf16."),
    ] = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="Few small experiments: to try it, not to plan by.")
    ] = False,
) -> None:
    """Measure lookups, updates, exchanges and steps on this machine, in some two minutes, and fit their constants.

    Let no other program run meanwhile. `shardwright plan --machine machine.json` plans by what was measured. Several
    hosts are measured by `torchrun ... -m shardwright calibrate` on each.
    """
    import importlib.util

    from shardwright.cli.plans import write_text
    from shardwright.host import host
    from shardwright.planning.documents.limits import MOST_PROCESSES
    from shardwright.planning.tables.data_types import DataType
    from shardwright_plugins.commands.calibrate import running
    from shardwright_plugins.commands.calibrate.ranks import is_rank, of_job, started

    if device != "cpu":
        raise UnsupportedError(f"calibrate measures CPUs, not {device!r}")
    if ranks is not None and ranks > MOST_PROCESSES:
        raise InvalidInputError(f"--ranks must be at most {MOST_PROCESSES}, got {ranks}")
    if importlib.util.find_spec("scipy") is None:
        raise UnsupportedError(
            "calibrate fits constants with SciPy, which is not installed: pip install scipy"
        )
    precisions = [str(DataType(own.strip())) for own in precision.split(",") if own.strip()]
    names = [host().compute_kernels.canonical(name.strip()) for name in kernel.split(",")] if kernel else None
    with of_job(output, ranks) if is_rank() else started(output, ranks or _RANKS) as own:
        machine = running.calibrate(
            own, names, _note if own.is_first else lambda what: None, precisions=precisions, quick=quick
        )
    if own.is_first:
        write_text(output, machine.to_json())
        _print(machine)


def _note(what: str) -> None:
    typer.echo(f"measuring {what}", err=True)


def _print(machine: Machine) -> None:
    """Print how well constants fit, and what was not measured."""
    from shardwright.planning.text import count_text
    from shardwright_plugins.estimators.engine.machine import UNSTEADY

    made = machine.made
    typer.echo(f"{made['processor']}, {count_text(made['ranks'], 'rank')}, {made['seconds']} s")
    for own in made.get("classes", ()):
        typer.echo(
            f"  hosts with {own['processor']}: {own['hosts']}, at {own['speed']:.0%} of the fastest host's speed"
        )
    for what, told in machine.fits.items():
        typer.echo(
            f"  {what:24s} {count_text(told['experiments'], 'experiment'):>15s}, "
            f"error {told['median_error']:.0%} in the median, {told['worst_error']:.0%} at most"
        )
    for what, reason in machine.unmeasured.items():
        typer.echo(f"  not measured: {what}: {reason}")
    if machine.drift > UNSTEADY:
        typer.echo(
            f"a fixed work took {', '.join(map(str, made['reference_ms']))} ms at the start, before steps and at the "
            "end: the machine's speed changes, and predicted times will be off by as much",
            err=True,
        )
    if made["other_programs"] > _QUIET:
        typer.echo(
            f"other programs took {made['other_programs']:.0%} of the processors meanwhile: measure again when "
            "none runs",
            err=True,
        )


_QUIET = 0.05
_RANKS = 2
