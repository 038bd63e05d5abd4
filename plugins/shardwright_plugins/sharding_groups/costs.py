"""Costs of averaging the replicas of shards over sharding groups: bytes, and milliseconds a step.

Each rank adds up one part in ``R`` of its shards for all replicas, and sends the mean back: ``(R - 1) / R`` of the
bytes of weights and optimizer state leave a rank twice, as in a ring's all-reduce (Patarasuk, Yuan 2009). Legend: S
runs of shards, R sharding groups, K steps from one averaging to the next.
"""

from __future__ import annotations

import numpy as np

from shardwright.planning.arrays import Floats
from shardwright.planning.machines.topology import Topology
from shardwright.planning.options.options import Options
from shardwright_plugins.estimators.shard_bytes import state_bytes_a_row

EXCHANGES = 3
"""A header; parts to those that add them up; means back."""
PASSES = 7
"""A byte of weights or state is read and written: packed (2), what arrives written and read (2), the mean written as it
comes back (1), unpacked (2)."""


def averaging_costs(options: Options, topology: Topology) -> tuple[Floats, Floats]:
    """Bytes of each shard that are averaged with its replicas, and the milliseconds a step that this takes: ``[S]``.

    The bytes are those of its weights, and of optimizer state where its kernel has it: the state of kernels that show
    gradients is that of an optimizer of the user's, which keeps it for itself. The milliseconds are those that the
    shard adds to its rank, a K-th of those of one averaging.
    """
    has_state = options.by_request(lambda kernel, _: kernel.fuses_optimizer)
    averaged = options.num_rows * (options.row_bytes + has_state * state_bytes_a_row(options))
    replicas, links = topology.replicas, topology.link_bandwidths
    if replicas is None or replicas.num_groups == 1:
        return averaged, np.zeros(options.num_shards)
    num_groups = replicas.num_groups
    # Links inside the host and between hosts work at the same time, each with its part of the other replicas.
    to_one = 2 * averaged / num_groups
    inside = to_one * (replicas.local_replicas - 1) / links["intra_host"]
    across = to_one * (num_groups - replicas.local_replicas) / links["inter_host"]
    memory = PASSES * averaged / topology.read_bandwidth("device")
    # All tables share the exchanges: each has its part of their latency.
    slowest = "intra_host" if replicas.local_replicas == num_groups else "inter_host"
    latency = EXCHANGES * topology.link_latencies_ms[slowest] / len(options.all_tables)
    one = np.maximum(inside, across) + memory + np.where(averaged > 0, latency, 0.0)
    return averaged, one / replicas.sync_every
