"""Parts of kernels that Numba compiles: loops, places of results, and shares of the work for threads."""

from __future__ import annotations

from shardwright_plugins.compute_kernels._compiled import compiled
from shardwright_plugins.compute_kernels._threads import in_threads
from shardwright_plugins.compute_kernels.fused_numba._lookup import Cells, Geometry, Share, shares_of

__all__ = ["Cells", "Geometry", "Share", "compiled", "in_threads", "shares_of"]
