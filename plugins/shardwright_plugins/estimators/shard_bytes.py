"""Amounts of shards that several models of costs count, by what kernels declare and the engine sends.

Legend: S runs of shards.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
from attrs import frozen

from shardwright.contracts.compute_kernel import ComputeKernel, KernelRequest
from shardwright.planning.arrays import Bools, Floats, Ints
from shardwright.planning.machines.topology import Topology
from shardwright.planning.options.options import Options
from shardwright.planning.options.search_space import filled_bags, vector_bytes


@frozen(eq=False, slots=False)
class ShardAmounts:
    """Ids and vectors of one rank's batch in each shard, as columns over runs of shards.

    Args:
        options: options.
        topology: the ranks.
    """

    options: Options
    topology: Topology

    @cached_property
    def table(self) -> Ints:
        """Table of each run."""
        return self.options.shard_table

    @cached_property
    def is_copy(self) -> Bools:
        """True for rows that every rank has."""
        return self.options.is_copy

    @cached_property
    def is_filled(self) -> Bools:
        """True for shards with rows."""
        return self.options.num_rows > 0

    @cached_property
    def own_ids(self) -> Floats:
        """Ids of one rank's batch in each shard."""
        return self.options.ids_per_batch[self.table] * self.options.id_fraction * self.is_filled

    @cached_property
    def own_vectors(self) -> Floats:
        """Vectors that one rank's batch gets from each shard: one a bag that travels, or one an id."""
        bags = self.options.bags_per_batch[self.table] * filled_bags(self.options, self.topology)
        return np.where(self.options.is_pooled[self.table], bags, self.own_ids) * self.is_filled

    @cached_property
    def batches(self) -> Floats:
        """Batches that are looked up: one in copies, else those of all ranks."""
        return np.where(self.is_copy, 1.0, float(self.topology.world_size))


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
