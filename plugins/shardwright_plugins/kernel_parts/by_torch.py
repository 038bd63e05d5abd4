"""Parts of kernels of plain torch: rows of several blocks in one tensor, and sums of bags."""

from __future__ import annotations

from shardwright.runtime.step.backward.row_gradients import bag_sums
from shardwright_plugins.compute_kernels.plain_torch._torch_rows import RowNumbers

__all__ = ["RowNumbers", "bag_sums"]
