"""Common parts of TorchRec's models of time and memory: ids, vectors, and TorchRec's type of a shard.

Source: TorchRec 1.8, ``torchrec/distributed/planner/estimator/estimator.py`` and ``shard_estimators.py``.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np
from attrs import frozen

from shardwright.contracts.row_format import FloatRows
from shardwright.planning.arrays import Bools, Floats, Ints
from shardwright.planning.tables.codecs import FLOAT_BYTES
from shardwright_plugins.estimators.shard_bytes import ShardAmounts

ROW_WISE = "row_wise"
"""TorchRec's models know this type by name: it has other costs than ``table_wise`` on one rank too."""

UVM, CACHED = "fused_uvm", "fused_uvm_caching"
SHARDED_KERNELS = ("fused", CACHED, UVM)
KERNELS: Mapping[str, tuple[str, ...]] = {
    "table_wise": SHARDED_KERNELS,
    "column_wise": SHARDED_KERNELS,
    "table_column_wise": SHARDED_KERNELS,
    ROW_WISE: SHARDED_KERNELS,
    "table_row_wise": SHARDED_KERNELS,
    "grid_shard": (),  # only for those who ask for it
    "data_parallel": ("dense",),
}
"""Options that TorchRec's EmbeddingEnumerator offers for an EmbeddingBagCollection on CUDA devices."""
MIN_PARTITION = 128


@frozen(eq=False, slots=False)
class Work(ShardAmounts):
    """Lookups and results of each shard: columns over runs of shards."""

    @cached_property
    def cuts_rows(self) -> Bools:
        """True for shards of a type that cuts rows."""
        options = self.options
        names = np.array([kind.name for kind in options.sharding_types], dtype=object)
        named = (names == ROW_WISE)[options.sharding_type].astype(bool)
        return (options.cuts_rows | options.sums_inside_host | named)[options.option]

    @cached_property
    def num_row_parts(self) -> Ints:
        """Into how many parts the rows of each shard's option are cut: ``[S]``."""
        parts = [layout.row_map.num_parts for layout in self.options.layouts]
        return np.array(parts, dtype=np.int64)[self.options.option]

    @cached_property
    def ids(self) -> Floats:
        """Ids looked up, alike for all row parts."""
        options = self.options
        a_part = options.ids_per_batch[options.shard_table] / self.num_row_parts
        return a_part * self.batches

    @cached_property
    def vectors(self) -> Floats:
        """Vectors returned: one a bag or one an id."""
        table = self.options.shard_table
        pooled = self.options.bags_per_batch[table] * self.batches
        return np.where(self.options.is_pooled[table], pooled, self.ids)

    @cached_property
    def element_bytes(self) -> Floats:
        """Bytes of an element of the table, and of a vector that is returned."""
        return self.options.element_bytes[self.options.shard_table]

    @cached_property
    def travelling_bytes(self) -> tuple[Floats, Floats]:
        """Bytes of an element of a result and of a gradient: what their codecs make of one more; not of copies."""
        results, gradients = self.options.element_bytes.copy(), self.options.element_bytes.copy()
        is_packed = np.array(
            [not isinstance(rows, FloatRows) for rows in self.options.row_formats], dtype=bool
        )
        results[is_packed] = FLOAT_BYTES  # rows are packed, sums of them are not
        for table, spec in enumerate(self.options.tables):
            codecs = spec.qcomms_config
            if codecs is not None and codecs.forward_precision is not None:
                results[table] = codecs.result_row_bytes(2) - codecs.result_row_bytes(1)
            if codecs is not None and codecs.backward_precision is not None:
                gradients[table] = codecs.gradient_row_bytes(2) - codecs.gradient_row_bytes(1)
        travelling = (results[self.options.shard_table], gradients[self.options.shard_table])
        of_copies = np.where(is_packed[self.options.shard_table], FLOAT_BYTES, self.element_bytes)
        of_result, of_gradient = (np.where(self.is_copy, of_copies, own) for own in travelling)
        return of_result, of_gradient

    def of_kernels(self, *names: str) -> Bools:
        """True for shards whose kernel is one of these."""
        options = self.options
        known = np.array([kernel.name in names for kernel in options.compute_kernels], dtype=bool)
        return known[options.compute_kernel[options.option]]

    @cached_property
    def load_factor(self) -> Floats:
        """The part of the rows that a cache holds."""
        return self.options.by_request(lambda _, request: request.cache.held)
