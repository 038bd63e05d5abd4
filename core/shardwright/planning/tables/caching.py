"""Tables in host memory behind a cache on the device: how large the cache is, and how often it misses."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Set
from enum import Enum
from numbers import Real
from typing import Any

import numpy as np
from attrs import field, frozen

from shardwright.arguments import brief, typed
from shardwright.errors import InvalidInputError
from shardwright.planning.layouts.row_maps import not_negative

LOAD_FACTOR = 0.2
"""The part of a table's rows that its cache holds if nothing was asked for (TorchRec 1.8's UVM_CACHING_RATIO)."""

ALGORITHMS = ("lru", "lfu")
"""Eviction rules of a cache: the row used least recently, or least often."""

FUSED_PARAMS = frozenset({"cache_load_factor", "cache_algorithm"})
"""The keys of ``fused_params`` that are about the cache, not the optimizer."""


class CacheStatistics(ABC):
    """Behaviour of a table's ids towards a cache; hashable."""

    @property
    @abstractmethod
    def expected_lookups(self) -> float:
        """Distinct ids looked up in a step, by all ranks together."""

    @abstractmethod
    def expected_miss_rate(self, load_factor: float) -> float:
        """The part of those that a cache of ``load_factor`` of the rows does not hold, from 0 to 1."""

    @property
    @abstractmethod
    def cacheability(self) -> float:
        """The area under the curve of miss rates over load factors: 0 for a table that a small cache serves."""


def _counts(values: Iterable[float]) -> tuple[float, ...]:
    listed: tuple[Any, ...] = () if isinstance(values, bytes | Mapping | Set) else tuple(values)
    if not listed or not all(isinstance(one, Real) and 0 <= float(one) < math.inf for one in listed):
        raise InvalidInputError(
            f"mrc_hist_counts must be numbers, none negative, at least one; got {brief(values)}"
        )
    return tuple(map(float, listed))


def _not_negative(instance: Any, attribute: Any, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real) or not 0 <= float(value) < math.inf:
        raise InvalidInputError(f"{attribute.name} must be a finite number from 0, got {brief(value)}")


@frozen(field_transformer=typed)
class EmbeddingOffloadStats(CacheStatistics):
    """Cache statistics from a histogram of reuse distances, under TorchRec's names.

    Args:
        cacheability: area under the miss-ratio curve.
        expected_lookups: distinct ids looked up in a step, by all ranks together.
        mrc_hist_counts: ``n`` bins over cache sizes from none to all rows: how many lookups are hits as soon as the
            cache is that large.
        height: rows of the table.
    """

    cacheability: float = field(validator=_not_negative)
    expected_lookups: float = field(validator=_not_negative)
    mrc_hist_counts: tuple[float, ...] = field(converter=_counts)
    height: int = field(validator=not_negative)

    def expected_miss_rate(self, load_factor: float) -> float:
        """One minus the hits of all bins below the cache's size; all miss where the cache holds less than a row."""
        hits = np.cumsum(self.mrc_hist_counts)
        if hits[-1] == 0:
            return 0.0  # never looked up
        size = load_factor * self.height - 1
        bounds = np.linspace(0, self.height, len(hits) + 1)
        below = int(np.searchsorted(bounds, size, side="right"))
        if below == 0:
            return 1.0
        return 0.0 if below > len(hits) else float(1 - hits[below - 1] / hits[-1])


def _statistics(value: CacheStatistics | Mapping[str, Any] | None) -> Any:
    """Statistics as they are; JSON data of an :class:`EmbeddingOffloadStats` as one."""
    return EmbeddingOffloadStats(**value) if isinstance(value, Mapping) else value


def _known_statistics(instance: Any, attribute: Any, value: Any) -> None:
    if value is not None and not isinstance(value, CacheStatistics):
        raise InvalidInputError(f"stats must be CacheStatistics, got {value!r}")


def _part(instance: Any, attribute: Any, value: Any) -> None:
    if value is not None and (isinstance(value, bool) or not 0 < value <= 1):
        raise InvalidInputError(
            f"{attribute.name} is a part of the table's rows, above 0 and up to 1; got {brief(value)}"
        )


def _algorithm(value: str | Enum) -> str:
    name = str(getattr(value, "name", value)).lower()
    if name not in ALGORITHMS:
        raise InvalidInputError(f"no cache algorithm {brief(value)}. Known: {', '.join(ALGORITHMS)}.")
    return name


@frozen(field_transformer=typed)
class CacheParams:
    """Parameters of the cache of a table that is kept in host memory.

    Args:
        load_factor: the part of the table's rows that the cache holds; 0.2 if not given.
        algorithm: ``"lru"`` or ``"lfu"`` (or FBGEMM's ``CacheAlgorithm``).
        stats: behaviour of the table's ids; without it each row is taken to be as likely as any other.

    Raises:
        InvalidInputError: the load factor is not within 0 and 1, or there is no such algorithm.

    Example:
        >>> import shardwright as sw
        >>> constraint = sw.ParameterConstraints(
        ...     compute_kernels=["fused_uvm_caching"], cache_params=sw.CacheParams(load_factor=0.2)
        ... )
        >>> constraint.cache_params.load_factor
        0.2
    """

    load_factor: float | None = field(default=None, validator=_part)
    algorithm: str = field(default="lru", converter=_algorithm)
    stats: CacheStatistics | None = field(default=None, converter=_statistics, validator=_known_statistics)

    @classmethod
    def of(cls, value: Any) -> CacheParams | None:
        """Parameters as they are; JSON data of them as such; ``None`` as ``None``.

        Raises:
            InvalidInputError: it is something else, or has unknown keys.
        """
        if value is None or isinstance(value, cls):
            return value
        try:
            return cls(**value)
        except TypeError as error:
            raise InvalidInputError(
                f"cache_params must be CacheParams(load_factor, algorithm, stats), got {value!r}"
            ) from error

    @classmethod
    def from_fused_params(cls, fused_params: Mapping[str, Any] | None) -> CacheParams:
        """Read the cache's parameters from ``fused_params``: ``cache_load_factor``, ``cache_algorithm``."""
        given = {
            name.removeprefix("cache_"): value
            for name, value in (fused_params or {}).items()
            if name in FUSED_PARAMS
        }
        return cls(**given)

    @property
    def held(self) -> float:
        """The part of the rows that the cache holds."""
        return LOAD_FACTOR if self.load_factor is None else self.load_factor

    @property
    def miss_rate(self) -> float:
        """The part of the lookups that the cache does not serve."""
        return 1 - self.held if self.stats is None else self.stats.expected_miss_rate(self.held)
