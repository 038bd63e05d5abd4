"""Routed tables: ids travel to the ranks that own their rows; results come home by the dataflow's return path."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwright.contracts.lookup import Bags
from shardwright.errors import UnsupportedError
from shardwright.planning.arrays import Ints
from shardwright.planning.layouts.layout import Dataflow, Routed
from shardwright.planning.plan.sharding import ParameterSharding
from shardwright.runtime.ranks.devices import is_host, sent_to
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.routed.codecs import codecs_of_tables
from shardwright.runtime.routed.direct import DirectReturn
from shardwright.runtime.routed.payload import PayloadFormat
from shardwright.runtime.routed.plan import PathOf, plan_routing
from shardwright.runtime.routed.ragged import taking_ragged
from shardwright.runtime.routed.return_path import Answers, PathSlots, ReturnPath, ReturnStep
from shardwright.runtime.routed.routing import Bucketed, added_at_home, route_all, routers_of
from shardwright.runtime.step.backward.kept_gradients import keeping_gradients, prefetches
from shardwright.runtime.step.backward.weight_gradients import weight_gradients
from shardwright.runtime.step.collection import FeatureBatch
from shardwright.runtime.step.executor import Executor, ExecutorConfig, ExecutorStep, PeerHeaders
from shardwright.runtime.step.segments import Dealing, Interleaving


def return_path_of(dataflow: Routed, *, is_pooled: bool) -> Callable[..., ReturnPath]:
    """The return path of a dataflow, as a class or another callable that makes one; by default the direct one.

    Args:
        dataflow: dataflow of some blocks of a layout.
        is_pooled: there is one result per bag, else one per id.
    """
    return dataflow.return_path(is_pooled=is_pooled) or DirectReturn


def _path_among(env: ShardingEnv, *, is_pooled: bool) -> PathOf:
    """The return paths of dataflows among some ranks."""

    def path_of(sharding: ParameterSharding, dataflow: Dataflow) -> tuple[Hashable, bool]:
        assert isinstance(dataflow, Routed)  # the engine deals tables to executors by dataflow
        path: Any = return_path_of(dataflow, is_pooled=is_pooled)
        # Whatever makes a path may be one, a class or an object that is called.
        if isinstance(path, type) and issubclass(path, ReturnPath):
            path = path.among(env)
        return path, not getattr(path, "keeps_empty_bags", False)

    return path_of


class RoutedTables(Executor):
    """All routed tables of a module, of any sharding types: one message of ids, one return path for each dataflow."""

    def __init__(self, config: ExecutorConfig) -> None:
        self.env, self.device, self.is_on_host = config.env, config.device, is_host(config.device)
        is_pooled = config.collection.is_pooled
        self.plan = plan_routing(
            config.collection,
            config.members,
            config.shardings,
            rank=config.env.rank,
            world_size=config.env.world_size,
            device_type=config.device.type,
            path_of=_path_among(config.env, is_pooled=is_pooled),
            codecs=codecs_of_tables(config),
        )
        self.groups = self.plan.groups
        self.lookups = keeping_gradients(config.lookups(self.groups), self.groups)
        self.taking = [taking_ragged(*pair) for pair in zip(self.lookups, self.groups, strict=True)]
        self.routers = routers_of(self.plan)
        self.format = PayloadFormat(
            self.routers,
            self.groups,
            rank=config.env.rank,
            columns=config.columns,
            is_pooled=is_pooled,
        )
        self.bucketings = [router.bucketing for router in self.routers]
        self.header_size = self.format.header_size
        self.slots, self.paths = self._paths()
        self.brings = [columns for path in self.paths for columns in path.brings]
        self._make_rooms()

    def _paths(self) -> tuple[list[PathSlots], list[ReturnPath]]:
        kinds: dict[Any, list[int]] = {}
        for index, kind in enumerate(self.plan.kinds):
            kinds.setdefault(kind.path, []).append(index)
        slots = [PathSlots.of_kinds(self.plan, own) for own in kinds.values()]
        return slots, [path(self.plan, own, self.env) for path, own in zip(kinds, slots, strict=True)]

    def _make_rooms(self) -> None:
        """Have results made where they are sent from, where they are sent as they are."""
        for slots, path in zip(self.slots, self.paths, strict=True):
            room = path.room(self.device)
            if room is not None:
                for group in slots.groups:
                    self.lookups[group].room = room

    def route(self, batch: FeatureBatch | None) -> ExecutorStep:  # noqa: D102 - described in the base class
        return RoutedStep(self, batch)

    def anatomy(self) -> Mapping[str, list[str]]:  # noqa: D102
        counts = zip(self.plan.slots.per_rank.tolist(), self._num_features().tolist(), strict=True)
        reads = [
            f"rank {rank}: {slots} slots of {features} features"
            for rank, (slots, features) in enumerate(counts)
        ]
        return {"input": reads, "output": [f"columns from {path.summary()}" for path in self.paths]}

    def _num_features(self) -> Ints:
        """Number of distinct features that each rank looks up: ``[W]``."""
        features = np.array([reading.feature for reading in self.plan.readings], dtype=np.int64)
        slots, num_features = self.plan.slots, len(self.plan.collection.features)
        ranks = np.repeat(np.arange(slots.world_size), slots.per_rank)
        pairs = np.unique(ranks * num_features + features[self.plan.pieces.reading[slots.piece]])
        return np.bincount(pairs // num_features, minlength=slots.world_size)


class RoutedStep(ExecutorStep):
    """One batch on its way through routed tables."""

    def __init__(self, tables: RoutedTables, batch: FeatureBatch | None) -> None:
        self._tables = tables
        self._asked: list[Bucketed] = []
        self._places: list[Tensor] = []
        if batch is not None:
            self._asked, self._places = route_all(tables.routers, batch)
            self._num_ids, self._has_one_size = batch.num_ids, batch.sizes is None
        self._bags: list[Bags] | None = None
        self._received: dict[int, tuple[Tensor, float]] | None = None

    def headers(self) -> Ints:  # noqa: D102 - described in the base class
        self._fields = self._tables.format.headers(self._asked)
        return self._fields

    def send(self, peers: PeerHeaders) -> None:  # noqa: D102
        tables = self._tables
        self._incoming = tables.format.incoming(peers)
        sent, send_splits = tables.format.pack(self._asked, self._fields)
        if not tables.is_on_host:
            # A batch in the host's memory was routed there: this copy is the only one of its ids.
            sent = sent_to(tables.device, sent)
            self._asked = [own.with_places_on(tables.device) for own in self._asked]
        splits = self._incoming.splits
        self._payload = sent.new_empty(sum(splits))
        self._work = tables.env.communicator.all_to_all(self._payload, sent, splits, send_splits, label="ids")

    def receive(self) -> Sequence[Tensor]:  # noqa: D102
        self._work.wait()
        del self._work
        if self._tables.is_on_host:
            return ()  # they belong to no stream
        return [self._payload, *(tensor for own in self._asked for tensor in own.tensors)]

    def _arrived(self) -> list[Bags]:
        """The bags of each group, read from the messages the first time."""
        if self._bags is None:
            self._bags = self._tables.format.unpack(self._payload, self._incoming)
        return self._bags

    def prefetch(self) -> Sequence[Tensor]:  # noqa: D102
        tables, bags = self._tables, self._arrived()
        for lookup, taking, own in zip(tables.lookups, tables.taking, bags, strict=True):
            if prefetches(lookup):
                taking.prefetch(own)
        return [tensor for own in bags for tensor in own.tensors]

    def lookup(self, *, training: bool, trains_weights: bool = False) -> None:  # noqa: D102
        tables, bags, incoming = self._tables, self._arrived(), self._incoming
        if trains_weights:  # weighted bags, values that leave and that arrive
            self._back = bags, *tables.format.sizes_back(self._asked, incoming)
        results, self._saved = list[Tensor](), list[Any]()
        for taking, own in zip(tables.taking, bags, strict=True):
            result, saved = taking.forward(own, training=training)
            results.append(result.reshape(-1))
            self._saved.append(saved)
        answers = Answers(
            results=results,
            batch_sizes=incoming.batch_sizes,
            asked=dict(zip(tables.bucketings, self._asked, strict=True)),
            answered=dict(zip(tables.bucketings, incoming.num_bags, strict=True)),
            num_ids=self._num_ids,
            device=tables.device,
            are_full=self._has_one_size and incoming.are_full,
        )
        del self._payload, self._bags, self._asked, self._incoming
        self._steps: list[ReturnStep] = [path.start(answers) for path in tables.paths]
        for step in self._steps:
            step.proceed()
        if training:  # while results travel
            for taking, saved in zip(tables.taking, self._saved, strict=True):
                taking.anticipate(saved)

    def outputs(self) -> list[Tensor]:  # noqa: D102
        found = list[Tensor]()
        for step in self._steps:
            found += step.outputs()
        return found

    def send_gradients(self, gradients: Sequence[Tensor], scale: float) -> None:  # noqa: D102
        self._scale = scale
        for step in self._steps:
            step.send_gradients(gradients, scale)

    def _gradients(self) -> dict[int, tuple[Tensor, float]]:
        """Each group's gradient, and the factor that it still lacks; waited for the first time."""
        if self._received is None:
            self._received = {
                group: (own, step.scale_left)
                for step in self._steps
                for group, own in step.gradients().items()
            }
        return self._received

    def send_weight_gradients(self) -> None:  # noqa: D102
        tables, (bags, leaving, arriving) = self._tables, self._back
        received = self._gradients()  # a collective of all ranks, also of those without a block
        found = []
        for number, (group, lookup) in enumerate(zip(tables.groups, tables.lookups, strict=True)):
            gradient, scale_left = received[number]
            # A kernel that takes no ragged bags looked up others than those that arrived.
            saved = self._saved[number] if lookup is tables.taking[number] else None
            own = weight_gradients(group.kernel, lookup, bags[number], gradient, saved)
            # Weights belong to one rank's batch: their gradients are averaged with other dense parameters' later.
            found.append(own.mul_(scale_left / self._scale))
        sent = torch.empty(0, dtype=torch.float32, device=tables.device)
        if found:
            sent = Interleaving(leaving).of(found)
        splits = arriving.sum(0).tolist()
        self._weights = sent.new_empty(sum(splits))
        self._work = tables.env.communicator.all_to_all(
            self._weights, sent, splits, leaving.sum(0).tolist(), label="gradients of weights"
        )

    def weight_gradients(self, num_ids: int) -> Tensor:  # noqa: D102
        self._work.wait()
        arrived = Dealing(self._back[2]).of(self._weights)  # in the order of each router's ids
        return added_at_home(arrived, self._places, num_ids, self._tables.device)

    def update(self) -> list[Tensor | None]:  # noqa: D102
        received = self._gradients()
        self._received = None
        updated: list[Tensor | None] = []
        for group, (taking, saved) in enumerate(zip(self._tables.taking, self._saved, strict=True)):
            updated += taking.backward_scaled(saved, *received.pop(group))
        return updated


def executor_of(dataflow: Dataflow) -> type[Executor]:
    """The executor class of all tables of a module with such a dataflow.

    Raises:
        UnsupportedError: it names none and is not routed.
    """
    own = dataflow.executor()
    if own is None and not isinstance(dataflow, Routed):
        raise UnsupportedError(
            f"dataflow {dataflow.name!r}: {type(dataflow).__qualname__}.executor() gave None, which only a class "
            "derived from Routed may; return an Executor"
        )
    return own or RoutedTables
