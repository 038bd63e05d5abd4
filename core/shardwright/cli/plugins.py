"""`shardwright plugins`: what is installed, what each plugin offers, and why something is not there."""

from __future__ import annotations

import json as json_format
import logging
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

from shardwright.cli.tables import console

if TYPE_CHECKING:
    from shardwright.loading import PluginRecord
    from shardwright.offers import Entry
    from shardwright.plugins import PluginHost
    from shardwright.registry import Registry

__all__ = ["plugins"]

_STYLES = {"off": "dim", "failed": "red", "conflict": "red"}


@attrs.frozen
class _Row:
    """One offered thing, or one plugin that offers nothing."""

    plugin: str
    kind: str
    name: str
    distribution: str
    version: str
    file: str
    state: str
    reason: str


def plugins(
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the installed plugins: what each offers, where it is, and whether it is in use."""
    from shardwright.plugins import PluginHost
    from shardwright.settings import STRICT_VARIABLE, PluginSettings

    settings = PluginSettings.read(os.environ)
    # Strict mode ends discovery with an error; this command is what one calls to see which.
    host = PluginHost(environment={**os.environ, STRICT_VARIABLE: ""})
    # The table says all that the log would say.
    logging.getLogger("shardwright.plugins").setLevel(logging.ERROR)
    rows = sorted(_rows(host), key=_order)
    if json:
        typer.echo(json_format.dumps([attrs.asdict(row) for row in rows], indent=2))
    else:
        _print_table(rows)
    if settings.strict and any(row.state in ("failed", "conflict") for row in rows):
        raise typer.Exit(1)


def _rows(host: PluginHost) -> Iterator[_Row]:
    for record in host.plugins:
        offered = [
            (registry, entry)
            for registry in host.registries
            for entry in record.entries.get(registry.kind.hook, ())
        ]
        if not offered:
            yield _row(record, "", "", record.state, record.reason)
        for registry, entry in offered:
            yield _row(record, registry.kind.label, entry.name, *_state(registry, entry))


def _order(row: _Row) -> tuple[bool, int, str, str]:
    """By kind and name; after them the plugins that offer nothing."""
    from shardwright.plugins import KINDS

    labels = [kind.label for kind in KINDS]
    return (not row.kind, labels.index(row.kind) if row.kind else 0, row.name, row.plugin)


def _row(record: PluginRecord, kind: str, name: str, state: str, reason: str) -> _Row:
    origin = record.provenance
    return _Row(origin.plugin, kind, name, origin.distribution, origin.version, origin.file, state, reason)


def _state(registry: Registry[Any], entry: Entry[Any]) -> tuple[str, str]:
    """The state of one offered thing, and why."""
    if entry.name in registry.conflicts:
        return "conflict", str(registry.conflicts[entry.name])
    served = registry.entry(entry.name)
    if served.item is entry.item:
        return "loaded", ""
    return "off", f"the name is given to {served.provenance.package}"


def _print_table(rows: Sequence[_Row]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    for header in ("kind", "name", "state", "plugin", "distribution"):
        table.add_column(header, overflow="fold")
    table.add_column("file", overflow="fold", min_width=24)
    table.add_column("why not", overflow="fold")
    for row in rows:
        package = f"{row.distribution} {row.version}".rstrip()
        cells = (row.kind, row.name, row.state, row.plugin, package, row.file, row.reason)
        table.add_row(*map(Text, cells), style=_STYLES.get(row.state))
    console().print(table)
