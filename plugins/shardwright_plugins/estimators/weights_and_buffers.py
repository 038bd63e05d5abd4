"""weights_and_buffers: what a shard keeps in memory, and what passes through it in a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from shardwright.contracts.estimator import STORAGE, Estimator
from shardwright.planning.arrays import ID_BYTES, Floats
from shardwright.planning.machines.topology import Topology
from shardwright.planning.options.options import Options
from shardwright.planning.options.search_space import gradient_columns, traffic_bytes
from shardwright_plugins.estimators.shard_bytes import synchronised_bytes


class WeightsAndBuffers(Estimator):
    """Weights and optimizer state as the kernel declares them, and a step's input and output.

    The buffers are one input and one output, as in TorchRec's storage model without a pipeline, an id taken to go to
    each row with equal chance, vectors as they travel. Where a kernel needs the gradients of whole rows for cut
    columns, these take the output's place, as wide as the rows. A copy of a table also holds what it is synchronised
    by, and tables that are updated in the optimizer's step hold the gradients of the rows that a step looks up.
    """

    name: ClassVar[str] = "weights_and_buffers"
    measures: ClassVar[str] = STORAGE
    depends_on_shape_only: ClassVar[bool] = True
    preference: ClassVar[int] = 10

    def estimate(self, options: Options, topology: Topology) -> Mapping[str, Floats]:
        """Bytes of each tier, ``[S]``."""
        # Each distinct (request, rows) is asked about once.
        rows = np.unique(options.num_rows, return_inverse=True)[1]
        asked = rows * len(options.requests) + options.request
        _, first, place = np.unique(asked, return_index=True, return_inverse=True)
        declared = {tier: np.zeros(len(first)) for tier in topology.tiers}
        for index, shard in enumerate(first.tolist()):
            kernel, request = options.requests[int(options.request[shard])]
            memory = options.compute_kernels[kernel].memory_bytes(request, int(options.num_rows[shard]))
            for tier, size in memory.items():
                declared[topology.tier_of(tier, request.device)][index] += float(size)
        used = {tier: sizes[place] for tier, sizes in declared.items()}
        received, sent = traffic_bytes(options, topology)
        sent *= gradient_columns(options) / options.num_columns
        buffers = np.ceil(received) + np.ceil(sent) + np.ceil(synchronised_bytes(options, topology))
        buffers += _kept_bytes(options, topology)
        for device in topology.device_types:
            used[topology.tier_of("device", device)] += np.where(options.on_device(device), buffers, 0.0)
        return used


def _kept_bytes(options: Options, topology: Topology) -> Floats:
    """Compute the bytes of gradients that each shard of a run keeps for the optimizer's step: ``[S]``.

    Of tables with ``update="in_step"`` whose kernel has an optimizer: a number and the 32-bit gradient of each row that
    a batch of every rank looks up, at most as many as there are ids. Batches that are accumulated add their rows.
    """
    table = options.shard_table
    in_step = np.array([spec.update == "in_step" for spec in options.tables], dtype=bool)[table]
    is_given = options.by_request(
        lambda kernel, asked: kernel.fuses_optimizer and asked.optimizer is not None
    )
    # Copies keep the gradients that all ranks have of them, like any other shard.
    ids = options.ids_per_batch[table] * options.id_fraction * topology.world_size
    rows = np.minimum(np.ceil(ids), options.num_rows)
    return np.where(in_step & (is_given > 0), rows * (ID_BYTES + 4 * gradient_columns(options)), 0.0)
