"""Costs of averaging the replicas of shards over sharding groups: bytes, and milliseconds a step.

Each rank adds up one part in ``R`` of its shards for all replicas, and sends the mean back: ``(R - 1) / R`` of the
bytes of weights and optimizer state leave a rank twice, as in a ring's all-reduce (Patarasuk, Yuan 2009). Legend: S
runs of shards, R sharding groups, K steps from one averaging to the next.
"""

from __future__ import annotations

import numpy as np

from shardwright.contracts.compute_kernel import ComputeKernel, KernelRequest
from shardwright.planning.arrays import Floats
from shardwright.planning.machines.topology import Topology
from shardwright.planning.options.options import Options

AVERAGING = "averaging"
"""Name of the phase of a step."""
EXCHANGES = 3
"""A header; parts to those that add them up; means back."""
PASSES = 7
"""A byte of weights or state is read and written: packed (2), what arrives written and read (2), the mean written as it
comes back (1), unpacked (2)."""
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


def averaged_bytes(options: Options) -> Floats:
    """Weights of a shard, and optimizer state where its kernel has it: ``[S]``, in bytes.

    The state of kernels that show gradients is that of an optimizer of the user's, which keeps it for itself.
    """
    has_state = options.by_request(lambda kernel, _: kernel.fuses_optimizer)
    return options.num_rows * (options.row_bytes + has_state * state_bytes_a_row(options))


def sent_bytes(averaged: Floats, num_groups: int) -> Floats:
    """Bytes that leave a rank in one averaging, on average over the replicas: those of both ways.

    Args:
        averaged: bytes of weights and state on a rank, or of a shard.
        num_groups: replicas, ``R``.
    """
    return 2 * averaged * (num_groups - 1) / num_groups


def averaging_ms(options: Options, topology: Topology) -> Floats:
    """Milliseconds a step that averaging a shard adds to its rank, a K-th of those of one averaging: ``[S]``."""
    replicas = topology.replicas
    if replicas is None or replicas.num_groups == 1:
        return np.zeros(options.num_shards)
    num_groups, links = replicas.num_groups, topology.link_bandwidths
    averaged = averaged_bytes(options)
    # Links inside the host and between hosts work at the same time, each with its part of the other replicas.
    to_one = 2 * averaged / num_groups
    inside = to_one * (replicas.local_replicas - 1) / links["intra_host"]
    across = to_one * (num_groups - replicas.local_replicas) / links["inter_host"]
    memory = PASSES * averaged / topology.read_bandwidth("device")
    # All tables share the exchanges: each has its part of their latency.
    slowest = "intra_host" if replicas.local_replicas == num_groups else "inter_host"
    latency = EXCHANGES * topology.link_latencies_ms[slowest] / len(options.all_tables)
    one = np.maximum(inside, across) + memory + np.where(averaged > 0, latency, 0.0)
    result: Floats = one / replicas.sync_every
    return result
