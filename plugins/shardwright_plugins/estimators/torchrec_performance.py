"""torchrec: the published performance model of TorchRec, over columns.

Source: TorchRec 1.8, ``torchrec/distributed/planner/estimator`` (formulas) and ``planner/constants.py``
(constants, which that file calls empirical). Written from the formulas:

- ids read ``I = ids * W * 8`` bytes (twice that with weights); rows read ``L = ids * W * columns * element
  bytes``; output ``U = bags * W * columns * element bytes``. A shard of cut rows reads ``1 / parts`` of the
  ids.
- forward compute ``(I + L + U) * penalty / B`` with ``B`` the bandwidth that the kernel reaches on the
  device's memory; backward compute twice that, and 1.1 more with weights.
- forward and backward communication ``U / C`` each, with ``C`` the bandwidth of the slowest link; a shard of
  cut rows copies its gradients in the backward pass: ``+ U * 2.455 / B``.

What it ignores: id traffic, latency, empty shards, and bytes that stay on their rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from shardwright.contracts.estimator import PERFORMANCE, Estimator
from shardwright.planning.options import Floats, Options
from shardwright.planning.space import ID_BYTES
from shardwright.planning.topology import Topology

BACKWARD_FACTOR = 2.0
WEIGHTED_BACKWARD_FACTOR = 1.1
GRADIENT_COPY_FACTOR = 2.455
MIN_LOOKUP_COLUMNS = 32
# (columns from, penalty): FBGEMM's kernel uses a full block of 128 columns.
BLOCK_PENALTIES = ((0, 1.75), (64, 1.15), (128, 1.0))


class TorchRecPerformance(Estimator):
    """TorchRec's published model of lookups and communication."""

    name: ClassVar[str] = "torchrec"
    measures: ClassVar[str] = PERFORMANCE
    preference: ClassVar[int] = 10

    def estimate(self, options: Options, topology: Topology) -> Mapping[str, Floats]:
        """Milliseconds of each phase, ``[S]``."""
        table, columns = options.shard_table, options.num_columns
        cut = options.cuts_rows[options.option]
        ids, output = _ids_and_output_bytes(options, topology)
        read = np.ceil(ids * ID_BYTES) * np.where(options.is_weighted[table], 2, 1)
        width = np.where(cut, columns, np.maximum(columns, MIN_LOOKUP_COLUMNS))
        lookup = ids * width * options.element_bytes[table]
        memory_bandwidth = _memory_bandwidth(options, topology)
        penalty = np.where(cut, 1.0, _block_penalty(columns))
        forward = (read + lookup + output) * penalty / memory_bandwidth
        weighted = WEIGHTED_BACKWARD_FACTOR * options.is_weighted[table]
        link = topology.link_bandwidths[topology.link_between(topology.world_size)]
        copies = np.where(cut, output * GRADIENT_COPY_FACTOR / memory_bandwidth, 0.0)
        return {
            "forward_compute": forward,
            "forward_communication": output / link,
            "backward_compute": forward * (BACKWARD_FACTOR + weighted),
            "backward_communication": output / link + copies,
        }

    def provenance(self) -> Mapping[str, Any]:
        """The constants of the model."""
        return {
            "backward_factor": BACKWARD_FACTOR,
            "weighted_backward_factor": WEIGHTED_BACKWARD_FACTOR,
            "gradient_copy_factor": GRADIENT_COPY_FACTOR,
        }


def _ids_and_output_bytes(options: Options, topology: Topology) -> tuple[Floats, Floats]:
    """Ids looked up in each shard, and bytes of the vectors it returns: ``[S]`` each."""
    table, option = options.shard_table, options.option
    parts = np.array([layout.row_map.num_parts for layout in options.layouts], dtype=np.float64)[option]
    ids = options.ids_per_batch[table] * topology.world_size / parts
    vectors = np.where(options.is_pooled[table], options.bags_per_batch[table] * topology.world_size, ids)
    return ids, vectors * options.num_columns * options.element_bytes[table]


def _memory_bandwidth(options: Options, topology: Topology) -> Floats:
    """Bytes per millisecond that each shard's kernel reaches: ``[S]``."""
    fraction = [
        options.compute_kernels[kernel].bandwidth_fraction(request) for kernel, request in options.requests
    ]
    own = topology.memory_bandwidths[topology.device_tier]
    return np.array(fraction, dtype=np.float64)[options.request] * own


def _block_penalty(columns: np.ndarray[Any, Any]) -> Floats:
    starts = np.array([start for start, _ in BLOCK_PENALTIES])
    penalties = np.array([penalty for _, penalty in BLOCK_PENALTIES])
    return penalties[np.searchsorted(starts, columns, side="right") - 1]
