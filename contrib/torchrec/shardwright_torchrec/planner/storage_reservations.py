"""TorchRec's storage reservations, with the method by which its planner asks them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import shardwright as sw
from shardwright_torchrec.planner.enumerators import search_space

__all__ = [
    "FixedPercentageStorageReservation",
    "HeuristicalStorageReservation",
    "InferenceStorageReservation",
]


class _Reserving(sw.StorageReservation):
    """A reservation that gives the topology that is left."""

    def reserve(
        self,
        topology: sw.Topology,
        batch_size: int,
        module: Any,
        sharders: list[sw.ModuleSharder],
        constraints: Mapping[str, sw.ParameterConstraints] | None = None,
    ) -> sw.Topology:
        """The ranks with the memory that is left for tables.

        Args:
            topology: the ranks.
            batch_size: samples per rank and step.
            module: the model.
            sharders: module sharders.
            constraints: constraints by table name.

        Raises:
            NoPlanError: a rank has less than is kept free.
        """
        space = search_space(
            module,
            sharders,
            topology=topology,
            batch_size=batch_size,
            constraints=constraints,
            storage_reservation=self,
        )
        left = dict(zip(topology.tiers, space.capacity_bytes.T.tolist(), strict=False))
        capacities = {f"{tier}_cap": left[tier] for tier in ("hbm", "ddr") if tier in left}
        return sw.Topology(
            topology.world_size,
            topology.compute_device,
            local_world_size=topology.local_world_size,
            **capacities,
        )


class FixedPercentageStorageReservation(_Reserving, sw.FixedPercentageStorageReservation):
    """A part of each device's memory, from 0 to 1."""


class HeuristicalStorageReservation(_Reserving, sw.HeuristicalStorageReservation):
    """A part of each device's memory, the dense tensors with what training them takes, and the ids in flight."""


class InferenceStorageReservation(_Reserving, sw.InferenceStorageReservation):
    """A part of each device's memory, the dense tensors, and one batch of ids."""
