"""The kernel ``lmdb_caching``: the cache of the built-in kernels, before a key-value store. No torch here."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, ClassVar

import shardwright as sw
from shardwright.contracts import NAMED_ONLY
from shardwright_plugins.compute_kernels.row_cache import RowCaching

if TYPE_CHECKING:
    from torch import Tensor

FOLDER_VARIABLE = "SHARDWRIGHT_STORE_FOLDER"
"""Environment variable: the folder of stores, which stay there. Without it they are in a folder of temporary files, and
go with their tables."""


class LmdbCaching(RowCaching):
    """Tables in LMDB files, the rows in use in a cache, on the CPU; taken only where constraints name it."""

    name: ClassVar[str] = "lmdb_caching"
    preference: ClassVar[int] = NAMED_ONLY
    kept_in: ClassVar[str] = "disk"
    further_tiers: ClassVar[tuple[str, ...]] = ("disk",)

    def refusal(self, request: sw.KernelRequest) -> str:  # noqa: D102 - described in the base class
        if request.device != "cpu":
            return f"its rows come through the CPU's memory, not into that of {request.device!r} devices"
        if request.on_this_machine and find_spec("lmdb") is None:
            return "lmdb is not installed (pip install lmdb)"
        return ""

    def bandwidth_fraction(self, request: sw.KernelRequest) -> float:
        """A tenth: of each row that misses, Python looks up one key for the weights and one for each state."""
        return 0.1

    def keep(
        self, blocks: Sequence[sw.BlockSpec], *, device: Any, environment: Mapping[str, str] = os.environ
    ) -> Callable[[str, int, Any, float], Tensor]:
        """Open the store of some blocks, as a table that is not trained yet.

        Raises:
            InvalidInputError: the folder has a store of other blocks by that name, or another process uses it.
        """
        from shardwright_store.rows import StoredRows
        from shardwright_store.store import RowStore

        sizes = [self.memory_bytes(spec.request, spec.block.num_rows)["disk"] for spec in blocks]
        store = RowStore.of(blocks, sum(sizes), environment.get(FOLDER_VARIABLE))
        num_rows = sum(spec.block.num_rows for spec in blocks)
        return partial(StoredRows.added, store, num_rows)
