"""The common part of kernels with a cache of rows on the device: what of it is planned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from shardwright.contracts import ComputeKernel
from shardwright.contracts.compute_kernel import KernelRequest
from shardwright.planning.tables.caching import CacheParams

_EXTRAS = "cache"


class CachingKernel(ComputeKernel):
    """A kernel that keeps tables in another memory, and the rows in use in a cache on the device.

    The cache holds a fraction of the rows, the load factor. It comes from ``cache_params`` in the table's constraints,
    or from ``fused_params`` (``cache_load_factor``). The plan keeps it.
    """

    caches_rows: ClassVar[bool] = True
    kept_in: ClassVar[str]
    """Memory tier of whole tables."""

    def reads(self, request: KernelRequest) -> Mapping[str, float]:
        """Fraction of rows read from each memory: rows that the cache misses come from where tables are kept."""
        missed = cache_of(request).miss_rate
        return {"device": 1 - missed, self.kept_in: missed}

    def extras(self, request: KernelRequest) -> Mapping[str, Any]:
        """The cache's load factor and algorithm."""
        cache = cache_of(request)
        return {_EXTRAS: {"load_factor": cache.held, "algorithm": cache.algorithm}}


def cache_of(request: KernelRequest) -> CacheParams:
    """The cache of a block: that of the plan, in a run; while planning, that of the table."""
    return CacheParams.of(request.extras.get(_EXTRAS)) or request.cache
