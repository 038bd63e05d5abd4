"""Columns of MovieLens' files."""

from __future__ import annotations

DEFAULT_RATINGS_COLUMN_NAMES: list[str] = ["userId", "movieId", "rating", "timestamp"]
DEFAULT_MOVIES_DATA_COLUMN_NAMES: list[str] = ["title", "genres"]
DEFAULT_COLUMN_NAMES: list[str] = [*DEFAULT_RATINGS_COLUMN_NAMES, *DEFAULT_MOVIES_DATA_COLUMN_NAMES]
