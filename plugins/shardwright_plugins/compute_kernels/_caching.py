"""The common part of kernels with a cache of rows on the device: what of it is planned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import attrs

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
        missed = request.cache.miss_rate
        return {"device": 1 - missed, self.kept_in: missed}

    def extras(self, request: KernelRequest) -> Mapping[str, Any]:
        """The cache's load factor and algorithm."""
        cache = request.cache
        return {_EXTRAS: {"load_factor": cache.held, "algorithm": cache.algorithm}}

    def with_extras(self, request: KernelRequest, extras: Mapping[str, Any]) -> KernelRequest:
        """Replace the request's cache by that of the plan, if it has one."""
        planned = CacheParams.of(extras.get(_EXTRAS))
        return request if planned is None else attrs.evolve(request, cache=planned)
