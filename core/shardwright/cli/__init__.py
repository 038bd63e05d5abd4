"""The command line. One file a command; nothing heavy is imported before a command runs.

Here are the commands that make plans and show plugins; others come from plugins.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from shardwright import __version__
from shardwright.cli.offered import Program
from shardwright.cli.plan import plan
from shardwright.cli.plugins import plugins
from shardwright.errors import ShardwrightError

__all__ = ["app", "main"]

# A command is a function with options, in a module of its own. It is added by its name here.
_COMMANDS = (plan, plugins)

app = typer.Typer(
    name="shardwright",
    cls=Program,
    help="Shards the embedding tables of recommender models over many devices.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
for _command in _COMMANDS:
    app.command()(_command)


def main() -> None:
    """Run the command line. What the user can repair is told without a traceback, with exit code 1."""
    try:
        app(prog_name="shardwright")
    except ShardwrightError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shardwright {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options that stand before a command."""
