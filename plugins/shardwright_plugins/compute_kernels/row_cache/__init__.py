"""Tables larger than the device's memory: rows in use are in a cache, all of them in a file or in the CPU's memory."""

from __future__ import annotations

from shardwright_plugins.compute_kernels.row_cache.kernels import RowCaching

__all__ = ["RowCaching"]
