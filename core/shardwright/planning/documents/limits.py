"""Limits of what is read and planned, from ``schemas/limits.schema.json``, the one place that states them."""

from __future__ import annotations

from typing import Final

from shardwright.planning.documents.schemas import load_schema

_STATED = load_schema("limits.schema.json")["$defs"]


def _most(name: str) -> int:
    stated = _STATED[name]
    return int(stated.get("maximum") or stated["maxItems"])


MOST_DOCUMENT_BYTES: Final = _most("document_bytes")
MOST_NESTING: Final = _most("nesting")
MOST_RANKS: Final = _most("ranks")
MOST_PROCESSES: Final = _most("processes")
MOST_ROWS: Final = _most("rows")
MOST_SAMPLES: Final = _most("samples")
MOST_RATE: Final = _most("rate")
MOST_MEMORY_BYTES: Final = _most("memory_bytes")
MOST_SPEED: Final = _most("speed")
