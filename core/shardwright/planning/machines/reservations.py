"""Memory that is kept free on each device for what the plan does not place: dense layers, activations, batches of ids.

Names and rules are TorchRec's (1.8, ``torchrec/distributed/planner/storage_reservations.py``); what is kept free is the
device's own memory, the host's for ranks on a CPU.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import attrs
import numpy as np
from attrs import field, frozen

from shardwright.arguments import typed
from shardwright.errors import InvalidInputError, NoPlanError, UnknownNameError, nearest
from shardwright.planning.arrays import Ints
from shardwright.planning.assumptions import GIB
from shardwright.planning.machines.topology import Topology
from shardwright.planning.text import bytes_text

ID_BYTES = 8
ID_COPIES = 20
"""Two batches in flight, each with ten copies on its way through a training step (TorchRec's heuristic)."""
PARAMETER_MULTIPLIER = 6.0
"""A dense parameter, about two of optimizer state, about three of DistributedDataParallel (TorchRec's heuristic)."""


@frozen
class DenseBytes:
    """Bytes of a model's tensors that no sharder shards.

    Args:
        parameters: bytes of parameters.
        buffers: bytes of buffers.
    """

    parameters: int
    buffers: int


class StorageReservation(ABC):
    """Device memory kept free on each rank; a frozen value that a plan document can hold.

    The planner calls :meth:`with_dense` once if it has the model, then :meth:`capacity_bytes`.
    """

    name: ClassVar[str]

    def with_dense(self, dense: DenseBytes) -> StorageReservation:
        """This reservation for a model with such dense tensors."""
        return self

    @abstractmethod
    def reserved_bytes(self, capacity_bytes: Ints, ids_per_batch: float) -> Ints:
        """Bytes kept free on each rank ``[W]``.

        Args:
            capacity_bytes: memory of each rank's device, bytes, ``[W]``.
            ids_per_batch: ids that a rank feeds to all tables in a step.
        """

    def capacity_bytes(self, topology: Topology, ids_per_batch: float) -> Ints:
        """Compute the bytes that may be used of each memory tier on each rank, ``[W, M]``.

        Raises:
            NoPlanError: a rank has less than is to be kept free.
        """
        capacity, ranks = topology.capacity_bytes, np.arange(topology.world_size)
        own = np.array([topology.tiers.index(tier) for tier in topology.device_tiers])
        reserved = self.reserved_bytes(capacity[ranks, own], ids_per_batch)
        short = int(np.argmax(reserved - capacity[ranks, own]))
        if reserved[short] > capacity[short, own[short]]:
            kept, has = bytes_text(int(reserved[short])), bytes_text(int(capacity[short, own[short]]))
            tier = topology.device_tiers[short]
            raise NoPlanError(
                f"no plan: {self!r} keeps {kept} of {tier} free on rank {short}, which has {has}. A smaller "
                "reservation or batch size, or devices with more memory would help."
            )
        capacity[ranks, own] -= reserved
        return capacity

    def to_data(self) -> Any:
        """Return the reservation as JSON data; :func:`reservation_from_data` reads it."""
        values: Any = self  # subclasses are attrs classes
        return {"name": self.name, **attrs.asdict(values)}


def _part(instance: Any, attribute: Any, value: Any) -> None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and 0 <= value <= 1):
        raise InvalidInputError(
            f"{attribute.name} is a part of the device's memory, from 0 to 1; got {value!r}"
        )


def _not_negative(instance: Any, attribute: Any, value: Any) -> None:
    if value is not None and not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
        raise InvalidInputError(f"{attribute.name} must be a number, not negative; got {value!r}")


def _percentage(capacity_bytes: Ints, part: float) -> Ints:
    left: Ints = np.floor(capacity_bytes * (1 - part)).astype(np.int64)
    return capacity_bytes - left


@frozen(field_transformer=typed)
class FixedPercentageStorageReservation(StorageReservation):
    """A part of each device's memory, from 0 to 1."""

    name: ClassVar[str] = "fixed_percentage"
    percentage: float = field(validator=_part)

    def reserved_bytes(self, capacity_bytes: Ints, ids_per_batch: float) -> Ints:  # noqa: D102 - described above
        return _percentage(capacity_bytes, self.percentage)

    def to_data(self) -> Any:
        """The part alone."""
        return self.percentage


@frozen(field_transformer=typed)
class FixedAbsoluteStorageReservation(StorageReservation):
    """Reservation of a number of bytes of each device's memory; all of a smaller one."""

    name: ClassVar[str] = "fixed_absolute"
    hbm_reserved_bytes: int = field(validator=_not_negative)

    @classmethod
    def from_gb(cls, hbm_reserved_gb: float) -> FixedAbsoluteStorageReservation:
        """Make a reservation of a number of GiB."""
        return cls(int(hbm_reserved_gb * GIB))

    def reserved_bytes(self, capacity_bytes: Ints, ids_per_batch: float) -> Ints:  # noqa: D102
        return np.minimum(capacity_bytes, self.hbm_reserved_bytes)


@frozen(field_transformer=typed)
class HeuristicalStorageReservation(StorageReservation):
    """A part of each device's memory, the dense tensors with what training them takes, and the ids in flight.

    Args:
        percentage: the part, from 0 to 1.
        parameter_multiplier: bytes of training state for a byte of dense parameters, itself included.
        dense_tensor_estimate: bytes of all that, instead of what the model has times the multiplier.
    """

    name: ClassVar[str] = "heuristical"
    percentage: float = field(validator=_part)
    parameter_multiplier: float = field(default=PARAMETER_MULTIPLIER, validator=_not_negative)
    dense_tensor_estimate: int | None = field(default=None, validator=_not_negative)

    def with_dense(self, dense: DenseBytes) -> StorageReservation:
        """Add the bytes of the model's dense tensors, unless an estimate was given."""
        if self.dense_tensor_estimate is not None:
            return self
        estimate = round(self.parameter_multiplier * dense.parameters) + dense.buffers
        return attrs.evolve(self, dense_tensor_estimate=estimate)

    def reserved_bytes(self, capacity_bytes: Ints, ids_per_batch: float) -> Ints:  # noqa: D102
        dense = _known_dense(self, self.dense_tensor_estimate)
        ids = math.ceil(ids_per_batch * ID_BYTES) * ID_COPIES
        return _percentage(capacity_bytes, self.percentage) + dense + ids


@frozen(field_transformer=typed)
class InferenceStorageReservation(StorageReservation):
    """A part of each device's memory, the dense tensors, and one batch of ids.

    Args:
        percentage: the part, from 0 to 1.
        dense_tensor_estimate: bytes of the dense tensors, instead of what the model has.
    """

    name: ClassVar[str] = "inference"
    percentage: float = field(validator=_part)
    dense_tensor_estimate: int | None = field(default=None, validator=_not_negative)

    def with_dense(self, dense: DenseBytes) -> StorageReservation:
        """Add the bytes of the model's dense tensors, unless an estimate was given."""
        if self.dense_tensor_estimate is not None:
            return self
        return attrs.evolve(self, dense_tensor_estimate=dense.parameters + dense.buffers)

    def reserved_bytes(self, capacity_bytes: Ints, ids_per_batch: float) -> Ints:  # noqa: D102
        dense = _known_dense(self, self.dense_tensor_estimate)
        return _percentage(capacity_bytes, self.percentage) + dense + math.ceil(ids_per_batch * ID_BYTES)


SERVING_RESERVATION = InferenceStorageReservation(0.15)
"""Reservation of plans for serving that none was given for; the part is that of TorchRec 1.8 in training."""


def _known_dense(reservation: StorageReservation, estimate: int | None) -> int:
    if estimate is None:
        raise InvalidInputError(
            f"{reservation!r} keeps memory free for a model's dense tensors, but tables were given without a model: "
            "plan with plan(module, sharders), or give dense_tensor_estimate"
        )
    return estimate


_KINDS: Mapping[str, type[StorageReservation]] = {
    kind.name: kind
    for kind in (
        FixedAbsoluteStorageReservation,
        FixedPercentageStorageReservation,
        HeuristicalStorageReservation,
        InferenceStorageReservation,
    )
}


def as_reservation(value: Any) -> StorageReservation:
    """A reservation as it is; a number from 0 to below 1 as a part of each device's memory.

    Raises:
        InvalidInputError: it is neither.
    """
    if isinstance(value, StorageReservation):
        return value
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise InvalidInputError(
            "storage_reservation is a part of the device's memory, from 0 to below 1, or one of "
            f"{', '.join(kind.__name__ for kind in _KINDS.values())}; got {value!r}"
        )
    return FixedPercentageStorageReservation(value)


def reservation_from_data(data: Any) -> StorageReservation:
    """The reservation that :meth:`StorageReservation.to_data` described.

    Raises:
        UnknownNameError: there is none of that name.
        InvalidInputError: it is of the wrong form.
    """
    if not isinstance(data, Mapping):
        return as_reservation(data)
    name = str(data.get("name"))
    if name not in _KINDS:
        near = nearest(name, _KINDS)
        raise UnknownNameError(f"no storage reservation {name!r}. Known: {', '.join(_KINDS)}.{near}")
    try:
        return _KINDS[name](**{key: value for key, value in data.items() if key != "name"})
    except TypeError as error:
        raise InvalidInputError(
            f"a storage reservation {name!r} cannot be read from {data!r}: {error}"
        ) from error
