"""`shardwright docs`: the pages of core and of plugins."""

from __future__ import annotations

import inspect
import os
import pydoc
import re
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Annotated, Any

import attrs
import typer

import shardwright
from shardwright.cli.quiet import quiet_host
from shardwright.cli.tables import page as width
from shardwright.errors import UnknownNameError, nearest
from shardwright_plugins.commands.tables import table_of

if TYPE_CHECKING:
    from shardwright.host.offers import Provenance
    from shardwright.host.plugin_host import PluginHost

_MEMBERS = (FunctionType, classmethod, staticmethod, property)
"""Kinds of members of a class that a page shows."""

_SELF = re.compile(r"^\(self(, )?")

_FOLDER = "docs"
"""Folder of pages inside of a package: core's, and that of any plugin."""

_REFERENCE = re.compile(r"^::: ([\w.]+)(\n    options: .*)?$", re.MULTILINE)
"""Line of a page that stands for a docstring, and one with options of it, as mkdocstrings has them."""

_QUOTED = re.compile(r"(: |-> )'([^']*)'")
"""Annotation in a signature that is kept as text."""


@attrs.frozen
class Page:
    """One page: Markdown below the folder of docs of a package.

    Attributes:
        package: The package that has it.
        path: Its file.
    """

    package: str
    path: Path

    @property
    def name(self) -> str:
        """Name that `shardwright docs NAME` takes."""
        return self.path.stem

    @property
    def title(self) -> str:
        """First heading of the page."""
        lines = self.path.read_text(encoding="utf-8").splitlines()
        return next((line.lstrip("# ") for line in lines if line.startswith("# ")), self.name)


def docs(
    name: Annotated[str, typer.Argument(help="Print this page; without it, list all.")] = "",
) -> None:
    """List the pages of documentation that are installed, or print one."""
    found = pages(quiet_host(os.environ))
    if not name:
        _print_table(found)
        return
    asked = name.removesuffix(".md").rpartition("/")[2]  # as a page is linked to
    shown = [page for page in found if page.name == asked]
    if not shown:
        known = sorted({page.name for page in found})
        raise UnknownNameError(f"no page {name!r}. Known: {', '.join(known)}.{nearest(name, known)}")
    typer.echo("\n\n".join(f"{page.path}\n\n{_expanded(page)}" for page in shown))


def pages(host: PluginHost) -> list[Page]:
    """The pages of core, then those of the packages of plugins, also of plugins that are off or failed."""
    folders = {_package_folder(record.provenance) for record in host.plugins}
    roots = [Path(shardwright.__file__).parent, *sorted(folder for folder in folders if folder is not None)]
    return [Page(root.name, path) for root in roots for path in sorted((root / _FOLDER).rglob("*.md"))]


def _expanded(page: Page) -> str:
    """Text of a page, with names that it takes from docstrings (``::: name``) as `help()` shows them."""
    return _REFERENCE.sub(_described, page.path.read_text(encoding="utf-8").rstrip())


def _described(found: re.Match[str]) -> str:
    """A name as the site shows it: signature and docstring, of a class also those of its public members."""
    value: Any = pydoc.locate(found[1])
    if not callable(value):
        return f"## {found[1]}\n\n{value}"
    shown = [f"## {found[1]}{_signature(value)}\n\n{inspect.getdoc(value)}"]
    if inspect.isclass(value):
        owners = value.__mro__ if "inherited_members: true" in (found[2] or "") else (value,)
        shown += [text for owner in owners for text in _members(value, owner)]
    return "\n\n".join(shown)


def _members(value: type, owner: type) -> Iterator[str]:
    """Signatures and docstrings of the public members that a class has from itself or one of its bases, in order."""
    for name, member in vars(owner).items() if owner.__module__.startswith(shardwright.__name__) else ():
        is_shown = isinstance(member, _MEMBERS) and not name.startswith("_")
        if is_shown and inspect.getattr_static(value, name) is member:
            found = getattr(value, name)
            yield f"### {name}{_SELF.sub('(', _signature(found))}\n\n{inspect.getdoc(found)}"


def _signature(value: Any) -> str:
    try:
        return _QUOTED.sub(r"\1\2", str(inspect.signature(value)))
    except (TypeError, ValueError):  # of a constant, or a subclass of a built-in class
        return ""


def _package_folder(provenance: Provenance) -> Path | None:
    """The folder of the outermost package that a plugin's module is in; None for a module outside of packages."""
    if not provenance.file:
        return None
    path = Path(provenance.file)
    if path.stem != "__init__" and "." not in provenance.module:
        return None
    inner = path.parent if path.stem == "__init__" else path
    return inner.parents[provenance.module.count(".") - 1] if "." in provenance.module else inner


def _print_table(found: list[Page]) -> None:
    from rich.text import Text

    table = table_of("page", "what it is on", "package")
    for page in found:
        table.add_row(*map(Text, (page.name, page.title, page.package)))
    width().print(table)
