"""Memory that is kept free on each device for what the plan does not place: dense layers, activations, batches of ids.

What is kept free is the device's own memory, the host's for ranks on a CPU.
"""

from __future__ import annotations

import math
from typing import Annotated, Any

import attrs
import numpy as np
from attrs import frozen

from shardwright.arguments import NonNegativeFloat, NonNegativeInt, Within, as_value, check, typed
from shardwright.errors import InvalidInputError, NoPlanError
from shardwright.planning.arrays import ID_BYTES, Ints
from shardwright.planning.machines.topology import Topology
from shardwright.planning.text import bytes_text


@frozen
class DenseBytes:
    """Bytes of a model's tensors that no sharder shards.

    Args:
        parameters: bytes of parameters.
        buffers: bytes of buffers.
    """

    parameters: int
    buffers: int


@frozen(field_transformer=typed)
class StorageReservation:
    """Device memory kept free on each rank: the sum of a part of it, of bytes, of dense tensors and of ids.

    Args:
        part: part of each device's memory, from 0 to 1.
        fixed_bytes: bytes of each device's memory.
        dense_multiplier: bytes kept free for each byte of the model's dense parameters: 1 to hold them, about 6 to
            train them. If it is above 0, buffers are kept free once.
        id_copies: copies of a batch's ids, 8 bytes each, that a rank has at a time.

    Example:
        >>> import shardwright as sw
        >>> planner = sw.EmbeddingShardingPlanner(storage_reservation=sw.StorageReservation(0.1, dense_multiplier=6))
    """

    part: Annotated[float, Within(ge=0, le=1)] = 0.0
    fixed_bytes: NonNegativeInt = 0
    dense_multiplier: NonNegativeFloat = 0.0
    id_copies: NonNegativeInt = 0

    def with_dense(self, dense: DenseBytes) -> StorageReservation:
        """This reservation for a model with such dense tensors, as bytes."""
        if not self.dense_multiplier:
            return self
        own = round(self.dense_multiplier * dense.parameters) + dense.buffers
        return StorageReservation(self.part, self.fixed_bytes + own, id_copies=self.id_copies)

    def capacity_bytes(self, topology: Topology, ids_per_batch: float) -> Ints:
        """Compute the bytes that may be used of each memory tier on each rank, ``[W, M]``.

        Args:
            topology: the ranks.
            ids_per_batch: ids that a rank feeds to all tables in a step.

        Raises:
            InvalidInputError: the model's dense tensors are to be counted, and there is no model.
            NoPlanError: a rank has less than is to be kept free.
        """
        if self.dense_multiplier:
            raise InvalidInputError(
                f"{self!r} keeps memory free for a model's dense tensors, but tables were given without a model: plan "
                "with plan(module, sharders), or give fixed_bytes instead of dense_multiplier"
            )
        capacity, ranks = topology.capacity_bytes, np.arange(topology.world_size)
        own = np.array([topology.tiers.index(tier) for tier in topology.device_tiers])
        has = capacity[ranks, own]
        ids = math.ceil(ids_per_batch * ID_BYTES) * self.id_copies
        left = np.floor(has * (1 - self.part)).astype(np.int64) - self.fixed_bytes - ids
        short = int(np.argmin(left))
        if left[short] < 0:
            tier, kept = topology.device_tiers[short], bytes_text(int(has[short] - left[short]))
            raise NoPlanError(
                f"no plan: {self!r} keeps {kept} of {tier} free on rank {short}, which has "
                f"{bytes_text(int(has[short]))}. A smaller reservation or batch size, or devices with more memory "
                "would help."
            )
        capacity[ranks, own] = left
        return capacity

    def to_data(self) -> Any:
        """Return the reservation as JSON data; :func:`as_reservation` reads it. A part alone is a number."""
        data = attrs.asdict(self)
        return self.part if data == attrs.asdict(StorageReservation(self.part)) else data


SERVING_RESERVATION = StorageReservation(0.15, dense_multiplier=1, id_copies=1)
"""Reservation of plans for serving that none was given for; the part is that of TorchRec 1.8 in training."""


def as_reservation(value: Any) -> StorageReservation:
    """A reservation as it is, or as JSON data; a number from 0 to below 1 as a part of each device's memory.

    Raises:
        InvalidInputError: it is none of these.
    """
    made = as_value(StorageReservation, value)
    check("storage_reservation", made, StorageReservation | Annotated[float, Within(ge=0, lt=1)])
    return made if isinstance(made, StorageReservation) else StorageReservation(made)
