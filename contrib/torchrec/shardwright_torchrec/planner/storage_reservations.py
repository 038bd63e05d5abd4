"""TorchRec's storage reservations (1.8, `torchrec/distributed/planner/storage_reservations.py`)."""

from __future__ import annotations

import shardwright as sw

ID_COPIES = 20
"""Two batches in flight, each with ten copies on its way through a training step."""


class FixedPercentageStorageReservation(sw.StorageReservation):
    """A part of each device's memory, from 0 to 1."""

    def __init__(self, percentage: float) -> None:
        super().__init__(percentage)


class HeuristicalStorageReservation(sw.StorageReservation):
    """A part of each device's memory, the dense tensors with what training them takes, and the ids in flight.

    Args:
        percentage: the part, from 0 to 1.
        parameter_multiplier: bytes of training state for a byte of dense parameters, itself included.
        dense_tensor_estimate: bytes of all that, instead of what the model has times the multiplier.
    """

    def __init__(
        self,
        percentage: float,
        parameter_multiplier: float = 6.0,
        dense_tensor_estimate: int | None = None,
    ) -> None:
        of_model = parameter_multiplier if dense_tensor_estimate is None else 0.0
        super().__init__(percentage, dense_tensor_estimate or 0, of_model, ID_COPIES)


class InferenceStorageReservation(sw.StorageReservation):
    """A part of each device's memory, the dense tensors, and one batch of ids.

    Args:
        percentage: the part, from 0 to 1.
        dense_tensor_estimate: bytes of the dense tensors, instead of what the model has.
    """

    def __init__(self, percentage: float, dense_tensor_estimate: int | None = None) -> None:
        super().__init__(percentage, dense_tensor_estimate or 0, float(dense_tensor_estimate is None), 1)
