"""torchrec: the published performance model of TorchRec, over columns.

Source: TorchRec 1.8, ``torchrec/distributed/planner/estimator`` (formulas) and ``planner/constants.py``
(constants, which that file calls empirical). Written from the formulas:

- ids read ``I = ids * W * 8`` bytes (twice that with weights); rows read ``L = ids * W * columns * element
  bytes``; output ``U = bags * W * columns * element bytes``, those of the codec by which results (``U'``: gradients)
  travel, if the table has one and is no copy. A shard of cut rows reads ``1 / parts`` of the ids.
- forward compute ``(I + L + U) * penalty / B`` with ``B`` the bandwidth at which the kernel reads rows: of the
  device's memory, of the link to the host's, or, behind a cache that holds a part ``f``, ``f`` of the one and
  ``1 - f`` of the other; backward compute twice that, and 1.1 more with weights.
- forward and backward communication ``U / C`` and ``U' / C``, with ``C`` the bandwidth of the slowest link; a shard of
  cut rows copies its gradients in the backward pass: ``+ U' * 2.455 / B``.
- where sums are made inside a host of ``L`` ranks: rows are taken as cut, ``C`` is the link inside the host, and with
  ``H > 1`` hosts each way takes ``bags * H * columns * element bytes / C'`` more, ``C'`` the link between hosts.
- a copy on every rank: ``I``, ``L`` and ``U`` of its own batch (no ``W``), no penalty, no forward communication; in the
  backward pass an all-reduce of the table's bytes ``T``, ``T * (2n - 1) / n / (C' * L)`` with ``n = min(H, 2)``, twice
  that with more than two hosts; and the optimizer's kernels, ``T * 9.22 / B``.
- a cache whose load factor and statistics are given: the rows that it is expected to miss cross the link from the
  host's memory, ``misses / parts * columns * element bytes``.

What it ignores: id traffic, latency, empty shards, and bytes that stay on their rank; and that copies may be
synchronised by less than their dense gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import attrs
import numpy as np

from shardwright.contracts.compute_kernel import ComputeKernel, KernelRequest
from shardwright.contracts.estimator import PERFORMANCE, Estimator
from shardwright.planning.arrays import ID_BYTES, Floats
from shardwright.planning.machines.topology import Topology
from shardwright.planning.options.options import Options
from shardwright.planning.tables.option_space import EVERYTHING, OptionSpace
from shardwright_plugins.estimators._torchrec import CACHED, KERNELS, MIN_PARTITION, Work

BACKWARD_FACTOR = 2.0
WEIGHTED_BACKWARD_FACTOR = 1.1
GRADIENT_COPY_FACTOR = 2.455
DENSE_UPDATE_FACTOR = 9.22
MIN_LOOKUP_COLUMNS = 32
# (columns from, penalty): FBGEMM's kernel uses a full block of 128 columns.
BLOCK_PENALTIES = ((0, 1.75), (64, 1.15), (128, 1.0))


class TorchRecPerformance(Estimator):
    """TorchRec's published model of lookups and communication.

    Args:
        published_options: offer TorchRec's options, not all that are loaded, to tables whose constraints name none.
    """

    name: ClassVar[str] = "torchrec"
    measures: ClassVar[str] = PERFORMANCE
    depends_on_shape_only: ClassVar[bool] = True
    preference: ClassVar[int] = 10

    def __init__(self, published_options: bool = False) -> None:
        self._published_options = published_options

    def option_space(self, topology: Topology) -> OptionSpace:
        """Return all options, or what TorchRec offers on CUDA devices; elsewhere it offers less than it could.

        Copies on every rank have the kernel ``dense`` in it, whatever optimizer a table has: their gradients are
        visible, and the user's own optimizer updates them.
        """
        if not self._published_options or topology.device_types != ("cuda",):
            return EVERYTHING
        return OptionSpace(kernels=KERNELS, min_partition=MIN_PARTITION)

    def estimate(self, options: Options, topology: Topology) -> Mapping[str, Floats]:
        """Milliseconds of each phase, ``[S]``."""
        work, table = Work(options, topology), options.shard_table
        bandwidth = _memory_bandwidth(work)
        elements = work.vectors * options.num_columns
        of_result, of_gradient = work.travelling_bytes
        forward = _bytes_looked_up(work, elements * of_result) / bandwidth
        weighted = WEIGHTED_BACKWARD_FACTOR * options.is_weighted[table]
        copied = elements * of_gradient * GRADIENT_COPY_FACTOR / bandwidth
        trained = ~options.is_frozen[
            table
        ]  # nothing goes back to frozen tables, of which TorchRec knows none
        gradient_copies = np.where(work.cuts_rows, copied, 0.0)
        return {
            "forward_compute": forward,
            "forward_communication": np.where(work.is_copy, 0.0, _travel_ms(work, of_result)),
            "backward_compute": trained * forward * (BACKWARD_FACTOR + weighted),
            "backward_communication": trained
            * np.where(
                work.is_copy,
                _synchronisation_ms(work, bandwidth),
                _travel_ms(work, of_gradient) + gradient_copies,
            ),
            "prefetch": _prefetch_ms(work),
        }

    def provenance(self, options: Options) -> Mapping[str, Any]:
        """The constants of the model."""
        return {
            "backward_factor": BACKWARD_FACTOR,
            "weighted_backward_factor": WEIGHTED_BACKWARD_FACTOR,
            "gradient_copy_factor": GRADIENT_COPY_FACTOR,
            "dense_update_factor": DENSE_UPDATE_FACTOR,
        }


def _bytes_looked_up(work: Work, output: Floats) -> Floats:
    """Bytes of ids, rows and results, with the penalty for narrow rows: ``[S]``."""
    options, columns = work.options, work.options.num_columns
    ids = np.ceil(work.ids * ID_BYTES) * np.where(options.is_weighted[options.shard_table], 2, 1)
    is_plain = ~(work.cuts_rows | work.is_copy)
    # Few columns are read as slowly as MIN_LOOKUP_COLUMNS, and narrow blocks less well than wide ones. TorchRec
    # reckons so for tables and columns, and not for cut rows and copies.
    width = np.where(is_plain, np.maximum(columns, MIN_LOOKUP_COLUMNS), columns)
    penalty = np.where(is_plain, _block_penalty(columns), 1.0)
    return (ids + work.ids * width * work.element_bytes + output) * penalty


def _travel_ms(work: Work, element_bytes: Floats) -> Floats:
    """Compute the time of each shard's vectors one way, with so many bytes an element, ms: ``[S]``."""
    options, topology, links = work.options, work.topology, work.topology.link_bandwidths
    output_bytes = work.vectors * options.num_columns * element_bytes
    direct = output_bytes / links[topology.link_between(topology.world_size)]
    inside = output_bytes / links[topology.link_between(topology.local_world_size)]
    # With sums inside the host, one vector a bag then crosses to each host.
    crossing = options.bags_per_batch[options.shard_table] * options.num_columns * element_bytes
    num_sums = topology.num_hosts if topology.num_hosts > 1 else 0
    by_host = inside + crossing * num_sums / links["inter_host"]
    return np.where(options.sums_inside_host[options.option], by_host, direct)


def _synchronisation_ms(work: Work, bandwidth: Floats) -> Floats:
    """Compute the time to reduce the dense gradient of each copy over all ranks and to apply it, ms: ``[S]``."""
    topology = work.topology
    table_bytes = work.options.num_rows * work.options.num_columns * work.element_bytes
    # All-reduce: T (2 n - 1) / n / (C' L) with n = min(H, 2), and twice that with more than two hosts.
    hosts = min(topology.num_hosts, 2)
    of_a_host = topology.link_bandwidths["inter_host"] * topology.local_world_size
    rounds = 2 if topology.num_hosts > 2 else 1
    reduce = table_bytes * rounds * (2 * hosts - 1) / hosts / of_a_host
    return reduce + table_bytes * DENSE_UPDATE_FACTOR / bandwidth


def _memory_bandwidth(work: Work) -> Floats:
    """Bytes per millisecond at which each shard's kernel reads rows: ``[S]``."""
    return work.options.by_request(partial(_read_speed, work.topology))


def _read_speed(topology: Topology, kernel: ComputeKernel, request: KernelRequest) -> float:
    """The mean bandwidth of what a kernel reads, a cache taken to be hit as often as it is large."""
    blind = attrs.evolve(request, cache=attrs.evolve(request.cache, stats=None))
    parts = kernel.reads(blind)
    mean = sum(part * topology.read_bandwidth(tier, request.device) for tier, part in parts.items() if part)
    return mean * kernel.bandwidth_fraction(request)


def _prefetch_ms(work: Work) -> Floats:
    """Compute the time of the rows that a cache misses to come from the host's memory, ms: ``[S]``."""
    options = work.options
    misses = options.by_request(lambda _, request: _expected_misses(request))
    if not misses.any():
        return np.zeros(options.num_shards)
    rows = np.where(work.of_kernels(CACHED) & ~work.is_copy, misses, 0.0)
    # The misses are those of the whole table: each row part has its share.
    moved = rows / work.num_row_parts * options.num_columns * work.element_bytes
    return moved / options.by_request(lambda _, request: work.topology.read_bandwidth("host", request.device))


def _expected_misses(request: KernelRequest) -> float:
    """Rows a step; none where statistics or the load factor were not given."""
    cache = request.cache
    if cache.stats is None or cache.load_factor is None:
        return 0.0
    return cache.stats.expected_lookups * cache.stats.expected_miss_rate(cache.load_factor)


def _block_penalty(columns: np.ndarray[Any, Any]) -> Floats:
    starts = np.array([start for start, _ in BLOCK_PENALTIES])
    penalties = np.array([penalty for _, penalty in BLOCK_PENALTIES])
    return penalties[np.searchsorted(starts, columns, side="right") - 1]
