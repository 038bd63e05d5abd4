"""Lookup of kernels that keep tables in one memory and the rows in use in a cache.

Legend: N ids, U distinct rows among them, R rows of all blocks, D columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import evolve, frozen
from torch import Tensor

from shardwright.contracts.lookup import Bags, BlockSpec, Lookup
from shardwright.modules.embedding_configs import dtype_of
from shardwright_plugins.compute_kernels._caching import cache_of
from shardwright_plugins.compute_kernels.plain_torch._row_optimizer import RowOptimizer, RunsRowOptimizer
from shardwright_plugins.compute_kernels.plain_torch._torch_rows import RowNumbers, sums_of_rows
from shardwright_plugins.compute_kernels.row_cache.rows import WEIGHT, CachedRows
from shardwright_plugins.compute_kernels.row_cache.sets import CacheSets
from shardwright_plugins.compute_kernels.row_cache.sizes import num_sets
from shardwright_plugins.compute_kernels.row_cache.turns import Turns


@frozen(eq=False)
class _Saved:
    """The rows of a forward pass.

    Args:
        bags: its bags; ids count ``rows``.
        rows: distinct rows, rising, ``[U]``.
        slots: their slots in the cache, ``[U]``, as long as ``stamp`` is the cache's.
        stamp: state of the cache.
    """

    bags: Bags
    rows: Tensor
    slots: Tensor
    stamp: int


class CachedRowsLookup(RunsRowOptimizer, Lookup):
    """Blocks whose rows come through a cache.

    A backward pass finds the rows again wherever they are by then, so that any number of forward passes, and of
    prefetched batches, may come before it. Rows that are changed reach :meth:`weight` when they leave the cache, or
    when somebody asks for it: then all are written, and the cache is read again before its next use, since what is
    handed out may be written into.

    Args:
        blocks: the blocks.
        keep: function that makes the tensor of whole tables for a name, columns, dtype and initial value.
        device: device of the cache.
    """

    def __init__(
        self,
        blocks: Sequence[BlockSpec],
        keep: Callable[[str, int, torch.dtype, float], Tensor],
        *,
        device: torch.device,
    ) -> None:
        self.blocks = blocks
        self._numbers = RowNumbers(blocks, device)
        self._optimizer = RowOptimizer(blocks[0])
        self.states_per_row = self._optimizer.states_per_row
        request = blocks[0].request
        self._kept = {
            WEIGHT: keep(WEIGHT, request.num_columns, dtype_of(request.data_type), 0.0),
            **{
                name: keep(name, columns, torch.float32, self._optimizer.initial(name))
                for name, columns in self._optimizer.columns.items()
            },
        }
        self._cache = CachedRows(self._kept, _sets_of(blocks, device), device)
        self._is_handed_out = False
        self._turns = Turns(device)  # a pipeline prefetches on a stream, and may in a thread, of its own

    @property
    def num_hits(self) -> int:
        """Distinct rows of lookups that were in the cache, since it was made."""
        return self._cache.num_hits

    @property
    def num_misses(self) -> int:
        """Distinct rows of lookups that were not in the cache, since it was made."""
        return self._cache.num_misses

    def prefetch(self, bags: Bags) -> None:
        with self._turns:
            self._found(bags)

    def forward(self, bags: Bags, *, training: bool) -> tuple[Tensor, Any]:
        with self._turns:
            found = self._found(bags)
            values = self._cache.read((WEIGHT,), found.rows, found.slots)
        return sums_of_rows(values[WEIGHT], found.bags), found if training else None

    def prepare(self, bags: Bags) -> Any:
        with self._turns:
            return self._found(bags)

    def backward(self, saved: Any, gradient: Tensor) -> Sequence[Tensor | None]:
        with self._turns:
            self._refresh()
            is_as_it_was = saved.stamp == self._cache.stamp
            slots = saved.slots if is_as_it_was else self._cache.find(saved.rows)
            values = self._cache.read(self._kept, saved.rows, slots)
            state = {name: own for name, own in values.items() if name != WEIGHT}
            self._optimizer.step(
                saved.bags,
                gradient,
                values[WEIGHT],
                state,
                lambda places: self._numbers.in_blocks(saved.rows.index_select(0, places)),
            )
            self._cache.write(saved.rows, slots, values)
        return ()

    def _found(self, bags: Bags) -> _Saved:
        """The rows of some bags, which are in the cache from now on."""
        self._refresh()
        flat = self._numbers.flatten(bags)
        rows, ids = flat.ids.unique(return_inverse=True)
        slots = self._cache.use(rows)
        return _Saved(evolve(flat, ids=ids), rows, slots, self._cache.stamp)

    def _refresh(self) -> None:
        """Read the cache's rows again, if somebody may have written into those that are kept."""
        if self._is_handed_out:
            self._is_handed_out = False
            self._cache.reload()

    def _handed_out(self, name: str, block: int) -> Tensor:
        with self._turns:
            if not self._is_handed_out:
                self._cache.flush()
                self._is_handed_out = True
            return self._numbers.of(self._kept[name], block)

    def weight(self, block: int) -> Tensor:
        return self._handed_out(WEIGHT, block)

    def optimizer_state(self, block: int) -> Mapping[str, Tensor]:
        return self._optimizer.named_state(
            {name: self._handed_out(name, block) for name in self._optimizer.columns}
        )


def _sets_of(blocks: Sequence[BlockSpec], device: torch.device) -> CacheSets:
    num_rows = [spec.block.num_rows for spec in blocks]
    sets = [num_sets(spec.block.num_rows, cache_of(spec.request).held) for spec in blocks]
    counts_uses = cache_of(blocks[0].request).algorithm == "lfu"
    return CacheSets(num_rows, sets, counts_uses=counts_uses, device=device)
