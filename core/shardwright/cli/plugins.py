"""`shardwright plugins`: what is installed, what each plugin offers, and why something is not there."""

from __future__ import annotations

import importlib.metadata
import inspect
import json as json_format
import os
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

import shardwright
from shardwright.cli.quiet import quiet_host
from shardwright.cli.tables import PAGE_WIDTH, flowing, page
from shardwright.errors import UnknownNameError, nearest

if TYPE_CHECKING:
    from shardwright.host.loading import PluginRecord
    from shardwright.host.offers import Entry, Kind, Provenance
    from shardwright.host.plugin_host import PluginHost
    from shardwright.host.registry import Registry

_LABELS = ("documentation", "docs", "homepage", "repository", "source")
"""Labels of links in a distribution's metadata, the best first (PyPA's well-known ones, "Project URLs")."""

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
    name: Annotated[
        str, typer.Argument(help="Show only this plugin, or what offers this name, in full.")
    ] = "",
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """List the installed plugins: what each offers, where it is, and whether it is in use; or show one in full."""
    from shardwright.host.settings import PluginSettings

    settings = PluginSettings.read(os.environ)
    # The table says all that the log would say; in strict mode this command is what one calls to see it.
    host = quiet_host(os.environ)
    rows = sorted(_rows(host), key=_order)
    if name:
        rows = _named(rows, name)
    if json:
        typer.echo(json_format.dumps([attrs.asdict(row) for row in rows], indent=2))
    elif name:
        typer.echo("\n\n".join(_fitted(_described(host, row)) for row in rows))
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


def _named(rows: Sequence[_Row], name: str) -> list[_Row]:
    """The rows of a plugin, or of what has a name.

    Raises:
        UnknownNameError: nothing is called so.
    """
    found = [
        row
        for row in rows
        if name in (row.plugin, row.name, row.distribution) or row.name.endswith(f":{name}")
    ]
    if not found:
        known = sorted({word for row in rows for word in (row.plugin, row.name) if word})
        raise UnknownNameError(
            f"no plugin, and nothing that one offers, is called {name!r}.{nearest(name, known)}"
        )
    return found


def _described(host: PluginHost, row: _Row) -> str:
    """One offered thing in full: what it is, the contract it fulfils, where it comes from, and its own words."""
    lines = [f"{row.name or row.plugin} ({row.kind or 'offers nothing'}), {row.state}"]
    lines += [f"  why not: {row.reason}"] if row.reason else []
    lines += [f"  plugin {row.plugin} of {row.distribution} {row.version}".rstrip(), f"  file {row.file}"]
    for record in host.plugins:
        if record.provenance.plugin == row.plugin and record.provenance.file == row.file:
            entries = [entry for offered in record.entries.values() for entry in offered]
            lines += [line for entry in entries if entry.name == row.name for line in _contract(entry)]
    return "\n".join(lines)


def _fitted(text: str) -> str:
    """A text whose lines are as long as a page has columns, but for words that are longer, as paths are."""
    wrapper = textwrap.TextWrapper(PAGE_WIDTH, break_long_words=False, break_on_hyphens=False)
    lines = []
    for line in text.splitlines():
        wrapper.initial_indent = wrapper.subsequent_indent = line[: len(line) - len(line.lstrip())]
        lines += wrapper.wrap(line.lstrip()) or [""]
    return "\n".join(lines)


def _contract(entry: Entry[Any]) -> list[str]:
    """The contract, its version, other names, where its docs are, and the docstring."""
    from shardwright.hookspecs import KINDS

    item: Any = entry.item if isinstance(entry.item, type) else type(entry.item)
    kind = next(kind for kind in KINDS if issubclass(item, kind.contract))
    contract = kind.contract
    lines = [f"  contract {contract.__module__}.{contract.__name__}, version {item.api}"]
    lines += [f"  docs {place}" for place in _docs_of(entry.provenance)]
    lines += [f"  docs of the kind {page_of(kind)}"]
    lines += [f"  also called {', '.join(entry.aliases)}"] if entry.aliases else []
    return [*lines, "", textwrap.indent(flowing(inspect.getdoc(item) or ""), "  ")]


def _docs_of(provenance: Provenance) -> Iterator[str]:
    """The link to docs that the distribution gives in its `[project.urls]`; nothing if it gives none."""
    try:
        listed = importlib.metadata.metadata(provenance.distribution).get_all("Project-URL") or []
    except (importlib.metadata.PackageNotFoundError, ValueError):  # the latter of an empty name
        return
    urls = {label.strip().lower(): url.strip() for label, _, url in (text.partition(",") for text in listed)}
    yield from [urls[label] for label in _LABELS if label in urls][:1]


def page_of(kind: Kind[Any]) -> Path:
    """The page for authors of a kind: contract, example and tests."""
    return Path(shardwright.__file__).parent / "docs" / "authors" / kind.page


def _order(row: _Row) -> tuple[bool, int, str, str]:
    """Sort by kind and name; plugins that offer nothing come last."""
    from shardwright.hookspecs import KINDS

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
    for row in rows:
        package = f"{row.distribution} {row.version}".rstrip()
        cells = (row.kind, row.name, row.state, row.plugin, package)
        table.add_row(*map(Text, cells), style=_STYLES.get(row.state))
    shown = page()
    shown.print(table)
    for title, lines in (("files", _files(rows)), ("why not", _reasons(rows))):
        if lines:
            shown.print(Text(f"\n{title}", style="bold"))
        for line in lines:
            shown.print(Text(line, overflow="fold"))


def _files(rows: Sequence[_Row]) -> list[str]:
    """List the file of each plugin."""
    return list(dict.fromkeys(f"{row.plugin}\n  {row.file}" for row in rows if row.file))


def _reasons(rows: Sequence[_Row]) -> list[str]:
    """List the reasons why something is not there; names with one reason stand together."""
    names: dict[str, list[str]] = {}
    for row in rows:
        if row.reason:
            names.setdefault(row.reason, []).append(row.name or row.plugin)
    return [f"{', '.join(dict.fromkeys(own))}: {reason}" for reason, own in names.items()]
