"""TorchRec's storage reservations, with the method by which its planner asks them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import shardwright as sw
from shardwright_torchrec.parallel.constraints import bent
from shardwright_torchrec.planner.enumerators import search_space
from shardwright_torchrec.planner.topologies import Topology
from shardwright_torchrec.planner.types import PlannerErrorType, as_planner_error

__all__ = [
    "FixedPercentageStorageReservation",
    "HeuristicalStorageReservation",
    "InferenceStorageReservation",
]


# More than tables and batches need, and less than sums of it overflow.
_ANY_BYTES = 1 << 50


class _Reserving(sw.StorageReservation):
    """A reservation that gives the topology that is left."""

    def reserve(
        self,
        topology: sw.Topology,
        batch_size: int,
        module: Any,
        sharders: list[sw.ModuleSharder],
        constraints: Mapping[str, sw.ParameterConstraints] | None = None,
    ) -> Topology:
        """The ranks with the memory that is left for tables.

        Args:
            topology: the ranks.
            batch_size: samples per rank and step.
            module: the model.
            sharders: module sharders.
            constraints: constraints by table name.

        Raises:
            PlannerError: a rank has less than is kept free.
        """
        asked = _Asked()
        search_space(
            module,
            sharders,
            topology=_like(topology, hbm_cap=_ANY_BYTES, ddr_cap=_ANY_BYTES),  # tables need not fit yet
            batch_size=batch_size,
            constraints=bent(constraints),
            storage_reservation=asked,
        )
        own = self.with_dense(asked.dense) if asked.dense is not None else self
        with as_planner_error(lambda: PlannerErrorType.INSUFFICIENT_STORAGE):
            capacity = own.capacity_bytes(topology, asked.ids_per_batch)
        left = dict(zip(topology.tiers, capacity.T.tolist(), strict=False))
        return _like(topology, **{f"{tier}_cap": left[tier] for tier in ("hbm", "ddr") if tier in left})


def _like(topology: sw.Topology, **capacities: Any) -> Topology:
    """Ranks as those of a topology, with other memory."""
    size, device = topology.world_size, topology.compute_device
    return Topology(size, device, local_world_size=topology.local_world_size, **capacities)


class _Asked(sw.StorageReservation):
    """A reservation of nothing, which keeps what a planner says of the model."""

    name: ClassVar[str] = "asked"
    dense: Any = None
    ids_per_batch: float = 0.0

    def with_dense(self, dense: Any) -> _Asked:
        """The same, which knows the dense tensors."""
        self.dense = dense
        return self

    def reserved_bytes(self, capacity_bytes: Any, ids_per_batch: float) -> Any:
        """Nothing on each rank."""
        self.ids_per_batch = ids_per_batch
        return capacity_bytes * 0

    def to_data(self) -> float:
        """Nothing, as a part of the memory."""
        return 0.0


class FixedPercentageStorageReservation(_Reserving, sw.FixedPercentageStorageReservation):
    """A part of each device's memory, from 0 to 1."""


class HeuristicalStorageReservation(_Reserving, sw.HeuristicalStorageReservation):
    """A part of each device's memory, the dense tensors with what training them takes, and the ids in flight."""


class InferenceStorageReservation(_Reserving, sw.InferenceStorageReservation):
    """A part of each device's memory, the dense tensors, and one batch of ids."""
