"""Where docs are: those of a distribution, and the pages for authors of each kind."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shardwright.offers import Kind, Provenance
    from shardwright.plugins import PluginHost

__all__ = ["docs_of", "kind_pages"]

_OWN = "shardwright"
_LABELS = ("documentation", "docs", "homepage", "repository", "source")
"""Labels of links in a distribution's metadata, the best first (PyPA's well-known ones, "Project URLs")."""


def docs_of(provenance: Provenance) -> Iterator[str]:
    """The link to docs that the distribution gives in its `[project.urls]`; nothing if it gives none."""
    try:
        listed = importlib.metadata.metadata(provenance.distribution).get_all("Project-URL") or []
    except (importlib.metadata.PackageNotFoundError, ValueError):  # the latter of an empty name
        return
    urls = {label.strip().lower(): url.strip() for label, _, url in (text.partition(",") for text in listed)}
    yield from [urls[label] for label in _LABELS if label in urls][:1]


def kind_pages(host: PluginHost, kind: Kind[Any]) -> Iterator[Path]:
    """The page on a kind: contract, example and tests. It is in the package of the built-ins."""
    name = kind.title.replace(" ", "_")
    roots = {_package_folder(record.provenance) for record in host.plugins if record.provenance.is_from(_OWN)}
    for root in sorted(root for root in roots if root):
        page = root / "docs" / "authors" / f"{name}.md"
        if page.is_file():
            yield page


def _package_folder(provenance: Provenance) -> Path | None:
    """The folder of the outermost package that a plugin's module is in."""
    if not provenance.file:
        return None
    path = Path(provenance.file)
    inner = path.parent if path.stem == "__init__" else path
    return inner.parents[provenance.module.count(".") - 1] if "." in provenance.module else inner
