"""Lookups of the kernels that keep weights in the host's memory, over FBGEMM's managed placements."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import CacheAlgorithm
from fbgemm_gpu.split_table_batched_embeddings_ops_training import EmbeddingLocation
from torch import Tensor

from shardwright.contracts.lookup import Bags, BlockSpec, Lookup
from shardwright_plugins.compute_kernels._caching import cache_of
from shardwright_plugins.compute_kernels.fbgemm._fused_lookup import FusedLookup, table_batched_embedding

_ALGORITHMS = {"lru": CacheAlgorithm.LRU, "lfu": CacheAlgorithm.LFU}


def uvm_lookup(blocks: Sequence[BlockSpec], *, device: torch.device) -> Lookup:
    """A lookup whose weights are in unified memory, without a cache."""
    tables = table_batched_embedding(blocks, device, location=EmbeddingLocation.MANAGED)
    return FusedLookup(blocks, device=device, tables=tables)


class CachedLookup(Lookup):
    """A lookup whose weights are in unified memory, the rows in use in a cache on the device."""

    def __init__(self, blocks: Sequence[BlockSpec], *, device: torch.device) -> None:
        cache = cache_of(blocks[0].request)
        self._tables = table_batched_embedding(
            blocks,
            device,
            location=EmbeddingLocation.MANAGED_CACHING,
            cache_algorithm=_ALGORITHMS[cache.algorithm],
            cache_load_factor=cache.held,
        )
        self._lookup = FusedLookup(blocks, device=device, tables=self._tables)
        self._num_pending = self._num_lookups = 0
        self.blocks, self.states_per_row = blocks, self._lookup.states_per_row

    def forward(self, bags: Bags, *, training: bool) -> tuple[Tensor, Any]:
        self._num_pending += training
        self._num_lookups += 1
        result, saved = self._lookup.forward(bags, training=training)
        return result, (self._num_lookups, saved)

    def backward(self, saved: Any, gradient: Tensor) -> Sequence[Tensor | None]:
        number, own = saved
        if number != self._num_lookups:
            # Another batch's rows may have taken these rows' places in the cache, where FBGEMM would update them.
            own.forget()
            self._num_lookups += 1
        result = self._lookup.backward(own, gradient)
        self._num_pending -= 1
        return result

    def weight(self, block: int) -> Tensor:
        """The weights in the host's memory, after the cache's rows were written there.

        The cache is emptied, so that what the caller writes is seen; unless a backward pass is still to come, which
        updates the rows where the forward pass found them.
        """
        self._tables.flush()
        if not self._num_pending:
            self._tables.reset_cache_states()
        return self._lookup.weight(block)

    def optimizer_state(self, block: int) -> Mapping[str, Tensor]:
        return self._lookup.optimizer_state(block)

    def load_step(self, step: float) -> None:
        self._lookup.load_step(step)

    def set_learning_rate(self, learning_rate: float) -> None:
        self._lookup.set_learning_rate(learning_rate)
