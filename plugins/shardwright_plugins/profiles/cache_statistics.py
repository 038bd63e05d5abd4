"""Statistics of how a table's ids behave towards a cache of any size, from a sample of batches.

Legend: R rows of the table, T batches of the sample, U distinct ids of a batch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shardwright.arguments import check_unmasked
from shardwright.errors import InvalidInputError
from shardwright.planning.arrays import Floats, Ints
from shardwright.planning.tables.caching import CacheParams, EmbeddingOffloadStats

_NEVER = -1
_ALL = np.inf
"""Rows to hold for a hit on a row that was never seen before: those of the whole table."""
_GOLDEN, _SPAN = 0x9E3779B1, 1 << 32
"""Multiplier of Knuth's multiplicative hash (The Art of Computer Programming, volume 3, 6.4), and its range."""


def cache_statistics(
    batches: Iterable[Any], num_embeddings: int, *, algorithm: str = "lru", num_bins: int = 1000
) -> EmbeddingOffloadStats:
    """Measure cache statistics on a sample of batches, the first half of which fills the cache.

    Caches larger than the number of rows that the sample has seen are taken to miss what was never seen before.

    Args:
        batches: a table's ids in each batch of all ranks together, as arrays or lists; in the order of training.
        num_embeddings: rows of the table.
        algorithm: rule of eviction, ``"lru"`` or ``"lfu"``.
        num_bins: sizes of caches to tell apart, from none to all rows.

    Raises:
        InvalidInputError: there are fewer than two batches, or an id is no row of the table.

    Example:
        >>> from shardwright_plugins.profiles import cache_statistics
        >>> batches = [[0, 1, 2], [0, 1, 3], [0, 1, 4], [0, 1, 5]]
        >>> stats = cache_statistics(batches, 10)
        >>> stats.expected_lookups, round(stats.expected_miss_rate(0.4), 2)
        (3.0, 0.33)
    """
    return statistics_of(distinct_ids(batches, num_embeddings), num_embeddings, algorithm, num_bins)


def statistics_of(
    ids: Sequence[Ints], num_embeddings: int, algorithm: str, num_bins: int
) -> EmbeddingOffloadStats:
    """As :func:`cache_statistics`, of distinct ids as :func:`distinct_ids` returns them."""
    sizes = sizes_that_hit(ids, num_embeddings, CacheParams(algorithm=algorithm).algorithm)
    counts = histogram(sizes, num_embeddings, min(num_bins, num_embeddings))
    hits = np.cumsum(counts) / max(1, len(sizes))
    lookups = float(np.mean([len(own) for own in ids[len(ids) // 2 :]]))
    return EmbeddingOffloadStats(float(1 - hits.mean()), lookups, tuple(counts.tolist()), num_embeddings)


def distinct_ids(batches: Iterable[Any], num_embeddings: int) -> list[Ints]:
    """Distinct ids of each batch, rising.

    Raises:
        InvalidInputError: there are fewer than two batches, or an id is no row of the table.
    """
    found = [_distinct(number, batch) for number, batch in enumerate(batches)]
    if len(found) < 2:
        raise InvalidInputError(
            f"a sample of {len(found)} batches says nothing of reuse; give at least 2, better some hundred"
        )
    for number, ids in enumerate(found):
        check_rows(f"batch {number}", ids, num_embeddings)
    return found


def check_rows(batch: str, ids: Ints, num_embeddings: int) -> None:
    """Check that distinct ids, rising, are rows of a table.

    Raises:
        InvalidInputError: one is not.
    """
    if len(ids) and not (ids[0] >= 0 and ids[-1] < num_embeddings):
        raise InvalidInputError(
            f"{batch} of the sample has ids from {ids[0]} to {ids[-1]}; the table has {num_embeddings} rows"
        )


def _distinct(number: int, batch: Any) -> Ints:
    """Distinct ids of a batch, rising; empty lists are batches without ids, whatever NumPy takes their type to be."""
    check_unmasked("the sample", f"batch {number}", batch)
    try:
        ids = np.asarray(batch).reshape(-1)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(f"batch {number} of the sample is no array of ids: {error}") from error
    if len(ids) and ids.dtype.kind not in "iu":
        raise InvalidInputError(
            f"batch {number} of the sample is {ids.dtype}: give whole numbers, a table's ids in each batch"
        )
    distinct: Ints = np.unique(ids.astype(np.int64, copy=False))
    return distinct


def sizes_that_hit(batches: Sequence[Ints], num_embeddings: int, algorithm: str) -> Floats:
    """Rows that a cache must hold more than, for each lookup in the second half of the sample to be a hit.

    The first half fills the caches. A row that was never seen before counts as one that only the whole table has.

    Args:
        batches: distinct ids of each batch.
        num_embeddings: ``R``.
        algorithm: ``"lru"`` or ``"lfu"``.
    """
    of = _by_recency if algorithm == "lru" else _by_uses
    # Counted are the rows that occur, so that memory goes with the sample and not with the table.
    rows = np.unique(np.concatenate(batches))
    numbered = [np.searchsorted(rows, ids) for ids in batches]
    places = [_place(ids) for ids in batches]
    sizes = of(numbered, places, len(rows), len(batches) // 2)
    found = np.concatenate(sizes) if sizes else np.empty(0)
    return np.where(found == _ALL, float(num_embeddings - 1), found)


def _by_recency(batches: Sequence[Ints], places: Sequence[Floats], num_rows: int, first: int) -> list[Floats]:
    """LRU: the rows used since a row's last use (Mattson et al. 1970, "Evaluation techniques for storage hierarchies").

    Rows of one batch have one time of use. A cache that has room for some of them keeps any: a row's place among them
    is drawn by a hash.
    """
    last = np.full(num_rows, _NEVER, dtype=np.int32)
    rows_at: Ints = np.zeros(len(batches), dtype=np.int64)  # whose last use was in that batch
    sizes: list[Floats] = []
    for number, (ids, place) in enumerate(zip(batches, places, strict=True)):
        used = last[ids]
        if number >= first:
            later = np.cumsum(rows_at[::-1])[::-1] - rows_at
            sizes.append(np.where(used == _NEVER, _ALL, later[used] + place * rows_at[used]))
        np.subtract.at(rows_at, used[used != _NEVER], 1)
        rows_at[number] = len(ids)
        last[ids] = number
    return sizes


def _by_uses(batches: Sequence[Ints], places: Sequence[Floats], num_rows: int, first: int) -> list[Floats]:
    """LFU: the rows used in more batches than a row, other than the batch itself.

    Uses are counted over the whole sample, since a cache that has run for long knows them as well. Of rows used as
    often, the cache keeps those used last: a row's place among them is drawn by a hash.
    """
    uses = np.bincount(np.concatenate(batches), minlength=num_rows)
    rows_with: Ints = np.bincount(uses)  # rows used in so many batches
    more = np.cumsum(rows_with[::-1])[::-1] - rows_with
    sizes: list[Floats] = []
    for ids, place in zip(batches[first:], places[first:], strict=True):
        others = uses[ids] - 1
        ahead = more[others] - 1 + place * rows_with[others]  # without the row itself
        sizes.append(np.where(others == 0, _ALL, ahead))
    return sizes


def _place(ids: Ints) -> Floats:
    """A number from 0 to 1 for each row, by a hash."""
    place: Floats = (ids * _GOLDEN % _SPAN) / _SPAN
    return place


def histogram(sizes: Floats, num_embeddings: int, num_bins: int) -> npt.NDArray[np.int64]:
    """Lookups that become hits in each of ``num_bins`` steps of a cache's size, from none to all rows."""
    bins = np.minimum((sizes * (num_bins / num_embeddings)).astype(np.int64), num_bins - 1)
    return np.bincount(bins, minlength=num_bins)
