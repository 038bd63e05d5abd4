"""Parts of kernels over FBGEMM's table-batched embeddings: ids in the order of slots, and offsets of bags."""

from __future__ import annotations

from shardwright_plugins.compute_kernels.fbgemm._bags import (
    Cells,
    offsets_of,
    offsets_of_ids,
    slot_major,
)

__all__ = ["Cells", "offsets_of", "offsets_of_ids", "slot_major"]
