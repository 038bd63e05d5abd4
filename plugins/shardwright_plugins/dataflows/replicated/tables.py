"""The executor of replicated tables: each rank looks up in its own replica, and all ranks make the same updates."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np
import torch
from attrs import evolve
from torch import Tensor

from shardwright.contracts.lookup import Bags
from shardwright.errors import UnsupportedError
from shardwright.planning.arrays import Ints
from shardwright.planning.layouts.layout import Dataflow
from shardwright.planning.plan.sharding import ParameterSharding
from shardwright.planning.text import count_text
from shardwright.runtime.ranks.devices import is_host, sent_to
from shardwright.runtime.routed.codecs import codecs_of_tables
from shardwright.runtime.routed.plan import RoutingPlan, SlotColumns, plan_routing
from shardwright.runtime.routed.return_path import Answers
from shardwright.runtime.routed.routing import (
    Bucketed,
    added_at_home,
    own_slots,
    route_all,
    routers_of,
    runs_of_groups,
)
from shardwright.runtime.routed.section import SectionStep
from shardwright.runtime.routed.sections import sections_of
from shardwright.runtime.step.backward.kept_gradients import keeping_gradients
from shardwright.runtime.step.backward.weight_gradients import weight_gradients
from shardwright.runtime.step.collection import FeatureBatch
from shardwright.runtime.step.executor import Executor, ExecutorConfig, ExecutorStep, PeerHeaders
from shardwright.runtime.step.kernel_groups import KernelGroup
from shardwright.runtime.step.segments import total
from shardwright.sparse import WEIGHTS
from shardwright_plugins.dataflows.replicated import forms
from shardwright_plugins.dataflows.replicated.exchange import Gathering, Summing
from shardwright_plugins.dataflows.replicated.forms import CopiedBatch, UpdateForm
from shardwright_plugins.dataflows.replicated.sizes import Copies, LookedUp

_MOST_KNOWN = 64  # steps of the same sizes, whose forms are kept


def _own_path(sharding: ParameterSharding, dataflow: Dataflow) -> tuple[Hashable, bool]:
    """The path of results that stay on their rank.

    Replicas with the same number of rows share a group: they mostly take the same form, and one update is quicker.
    """
    return sharding.layout.blocks[0].num_rows, False


class ReplicatedTables(Executor):
    """All tables of a module of which every rank has a replica, or a replica of some of the rows."""

    def __init__(self, config: ExecutorConfig) -> None:
        self.env, self.device, self.is_pooled = config.env, config.device, config.collection.is_pooled
        plan = plan_routing(
            config.collection,
            config.members,
            config.shardings,
            rank=config.env.rank,
            world_size=config.env.world_size,
            device_type=config.device.type,
            path_of=_own_path,
            codecs={index: (None, own[1]) for index, own in codecs_of_tables(config).items()},
        )
        self.plan = alone(plan)
        self.groups = self.plan.groups
        _check_columns(self.groups)
        self.lookups = keeping_gradients(config.lookups(self.groups), self.groups)
        self.routers = routers_of(self.plan)
        self.bucketings = [router.bucketing for router in self.routers]
        self.runs = runs_of_groups(self.groups, own_slots(self.routers, 0))
        self.sections = sections_of(self.plan, range(len(self.plan.kinds)))
        self.brings = [columns for section in self.sections for columns in section.brings]
        self.copies = [Copies(*pair) for pair in zip(self.groups, self.lookups, strict=True)]
        self.header_size = int(self.plan.slots.per_rank[0])
        self._known: dict[tuple[int, bytes], type[UpdateForm]] = {}

    def route(self, batch: FeatureBatch | None) -> ExecutorStep:  # noqa: D102 - described in the base class
        return ReplicatedStep(self, batch)

    def anatomy(self) -> Mapping[str, list[str]]:  # noqa: D102
        tables = len({spec.table.name for group in self.groups for spec in group.blocks})
        width = sum(columns.width for columns in self.brings)
        return {
            "input": [f"{count_text(tables, 'table')} on every rank: ids stay"],
            "output": [f"{count_text(width, 'column')} from every rank's own copy"],
        }

    def form_of(self, index: int, batch: CopiedBatch) -> UpdateForm:
        """Choose for a group's batch the form that takes least by its bytes, alike on every rank."""
        sizes = batch.looked_up
        key = index, sizes.num_ids.tobytes() + sizes.num_bags.tobytes()
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= _MOST_KNOWN:  # bags of any length are of new sizes in every batch
                self._known.clear()
            known = min(self._possible_forms(index), key=lambda form: form.effort * form(batch).bytes_moved)
            self._known[key] = known
        return known(batch)

    def _possible_forms(self, index: int) -> list[type[forms.UpdateForm]]:
        """The forms by which the copies of a group stay equal bit for bit."""
        group = self.groups[index]
        is_repeatable = group.kernel.gives_equal_bits(group.blocks[0].request)
        possible = [form for form in forms.FORMS if is_repeatable or not form.adds_up_on_each_rank]
        return possible or list(forms.FORMS)


def alone(plan: RoutingPlan) -> RoutingPlan:
    """The plan of a world whose only rank has this rank's slots: replicas ask no other rank."""
    own = slice(*plan.slots.first[plan.rank : plan.rank + 2])
    count = plan.slots.per_rank[plan.rank]
    slots = SlotColumns(np.array([0, count]), plan.slots.part[own], plan.slots.piece[own])
    return evolve(plan, rank=0, slots=slots)


def _check_columns(groups: Sequence[KernelGroup]) -> None:
    """Check that no kernel asks for columns beside ids: ids of other ranks, by which replicas are updated, bring none.

    Raises:
        UnsupportedError: one does.
    """
    for group in groups:
        for spec in group.blocks:
            if columns := group.kernel.columns(spec.request):
                raise UnsupportedError(
                    f"table {spec.table.describe()}: compute kernel {group.kernel_name!r} asks for the columns "
                    f"{', '.join(columns)}, which reach no table that every rank has a copy of: take another sharding "
                    "type",
                    subject=spec.table.path,
                    asked="columns",
                )


def on_device(routed: Bucketed, device: torch.device) -> Bucketed:
    """The sorted ids on a device; themselves where they are there."""
    if routed.ids.device == device:
        return routed
    lengths, places = (
        None if tensor is None else sent_to(device, tensor) for tensor in (routed.lengths, routed.places)
    )
    columns = {name: sent_to(device, column) for name, column in routed.columns.items()}
    return evolve(routed, ids=sent_to(device, routed.ids), lengths=lengths, columns=columns, places=places)


class ReplicatedStep(ExecutorStep):
    """One batch on its way through replicated tables."""

    def __init__(self, tables: ReplicatedTables, batch: FeatureBatch | None) -> None:
        self._tables = tables
        self._own: list[Bucketed] = []
        self._places: list[Tensor] = []
        if batch is not None:
            filled_up = batch if batch.sizes is None else evolve(batch, sizes=None)
            # Nothing travels, so the bags of features with batch sizes of their own are filled up here.
            self._own, self._places = route_all(tables.routers, filled_up)
            self._feature_ids = batch.num_ids

    def headers(self) -> Ints:  # noqa: D102 - described in the base class
        if not self._own:
            return np.zeros(self._tables.header_size, dtype=np.int64)  # the same to all ranks
        return np.concatenate([own.num_ids for own in self._own])

    def send(self, peers: PeerHeaders) -> None:  # noqa: D102
        num_ids = num_bags = peers.fields
        if self._tables.is_pooled:
            num_bags = num_ids * 0 + peers.batch_sizes[:, None]
        self._own = [on_device(own, self._tables.device) for own in self._own]
        self._looked_up = LookedUp(num_ids, num_bags)

    def receive(self) -> Sequence[Tensor]:  # noqa: D102
        if is_host(self._tables.device):
            return ()  # they belong to no stream
        return [tensor for own in self._own for tensor in own.tensors]

    def lookup(self, *, training: bool, trains_weights: bool = False) -> None:  # noqa: D102
        tables, self._training, self._trains_weights = self._tables, training, trains_weights
        self._bags, results = list[Bags](), list[Tensor]()
        for lookup, (router, slots) in zip(tables.lookups, tables.runs, strict=True):
            bags = _bags_of(self._own[router], slots)
            # They may be the caller's memory, filled with the next batch before they are read again.
            self._bags.append(_copied(bags) if training or trains_weights else bags)
            results.append(lookup.forward(bags, training=False)[0].reshape(-1))
        answers = Answers(
            results=results,
            batch_sizes=np.array([self._own[0].batch_size]),
            asked=dict(zip(tables.bucketings, self._own, strict=True)),
            answered=dict(zip(tables.bucketings, [own.num_bags[None] for own in self._own], strict=True)),
            num_ids=self._feature_ids,
            device=tables.device,
            are_full=True,
        )
        self._steps: list[SectionStep] = [section.begin(answers) for section in tables.sections]
        del self._own

    def outputs(self) -> list[Tensor]:  # noqa: D102
        found = list[Tensor]()
        for step in self._steps:
            found += step.outputs(step.results())
        return found

    def send_gradients(self, gradients: Sequence[Tensor], scale: float) -> None:  # noqa: D102
        tables = self._tables
        own: dict[int, Tensor] = {}
        for section, step in zip(tables.sections, self._steps, strict=True):
            own |= zip(section.groups, step.by_group(step.gradients(gradients)), strict=True)
        by_group = sorted(own.items())
        if self._trains_weights:
            self._weight_gradients = [self._of_weights(*each) for each in by_group]
        if self._training:
            self._forms = [self._form_of(*each, scale) for each in by_group]
            self._gathering = Gathering(tables.env.communicator, self._forms, tables.device)
            self._summing = Summing(tables.env.communicator, self._forms, tables.device)

    def _of_weights(self, index: int, gradient: Tensor) -> Tensor:
        """The gradients of the weights of a group's ids: ``[N]``."""
        tables = self._tables
        kernel, lookup = tables.groups[index].kernel, tables.lookups[index]
        return weight_gradients(kernel, lookup, self._bags[index], gradient)

    def send_weight_gradients(self) -> None:
        """Weights are on the rank of the replica that looked up, as their ids are."""

    def weight_gradients(self, num_ids: int) -> Tensor:  # noqa: D102
        tables = self._tables
        parts: list[list[Tensor]] = [[] for _ in tables.routers]
        for (router, _), gradient in zip(tables.runs, self._weight_gradients, strict=True):
            parts[router].append(gradient)
        return added_at_home([torch.cat(own) for own in parts], self._places, num_ids, tables.device)

    def _form_of(self, index: int, gradient: Tensor, scale: float) -> UpdateForm:
        """The form of a group in this step."""
        group, copies = self._tables.groups[index], self._tables.copies[index]
        slots = slice(group.slots.start, group.slots.stop)
        looked_up = LookedUp(self._looked_up.num_ids[:, slots], self._looked_up.num_bags[:, slots])
        batch = CopiedBatch(copies, self._tables.env.rank, looked_up, self._bags[index], gradient, scale)
        return self._tables.form_of(index, batch)

    def update(self) -> list[Tensor | None]:  # noqa: D102
        self._gathering.finish()
        self._summing.finish()
        updated = list[Tensor | None]()
        for form in self._forms:
            updated += form.update()
        self._summing.release()
        del self._forms, self._gathering, self._summing
        return updated


def _bags_of(own: Bucketed, slots: slice) -> Bags:
    """The bags of a run of slots, as those of one source, with weights and no further column."""
    counts, weights = own.num_bags[None, slots], own.columns.get(WEIGHTS)
    if counts.size == own.num_bags.size:
        return Bags(own.ids, own.lengths, weights, counts)
    ids, bags = _span(own.num_ids, slots), _span(own.num_bags, slots)
    lengths = None if own.lengths is None else own.lengths[bags]
    return Bags(own.ids[ids], lengths, None if weights is None else weights[ids], counts)


def _copied(bags: Bags) -> Bags:
    """The same bags in memory of their own."""
    lengths, weights = bags.lengths, bags.weights
    lengths = None if lengths is None else lengths.clone()
    return Bags(bags.ids.clone(), lengths, None if weights is None else weights.clone(), bags.table)


def _span(sizes: Ints, slots: slice) -> slice:
    """The elements of a run of slots."""
    start = int(total(sizes[: slots.start]))
    return slice(start, start + int(total(sizes[slots])))
