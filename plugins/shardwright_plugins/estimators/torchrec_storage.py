"""torchrec_storage: the published storage model of TorchRec, over columns.

Source: TorchRec 1.8, ``calculate_shard_storages`` in ``torchrec/distributed/planner/shard_estimators.py``, for training
without a pipeline. Written from the formulas:

- a step's buffers: 8 bytes an id, an element of the weights' type for each element of a result, in the device's memory;
  a shard without rows has none. A copy has those of its own batch.
- weights where the kernel keeps them. Behind a cache of load factor ``f`` also ``f`` of the weights on the device, and
  ``4 + 16 f`` bytes a row to find them (column blocks each have all of it).
- optimizer state, in multiples of the weights (of the cached weights as well): none for SGD and for visible gradients,
  two for Adam, one value a row of the whole table for row-wise Adagrad, one for others.

It differs from what is allocated: state is float32 here whatever the weights are, is not cached, and dense kernels also
hold gradients. ``weights_and_buffers`` counts what kernels declare.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from shardwright.contracts.estimator import STORAGE, Estimator
from shardwright.planning.arrays import ID_BYTES, Floats
from shardwright.planning.machines.topology import Topology
from shardwright.planning.options.options import Options
from shardwright.planning.tables.spec import TableSpec
from shardwright_plugins.estimators._torchrec import CACHED, UVM, Work

INDEX_BYTES_A_ROW = 4
BYTES_A_CACHED_ROW = 16
_STATE_MULTIPLES = {"sgd": 0.0, "adam": 2.0}
_OTHER_MULTIPLE = 1.0
_ROW_WISE_OPTIMIZER = "row_wise_adagrad"


class TorchRecStorage(Estimator):
    """TorchRec's published model of memory."""

    name: ClassVar[str] = "torchrec_storage"
    measures: ClassVar[str] = STORAGE
    depends_on_shape_only: ClassVar[bool] = True

    def estimate(self, options: Options, topology: Topology) -> Mapping[str, Floats]:
        """Bytes of each tier, ``[S]``."""
        work = Work(options, topology)
        weights = options.num_rows * options.row_bytes
        on_host, cached = work.of_kernels(UVM, CACHED), work.of_kernels(CACHED)
        multiple = np.array([_state_multiple(table) for table in options.tables])[options.shard_table]
        cache = np.where(cached, _cached_bytes(work), 0.0)
        # A cache's index has an entry for each row of the table, and more for each row in the cache.
        index = options.num_rows * (INDEX_BYTES_A_ROW + work.load_factor * BYTES_A_CACHED_ROW)
        # The device holds the weights, or of those on the host the cache; optimizer state is a multiple of either.
        own = np.where(on_host, cache, weights)
        used = {tier: np.zeros(options.num_shards) for tier in topology.tiers}
        on_device = own + np.ceil(own * multiple) + np.where(cached, np.ceil(index), 0.0) + _buffers(work)
        outside = np.where(on_host, weights + np.ceil(weights * multiple), 0.0)
        for device in topology.device_types:
            mine = options.on_device(device)
            used[topology.tier_of("device", device)] += np.where(mine, on_device, 0.0)
            used[topology.tier_of("host", device)] += np.where(mine, outside, 0.0)
        return used

    def provenance(self, options: Options) -> Mapping[str, Any]:
        """The constants of the model."""
        return {"index_bytes_a_row": INDEX_BYTES_A_ROW, "bytes_a_cached_row": BYTES_A_CACHED_ROW}


def _buffers(work: Work) -> Floats:
    """Bytes of ids and results: ``[S]``."""
    results = work.vectors * work.options.num_columns * work.element_bytes
    return np.where(work.options.num_rows > 0, np.ceil(work.ids * ID_BYTES) + np.ceil(results), 0.0)


def _cached_bytes(work: Work) -> Floats:
    """Bytes of the weights in the cache: a part of the whole table's, rounded, parted among its shards; ``[S]``."""
    options = work.options
    cells = np.array([table.num_embeddings * table.embedding_dim for table in options.tables], dtype=float)
    whole = cells[options.shard_table]
    held = np.rint(whole * work.element_bytes * work.load_factor)
    return np.ceil(held * (options.num_rows * options.num_columns) / whole)


def _state_multiple(table: TableSpec) -> float:
    """Optimizer state in multiples of the weights."""
    if table.optimizer is None:
        return 0.0
    if table.optimizer.name == _ROW_WISE_OPTIMIZER:
        return 1 / table.embedding_dim
    return _STATE_MULTIPLES.get(table.optimizer.name, _OTHER_MULTIPLE)
