"""What routing decides when the module is sharded: streams, and the slots of every rank in send order.

A *stream* is the ids of one feature that fall into one row part. Slots are sent in the order (rank, group, block,
feature); each reads one stream.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from attrs import evolve, frozen

from shardwright.planning.layouts import Dataflow, Layout, Routed
from shardwright.planning.plan import ParameterSharding
from shardwright.planning.row_maps import RowMap
from shardwright.runtime.collection import Collection
from shardwright.runtime.groups import Group, GroupBuilder, Slot
from shardwright.runtime.part import PartConfig

if TYPE_CHECKING:
    from shardwright.runtime.return_paths import ReturnPath


@frozen
class Stream:
    """The ids of ``feature`` in row part ``part``; ``row_map`` is ``None`` where rows are not cut."""

    feature: int
    row_map: RowMap | None
    part: int


@frozen(eq=False)
class RoutingPlan:
    """The streams, and the groups of each rank."""

    streams: tuple[Stream, ...]
    groups: tuple[tuple[Group, ...], ...]

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.groups)

    def slots_of(self, rank: int) -> list[Slot]:
        """The slots of ``rank`` in send order."""
        return [slot for group in self.groups[rank] for slot in group.slots]

    @property
    def max_slots(self) -> int:
        """The most slots any rank has."""
        return max(len(self.slots_of(rank)) for rank in range(self.world_size))


WayOf: TypeAlias = Callable[[Collection, Dataflow, Layout], Hashable]
"""How the results of a layout, of whose blocks each has the dataflow, travel."""


def way_home(collection: Collection, dataflow: Dataflow, layout: Layout) -> type[ReturnPath]:
    """The return path of a routed table; tables of one path share its collectives."""
    assert isinstance(dataflow, Routed)  # the engine deals tables to parts by dataflow
    return dataflow.return_path(is_pooled=collection.is_pooled)


def plan_part(config: PartConfig, way_of: WayOf = way_home) -> RoutingPlan:
    """Lay out the routing of a part's tables; see :func:`plan_routing`."""
    return plan_routing(
        config.collection,
        config.members,
        config.shardings,
        world_size=config.env.world_size,
        device_type=config.device.type,
        way_of=way_of,
    )


def plan_routing(
    collection: Collection,
    members: Sequence[int],
    shardings: Mapping[str, ParameterSharding],
    *,
    world_size: int,
    device_type: str,
    way_of: WayOf = way_home,
) -> RoutingPlan:
    """Lay out the routing of some tables of a collection.

    Args:
        collection: all tables.
        members: the indices of those that are routed.
        shardings: how each is sharded, by name.
        world_size: the number of ranks.
        device_type: type of the device that holds the blocks.
        way_of: how a table's results travel; only tables of one way share a kernel group.

    Raises:
        UnsupportedError: a kernel cannot do what the plan asks, with its reason.
    """
    streams: dict[Stream, int] = {}
    builder = GroupBuilder(collection, device_type=device_type, world_size=world_size)
    for index in members:
        sharding = shardings[collection.tables[index].name]
        row_map = sharding.layout.row_map if sharding.layout.maps_rows else None
        stream_of: dict[tuple[int, int], int] = {}
        for output in collection.outputs_of(index):
            feature = collection.outputs[output].feature
            # All parts of a cut feature stand together, in part order.
            for part in range(row_map.num_parts if row_map else 1):
                stream_of[feature, part] = streams.setdefault(Stream(feature, row_map, part), len(streams))
        for dataflow in sharding.layout.dataflows:
            own = evolve(sharding, layout=sharding.layout.served_by([dataflow]))
            builder.add(index, own, stream_of, way_of(collection, dataflow, own.layout))
    return RoutingPlan(tuple(streams), tuple(tuple(groups) for groups in builder.groups()))
