"""Tables in host memory behind a cache on the device: how large the cache is, and how often it misses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Annotated, Any, Literal

import numpy as np
from attrs import field, frozen

from shardwright.arguments import (
    NonNegativeFloat,
    NonNegativeInt,
    Within,
    as_value,
    listed,
    not_empty,
    real,
    typed,
)

LOAD_FACTOR = 0.2
"""The part of a table's rows that its cache holds if nothing was asked for (TorchRec 1.8's UVM_CACHING_RATIO)."""

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
    return tuple(map(real, listed(values)))


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

    cacheability: NonNegativeFloat
    expected_lookups: NonNegativeFloat
    mrc_hist_counts: tuple[NonNegativeFloat, ...] = field(converter=_counts, validator=not_empty)
    height: NonNegativeInt

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
    return as_value(EmbeddingOffloadStats, value)


def _algorithm(value: str | Enum) -> str:
    return str(getattr(value, "name", value)).lower()


@frozen(field_transformer=typed)
class CacheParams:
    """Parameters of the cache of a table that is kept in host memory.

    Args:
        load_factor: the part of the table's rows that the cache holds; 0.2 if not given.
        algorithm: ``"lru"`` or ``"lfu"``, or a member of an enumeration with such a name.
        stats: behaviour of the table's ids; without it each row is taken to be as likely as any other.

    Raises:
        InvalidInputError: the load factor is not within 0 and 1, or there is no such algorithm.

    Example:
        >>> import shardwright as sw
        >>> constraint = sw.ParameterConstraints(cache_params=sw.CacheParams(load_factor=0.2))
        >>> constraint.cache_params.load_factor
        0.2
    """

    load_factor: Annotated[float, Within(gt=0, le=1)] | None = None
    algorithm: Literal["lru", "lfu"] = field(default="lru", converter=_algorithm)
    stats: CacheStatistics | None = field(default=None, converter=_statistics)

    @classmethod
    def of(cls, value: Any) -> Any:
        """Parameters as they are; JSON data of them as such; any other value as it is."""
        return as_value(cls, value)

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
