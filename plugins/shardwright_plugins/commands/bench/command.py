"""The `bench` commands."""

from __future__ import annotations

import typer

from shardwright_plugins.commands.bench.truth.command import truth

bench = typer.Typer(help="Measure plans beside what estimators predict.", no_args_is_help=True)


@bench.callback()
def _group() -> None:
    """Measure plans beside what estimators predict."""


bench.command()(truth)
