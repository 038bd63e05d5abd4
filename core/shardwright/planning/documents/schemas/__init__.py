"""The JSON schemas of documents, as files that editors and other programs can use too."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


@functools.cache
def load_schema(name: str) -> dict[str, Any]:
    """A schema by the name of its file."""
    loaded: dict[str, Any] = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    return loaded


@functools.cache
def schema_names() -> tuple[str, ...]:
    """The names of all schema files."""
    return tuple(sorted(path.name for path in FOLDER.glob("*.schema.json")))
