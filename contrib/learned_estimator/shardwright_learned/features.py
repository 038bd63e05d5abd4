"""Features of a shard's work in a step, as columns, to which times are fitted.

Legend: S runs of equal shards, B a rank's bags, W ranks, D columns of a shard.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

import shardwright as sw

FEATURES = (
    "input_bytes",
    "read_bytes",
    "output_bytes",
    "exchanged_bytes",
    "host_bytes",
    "synchronised_bytes",
    "table_bytes",
)
"""Bytes, all of them, so that a regressor with coefficients above 0 makes more bytes take longer."""

_SUM_BYTES = 4


def features_of(options: sw.Options, topology: sw.Topology) -> Mapping[str, np.ndarray]:
    """The features of each run of shards: ``{feature: [S]}``.

    - ``input_bytes``: ids, with weights and other columns, that the shard receives from all ranks, or from its own if
      it is a copy.
    - ``read_bytes``: the rows of those ids.
    - ``output_bytes``: results, float32: one a bag, or one an id.
    - ``exchanged_bytes``: what of the results goes to other ranks.
    - ``host_bytes``: what of the results is added inside the host first.
    - ``synchronised_bytes``: of a copy, its dense gradient, if there are other ranks.
    - ``table_bytes``: the shard itself, on which depends what caches hold.
    """
    table, option, world_size = options.shard_table, options.option, float(topology.world_size)
    is_copy, is_pooled = options.is_copy, options.is_pooled[table]
    batches = np.where(is_copy, 1.0, world_size) * (options.num_rows > 0)
    ids = options.ids_per_batch[table] * options.id_fraction * batches
    vectors = np.where(is_pooled, options.bags_per_batch[table] * batches, ids)
    output = vectors * options.num_columns * _SUM_BYTES
    table_bytes = options.num_rows * options.num_columns * options.element_bytes[table]
    columns = {
        "input_bytes": ids * options.id_bytes,
        "read_bytes": ids * options.num_columns * options.element_bytes[table],
        "output_bytes": output,
        "exchanged_bytes": np.where(is_copy, 0.0, output * (world_size - 1) / world_size),
        "host_bytes": np.where(options.sums_inside_host[option] & is_pooled, output, 0.0),
        "synchronised_bytes": np.where(is_copy & (world_size > 1), table_bytes, 0.0),
        "table_bytes": table_bytes,
    }
    return {name: np.asarray(columns[name], dtype=np.float64) for name in FEATURES}
