"""Parts of kernels that Numba compiles: loops, places of results, and shares of the work for threads."""

from __future__ import annotations

from shardwright_plugins.compute_kernels._compiled import compiled
from shardwright_plugins.compute_kernels._threads import Share, in_threads, shares_of
from shardwright_plugins.compute_kernels.fused_numba._lookup import Cells, Geometry
from shardwright_plugins.compute_kernels.fused_numba._row_loops import AHEAD, prefetch

__all__ = ["AHEAD", "Cells", "Geometry", "Share", "compiled", "in_threads", "prefetch", "shares_of"]
