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
- where sums are made inside a host of ``L`` ranks: rows are taken as cut, ``C`` is the link inside the host, and with
  ``H > 1`` hosts each way takes ``bags * H * columns * element bytes / C'`` more, ``C'`` the link between hosts.
- a copy on every rank: ``I``, ``L`` and ``U`` of its own batch (no ``W``), no penalty, no forward communication; in the
  backward pass an all-reduce of the table's bytes ``T``, ``T * (2n - 1) / n / (C' * L)`` with ``n = min(H, 2)``, twice
  that with more than two hosts; and the optimizer's kernels, ``T * 9.22 / B``.

What it ignores: id traffic, latency, empty shards, and bytes that stay on their rank; and that copies may be
synchronised by less than their dense gradient.
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
DENSE_UPDATE_FACTOR = 9.22
MIN_LOOKUP_COLUMNS = 32
# (columns from, penalty): FBGEMM's kernel uses a full block of 128 columns.
BLOCK_PENALTIES = ((0, 1.75), (64, 1.15), (128, 1.0))


class TorchRecPerformance(Estimator):
    """TorchRec's published model of lookups and communication."""

    name: ClassVar[str] = "torchrec"
    measures: ClassVar[str] = PERFORMANCE
    answers_by_shape: ClassVar[bool] = True
    preference: ClassVar[int] = 10

    def estimate(self, options: Options, topology: Topology) -> Mapping[str, Floats]:
        """Milliseconds of each phase, ``[S]``."""
        table, columns = options.shard_table, options.num_columns
        copy = options.is_replicated[options.option]
        cut = (options.cuts_rows | options.sums_inside_host)[options.option]
        ids, output = _ids_and_output_bytes(options, topology)
        read = np.ceil(ids * ID_BYTES) * np.where(options.is_weighted[table], 2, 1)
        width = np.where(cut | copy, columns, np.maximum(columns, MIN_LOOKUP_COLUMNS))
        lookup = ids * width * options.element_bytes[table]
        memory_bandwidth = _memory_bandwidth(options, topology)
        penalty = np.where(cut | copy, 1.0, _block_penalty(columns))
        forward = (read + lookup + output) * penalty / memory_bandwidth
        weighted = WEIGHTED_BACKWARD_FACTOR * options.is_weighted[table]
        travel = _travel_ms(options, topology, output)
        gradient_copies = np.where(cut, output * GRADIENT_COPY_FACTOR / memory_bandwidth, 0.0)
        return {
            "forward_compute": forward,
            "forward_communication": np.where(copy, 0.0, travel),
            "backward_compute": forward * (BACKWARD_FACTOR + weighted),
            "backward_communication": np.where(
                copy, _synchronisation_ms(options, topology, memory_bandwidth), travel + gradient_copies
            ),
        }

    def provenance(self) -> Mapping[str, Any]:
        """The constants of the model."""
        return {
            "backward_factor": BACKWARD_FACTOR,
            "weighted_backward_factor": WEIGHTED_BACKWARD_FACTOR,
            "gradient_copy_factor": GRADIENT_COPY_FACTOR,
            "dense_update_factor": DENSE_UPDATE_FACTOR,
        }


def _ids_and_output_bytes(options: Options, topology: Topology) -> tuple[Floats, Floats]:
    """Ids looked up in each shard, and bytes of the vectors it returns: ``[S]`` each."""
    table, option = options.shard_table, options.option
    num_batches = np.where(options.is_replicated, 1, topology.world_size)[option]
    ids = options.ids_per_batch[table] * num_batches / options.num_row_parts[option]
    vectors = np.where(options.is_pooled[table], options.bags_per_batch[table] * num_batches, ids)
    return ids, vectors * options.num_columns * options.element_bytes[table]


def _travel_ms(options: Options, topology: Topology, output_bytes: Floats) -> Floats:
    """How long the vectors of each shard travel, one way: ``[S]``."""
    table, links = options.shard_table, topology.link_bandwidths
    direct = output_bytes / links[topology.link_between(topology.world_size)]
    inside = output_bytes / links[topology.link_between(topology.local_world_size)]
    crossing = options.bags_per_batch[table] * options.num_columns * options.element_bytes[table]
    num_sums = topology.num_hosts if topology.num_hosts > 1 else 0
    by_host = inside + crossing * num_sums / links["inter_host"]
    return np.where(options.sums_inside_host[options.option], by_host, direct)


def _synchronisation_ms(options: Options, topology: Topology, memory_bandwidth: Floats) -> Floats:
    """How long the dense gradient of each copy is reduced over all ranks, and applied: ``[S]``."""
    table_bytes = options.num_rows * options.num_columns * options.element_bytes[options.shard_table]
    hosts = min(topology.num_hosts, 2)
    bandwidth = topology.link_bandwidths["inter_host"] * topology.local_world_size
    rounds = 2 if topology.num_hosts > 2 else 1
    reduce = table_bytes * rounds * (2 * hosts - 1) / hosts / bandwidth
    return reduce + table_bytes * DENSE_UPDATE_FACTOR / memory_bandwidth


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
