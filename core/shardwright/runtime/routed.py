"""Routed tables: ids travel to the ranks that own their rows, results come home by the dataflow's return path."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

from attrs import frozen
from torch import Tensor

from shardwright.planning.layouts import Dataflow, Layout
from shardwright.runtime.collection import Collection, FeatureBatch
from shardwright.runtime.environment import ShardingEnv
from shardwright.runtime.groups import Arrival, Group, Slot, build_lookups
from shardwright.runtime.part import GradientOf, Part, PartConfig, PartStep, Peer
from shardwright.runtime.payload import PayloadFormat
from shardwright.runtime.return_paths import MAX_KNOWN, Counts, ReturnPath, Trip, TripStep
from shardwright.runtime.routing import Routed, Router
from shardwright.runtime.routing_plan import plan_part, way_home
from shardwright.runtime.wire import OutputCodecs


@frozen(eq=False)
class _Flow:
    """The groups of one way home, and their place among each rank's groups."""

    spans: Sequence[tuple[int, int]]
    path: ReturnPath


class RoutedTables(Part):
    """All routed tables of a module, whatever their sharding types: one payload, one way home a dataflow."""

    def __init__(self, config: PartConfig) -> None:
        self.env, self.device, self.is_pooled = config.env, config.device, config.collection.is_pooled
        self.plan = plan_part(config, partial(_way_among, config.env))
        self.groups = self.plan.groups[config.env.rank]
        self.lookups = build_lookups(self.groups, config.device)
        self.router = Router(self.plan)
        self.format = PayloadFormat(
            self.plan,
            rank=config.env.rank,
            is_weighted=config.is_weighted,
            is_pooled=self.is_pooled,
            device=config.device,
        )
        self.header_size = self.format.header_size
        self.flows = self._make_flows(OutputCodecs.of(config))
        self.arrivals = [arrival for flow in self.flows for arrival in flow.path.arrivals]
        self._own_counts: dict[int, Sequence[Counts]] = {}

    def _make_flows(self, codecs: OutputCodecs) -> list[_Flow]:
        ways: list[Any] = list(dict.fromkeys(group.way for groups in self.plan.groups for group in groups))
        flows = []
        for way in ways:
            spans = [_span(groups, way) for groups in self.plan.groups]
            own = [groups[start:stop] for groups, (start, stop) in zip(self.plan.groups, spans, strict=True)]
            flows.append(_Flow(spans, way(own, self.env, codecs)))
        return flows

    def by_flow(self, bags_of: Callable[[Slot], int]) -> Sequence[Counts]:
        """For each flow, rank and group, the bags of each slot that this rank asks for."""
        return [
            tuple(
                tuple(tuple(bags_of(slot) for slot in group.slots) for group in groups[start:stop])
                for groups, (start, stop) in zip(self.plan.groups, flow.spans, strict=True)
            )
            for flow in self.flows
        ]

    def own_counts(self, batch_size: int) -> Sequence[Counts]:
        """The same for pooled batches of one size, of which there are few."""
        if batch_size not in self._own_counts:
            if len(self._own_counts) >= MAX_KNOWN:
                self._own_counts.clear()
            self._own_counts[batch_size] = self.by_flow(lambda slot: batch_size)
        return self._own_counts[batch_size]

    def route(self, batch: FeatureBatch | None) -> PartStep:  # noqa: D102 - described in the base class
        return RoutedStep(self, None if batch is None else self.router.route(batch))

    def anatomy(self) -> Mapping[str, list[str]]:  # noqa: D102
        return {
            "input": [f"rank {rank}: {self._reads(rank)}" for rank in range(self.plan.world_size)],
            "output": [f"columns from {flow.path.summary()}" for flow in self.flows],
        }

    def _reads(self, rank: int) -> str:
        slots = self.plan.slots_of(rank)
        features = {self.plan.streams[slot.stream].feature for slot in slots}
        return f"{len(slots)} slots of {len(features)} features"


def _way_among(env: ShardingEnv, collection: Collection, dataflow: Dataflow, layout: Layout) -> Hashable:
    """The way home of a layout's blocks among these ranks."""
    way: object = way_home(collection, dataflow, layout)
    # Whatever makes a path may be a way, a class or an object that is called.
    return way.among(env) if isinstance(way, type) and issubclass(way, ReturnPath) else way


def _span(groups: Sequence[Group], way: object) -> tuple[int, int]:
    """Where the groups of a way home stand among a rank's; they stand together."""
    places = [index for index, group in enumerate(groups) if group.way == way]
    return (places[0], places[-1] + 1) if places else (0, 0)


class RoutedStep(PartStep):
    """One batch on its way through routed tables."""

    def __init__(self, tables: RoutedTables, routed: Routed | None) -> None:
        self._tables, self._routed = tables, routed
        self._saved: list[Any] = []
        self._trips: list[TripStep] = []

    def headers(self) -> Sequence[Sequence[int]]:  # noqa: D102 - described in the base class
        if self._routed is None:
            return [[0] * self._tables.header_size] * self._tables.env.world_size
        return self._tables.format.headers(self._routed)

    def send(self, peers: Sequence[Peer]) -> None:  # noqa: D102
        assert self._routed is not None  # the engine raised what is wrong with the batch
        self._peers = peers
        sent, send_splits = self._tables.format.pack(self._routed)
        splits = self._tables.format.receive_splits(peers)
        self._payload = sent.new_empty(sum(splits))
        self._work = self._tables.env.communicator.all_to_all(
            self._payload, sent, splits, send_splits, label="ids"
        )
        self._own = self._own_counts(self._routed)
        self._places = self._routed.positions
        self._routed = None

    def _own_counts(self, routed: Routed) -> Sequence[Counts]:
        """For each flow, rank and group, the bags of each slot that this rank asks for."""
        if self._tables.is_pooled:
            return self._tables.own_counts(routed.batch_size)
        return self._tables.by_flow(lambda slot: routed.ids[slot.stream].numel())

    def place_of(self, arrival: Arrival) -> Tensor | None:  # noqa: D102
        return self._places[arrival.stream]

    def receive(self) -> Sequence[Tensor]:  # noqa: D102
        self._work.wait()
        del self._work
        return [self._payload, *(places for places in self._places if places is not None)]

    def lookup(self, *, training: bool) -> None:  # noqa: D102
        bags = self._tables.format.unpack(self._payload, self._peers)
        results = []
        for lookup, own in zip(self._tables.lookups, bags, strict=True):
            result, saved = lookup.forward(own, training=training)
            results.append(result.reshape(-1))
            self._saved.append(saved)
        rank = self._tables.env.rank
        for flow, own_counts in zip(self._tables.flows, self._own, strict=True):
            start, stop = flow.spans[rank]
            trip = Trip(
                batch_sizes=[peer.batch_size for peer in self._peers],
                results=results[start:stop],
                counts=tuple(zip(*(group.counts for group in bags[start:stop]), strict=True))
                or ((),) * len(self._peers),
                own=own_counts,
                device=self._tables.device,
            )
            self._trips.append(flow.path.start(trip))
        for started in self._trips:
            started.proceed()
        del self._payload

    def views(self) -> list[Tensor]:  # noqa: D102
        return [view for trip in self._trips for view in trip.views()]

    def send_gradients(self, gradient_of: GradientOf) -> None:  # noqa: D102
        for trip in self._trips:
            trip.send_gradients(gradient_of)

    def update(self) -> list[Tensor | None]:  # noqa: D102
        received: dict[int, Tensor] = {}
        for flow, trip in zip(self._tables.flows, self._trips, strict=True):
            first, _ = flow.spans[
                self._tables.env.rank
            ]  # flows need not stand in the order of this rank's groups
            received.update(enumerate(trip.gradients(), first))
        gradients: list[Tensor | None] = []
        for index, (lookup, saved) in enumerate(zip(self._tables.lookups, self._saved, strict=True)):
            gradients += lookup.backward(saved, received[index])
        return gradients
