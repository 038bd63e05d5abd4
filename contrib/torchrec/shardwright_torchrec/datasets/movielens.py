"""MovieLens' ratings, from files on disk."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import IterDataPipe

from shardwright_torchrec.datasets.utils import safe_cast

__all__ = [
    "DEFAULT_COLUMN_NAMES",
    "DEFAULT_MOVIES_DATA_COLUMN_NAMES",
    "DEFAULT_RATINGS_COLUMN_NAMES",
    "movielens_20m",
    "movielens_25m",
]

DEFAULT_RATINGS_COLUMN_NAMES: list[str] = ["userId", "movieId", "rating", "timestamp"]
DEFAULT_MOVIES_DATA_COLUMN_NAMES: list[str] = ["title", "genres"]
DEFAULT_COLUMN_NAMES: list[str] = [*DEFAULT_RATINGS_COLUMN_NAMES, *DEFAULT_MOVIES_DATA_COLUMN_NAMES]

_CASTS = {"userId": (int, 0), "movieId": (int, 0), "rating": (float, 0.0), "timestamp": (int, 0)}
_MOVIE = DEFAULT_RATINGS_COLUMN_NAMES.index("movieId")


def _by_name(cells: list[str]) -> dict[str, Any]:
    """Values of a line by column; text where no other type is known."""
    return {
        name: safe_cast(cell, *_CASTS.get(name, (str, "")))
        for name, cell in zip(DEFAULT_COLUMN_NAMES, cells, strict=False)
    }


class _Ratings(IterDataPipe):  # type: ignore[type-arg]  # of what row_mapper gives
    """The lines of `ratings.csv`, with a movie's title and genres from `movies.csv` if they are wanted."""

    def __init__(
        self, root: str, with_movies: bool, row_mapper: Callable[[list[str]], Any] | None, **open_kw: Any
    ) -> None:
        self._root, self._with_movies = Path(root), with_movies
        self._row_mapper, self._open_kw = row_mapper, open_kw

    def __iter__(self) -> Iterator[Any]:
        nothing = [""] * len(DEFAULT_MOVIES_DATA_COLUMN_NAMES)
        movies = {line[0]: line[1:] for line in self._lines("movies.csv")} if self._with_movies else None
        for line in self._lines("ratings.csv"):
            cells = line if movies is None else [*line, *movies.get(line[_MOVIE], nothing)]
            yield cells if self._row_mapper is None else self._row_mapper(cells)

    def _lines(self, name: str) -> Iterator[list[str]]:
        with (self._root / name).open(**{"newline": "", "encoding": "utf-8", **self._open_kw}) as file:
            lines = csv.reader(file)
            next(lines, None)  # names of the columns
            yield from lines


def movielens_20m(
    root: str,
    *,
    include_movies_data: bool = False,
    row_mapper: Callable[[list[str]], Any] | None = _by_name,
    **open_kw: Any,
) -> IterDataPipe[Any]:
    """Ratings of the 20-million data set.

    Args:
        root: folder with `ratings.csv` and `movies.csv`.
        include_movies_data: add a movie's title and genres.
        row_mapper: function of a line's cells; a dict by column by default; `None`: the cells.
        open_kw: arguments of `open`.
    """
    return _Ratings(root, include_movies_data, row_mapper, **open_kw)


def movielens_25m(
    root: str,
    *,
    include_movies_data: bool = False,
    row_mapper: Callable[[list[str]], Any] | None = _by_name,
    **open_kw: Any,
) -> IterDataPipe[Any]:
    """Ratings of the 25-million data set, whose files have the same form; see `movielens_20m`."""
    return _Ratings(root, include_movies_data, row_mapper, **open_kw)
