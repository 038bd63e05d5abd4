"""Bytes of shards that several models of costs count, by what kernels declare and the engine sends.

Legend: S runs of shards.
"""

from __future__ import annotations

import numpy as np

from shardwright.contracts.compute_kernel import ComputeKernel, KernelRequest
from shardwright.planning.arrays import Floats
from shardwright.planning.machines.topology import Topology
from shardwright.planning.options.options import Options
from shardwright.planning.options.search_space import vector_bytes

_REFERENCE_ROWS = 1 << 20  # rows asked about, so many that memory per table rounds to nothing per row


def state_bytes_a_row(options: Options) -> Floats:
    """Optimizer state of one row, caches and gradients left out, from what kernels declare: ``[S]``, in bytes."""
    return options.by_request(state_bytes_of_row)


def state_bytes_of_row(kernel: ComputeKernel, request: KernelRequest) -> float:
    """Bytes of a row's optimizer state, from what the kernel declares for many rows."""
    declared = kernel.memory_bytes(request, _REFERENCE_ROWS)
    row = kernel.row_bytes(request)
    weights = row if kernel.fuses_optimizer else 2 * row
    is_cached = len(kernel.reads(request)) > 1
    counted = sum(size for tier, size in declared.items() if not is_cached or tier != "device")
    return max(0.0, counted / _REFERENCE_ROWS - weights)


def synchronised_bytes(options: Options, topology: Topology) -> Floats:
    """Compute the bytes that a copy receives to stay equal to the others: ``[S]``; 0 for shards that are no copies.

    Either the ids of all ranks with the 32-bit gradients of their vectors, or the gradient of all rows, whichever is
    less. Copies of frozen tables receive nothing.
    """
    table = options.shard_table
    ids = options.ids_per_batch[table] * options.id_fraction
    vectors = np.where(options.is_pooled[table], options.bags_per_batch[table], ids)
    row_bytes = vector_bytes(options)[1]
    # First form: ids and gradients of every rank's batch. Second form: the gradient of all rows.
    of_a_batch = ids * options.id_bytes + vectors * row_bytes
    least = np.minimum(of_a_batch * topology.world_size, options.num_rows * row_bytes)
    return np.where(options.is_copy & ~options.is_frozen[table], least, 0.0)
