"""Replicated tables: every rank looks up its own batch in its own copy; updates are synchronised, not results.

In the backward pass the ranks exchange what each table needs in the form that moves the fewest bytes; every rank then
makes the same update from the same numbers in the same order, so that copies stay equal, bit for bit:

- *batch*: every rank's ids and output gradients (by their codecs); each rank then makes the whole batch's update;
- *rows*: the rows touched and their gradients;
- *dense*: the gradient of all rows, summed in slices and gathered.

Legend: W ranks, B_w batch size of rank w, S slots of a group, T blocks of a group, R rows of a block, D columns.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from shardwright.contracts.codec import Codec
from shardwright.contracts.comm_backend import Work
from shardwright.planning.layouts import Dataflow, Layout
from shardwright.runtime.buffers import joined
from shardwright.runtime.collection import Collection, FeatureBatch
from shardwright.runtime.copies import Chosen, Share, Sizes
from shardwright.runtime.dense_form import DenseForm, DenseSum
from shardwright.runtime.groups import Arrival, Group, build_lookups
from shardwright.runtime.joint_update import update_jointly
from shardwright.runtime.lookup import Bags, Lookup
from shardwright.runtime.part import GradientOf, Part, PartConfig, PartStep, Peer
from shardwright.runtime.return_paths import MAX_KNOWN, split_slots
from shardwright.runtime.routing import Routed, Router
from shardwright.runtime.routing_plan import plan_part
from shardwright.runtime.update_forms import BatchForm, RowsForm, UpdateForm
from shardwright.runtime.wire import OutputCodecs

FORMS: Sequence[type[UpdateForm]] = (BatchForm, RowsForm, DenseForm)


def _of_one_size(collection: Collection, dataflow: Dataflow, layout: Layout) -> Hashable:
    """Copies of one number of rows share a group: they mostly take one form, and a group's update in one is quicker."""
    return layout.blocks[0].num_rows


class ReplicatedTables(Part):
    """All tables of a module of which every rank has a copy, or a copy of some of the rows."""

    def __init__(self, config: PartConfig) -> None:
        self.env, self.device, self.is_pooled = config.env, config.device, config.collection.is_pooled
        self.plan = plan_part(config, _of_one_size)
        self.groups = self.plan.groups[config.env.rank]
        self.lookups = build_lookups(self.groups, config.device)
        self.router = Router(self.plan)
        self.header_size = len(self.plan.streams)
        self.wanted = [tuple(slot.gradient for slot in group.slots) for group in self.groups]
        self.arrivals = [slot.arrival for group in self.groups for slot in group.slots]
        gradients = OutputCodecs.of(config).gradients
        self.choices = [
            _Choice(group, lookup, _codecs_of(group, gradients))
            for group, lookup in zip(self.groups, self.lookups, strict=True)
        ]

    def route(self, batch: FeatureBatch | None) -> PartStep:  # noqa: D102 - described in the base class
        return ReplicatedStep(self, None if batch is None else self.router.route(batch))

    def anatomy(self) -> Mapping[str, list[str]]:  # noqa: D102
        tables = len({spec.table.name for group in self.groups for spec in group.blocks})
        return {
            "input": [f"{tables} tables on every rank: ids stay"],
            "output": [f"{sum(group.width for group in self.groups)} columns from every rank's own copy"],
        }


class ReplicatedStep(PartStep):
    """One batch on its way through replicated tables."""

    def __init__(self, tables: ReplicatedTables, routed: Routed | None) -> None:
        self._tables, self._routed = tables, routed

    def headers(self) -> Sequence[Sequence[int]]:  # noqa: D102 - described in the base class
        world_size = self._tables.env.world_size
        if self._routed is None:
            return [[0] * self._tables.header_size] * world_size
        return [[ids.numel() for ids in self._routed.ids]] * world_size

    def send(self, peers: Sequence[Peer]) -> None:  # noqa: D102
        self._peers = peers

    def receive(self) -> Sequence[Tensor]:  # noqa: D102
        assert self._routed is not None  # the engine raised what is wrong with the batch
        return [self._routed.lengths, *self._routed.ids, *(self._routed.weights or ())]

    def lookup(self, *, training: bool) -> None:  # noqa: D102
        assert self._routed is not None
        self._places = self._routed.positions
        self._bags = [_own_bags(group, self._routed, self._tables.is_pooled) for group in self._tables.groups]
        pairs = zip(self._tables.lookups, self._bags, strict=True)
        self._results = [lookup.forward(bags, training=False)[0].reshape(-1) for lookup, bags in pairs]
        self._routed = None

    def views(self) -> list[Tensor]:  # noqa: D102
        groups = zip(self._tables.groups, self._results, self._bags, strict=True)
        views = [
            view for group, result, bags in groups for view in split_slots(group, result, bags.counts[0])
        ]
        del self._results
        return views

    def place_of(self, arrival: Arrival) -> Tensor | None:  # noqa: D102
        return self._places[arrival.stream]

    def send_gradients(self, gradient_of: GradientOf) -> None:  # noqa: D102
        env = self._tables.env
        self._forms: list[list[UpdateForm]] = []
        for choice, wanted, bags in zip(self._tables.choices, self._tables.wanted, self._bags, strict=True):
            gradients, shares = gradient_of.unscaled(wanted), choice.shares(self._peers)
            self._forms.append(
                [
                    form(env, chosen, shares, bags, gradients, gradient_of.scale)
                    for form, chosen in choice.of(shares)
                ]
            )
        forms = [form for own in self._forms for form in own]
        self._exchange = _Exchange(self._tables, forms)
        dense = [form for form in forms if isinstance(form, DenseForm)]
        self._dense = DenseSum(env, dense, self._tables.device) if dense else None

    def update(self) -> list[Tensor | None]:  # noqa: D102
        self._exchange.finish()
        if self._dense is not None:
            self._dense.finish()
        updated: list[Tensor | None] = []
        for lookup, group, forms in zip(self._tables.lookups, self._tables.groups, self._forms, strict=True):
            updated += update_jointly(lookup, group, forms)
        if self._dense is not None:
            self._dense.release()
        return updated


class _Choice:
    """The forms of a group's blocks, for each the one that moves the fewest bytes."""

    def __init__(self, group: Group, lookup: Lookup, codecs: tuple[Codec | None, ...]) -> None:
        self._group, self._lookup, self._codecs = group, lookup, codecs
        self._is_pooled = group.blocks[0].request.is_pooled
        self._is_weighted = group.blocks[0].request.is_weighted
        self._known: dict[tuple[Share, ...], list[tuple[type[UpdateForm], Chosen]]] = {}

    def shares(self, peers: Sequence[Peer]) -> tuple[Share, ...]:
        """What each rank looked up in the group."""
        return tuple(
            Share(
                batch_size=peer.batch_size,
                num_ids=tuple(peer.fields[slot.stream] for slot in self._group.slots),
                is_pooled=self._is_pooled,
                is_weighted=self._is_weighted,
                codecs=self._codecs,
            )
            for peer in peers
        )

    def of(self, shares: tuple[Share, ...]) -> list[tuple[type[UpdateForm], Chosen]]:
        """Each form that is taken, with its blocks; the same on every rank."""
        known = self._known.get(shares)
        if known is None:
            if len(self._known) >= MAX_KNOWN:  # bags of any length are of new sizes in every batch
                self._known.clear()
            known = self._known[shares] = self._decide(shares)
        return known

    def _decide(self, shares: Sequence[Share]) -> list[tuple[type[UpdateForm], Chosen]]:
        sizes = Sizes.of(self._group, shares)
        best = np.argmin([form.bytes_moved(sizes) for form in FORMS], axis=0)
        taken = [(form, np.flatnonzero(best == index).tolist()) for index, form in enumerate(FORMS)]
        return [(form, Chosen(self._group, self._lookup, tuple(blocks))) for form, blocks in taken if blocks]


def _codecs_of(group: Group, codecs: Sequence[Codec | None]) -> tuple[Codec | None, ...]:
    """The codec of each slot's gradients, given by output; none if all travel as they are."""
    own = tuple(codecs[slot.output] for slot in group.slots)
    return () if all(codec is None for codec in own) else own


def _own_bags(group: Group, routed: Routed, is_pooled: bool) -> Bags:
    """This rank's bags of a group, from one source: itself."""
    streams = [slot.stream for slot in group.slots]
    ids = [routed.ids[stream] for stream in streams]
    is_all = streams == list(range(len(routed.lengths)))
    lengths = routed.lengths if is_all else routed.lengths[streams]
    return Bags(
        ids=joined(ids),
        lengths=lengths.reshape(-1) if is_pooled else None,
        weights=None if routed.weights is None else torch.cat([routed.weights[stream] for stream in streams]),
        counts=(tuple(routed.batch_size if is_pooled else own.numel() for own in ids),),
    )


class _Exchange:
    """One collective for all groups: every rank's bytes to every rank; none where nobody has any."""

    def __init__(self, tables: ReplicatedTables, forms: Sequence[UpdateForm]) -> None:
        self._env, self._forms = tables.env, forms
        self._work: Work | None = None
        world_size = self._env.world_size
        if world_size == 1:
            return
        sizes = [sum(form.num_bytes(rank) for form in forms) for rank in range(world_size)]
        nothing = torch.empty(0, dtype=torch.uint8, device=tables.device)
        self._own = torch.cat([nothing, *(_bytes(piece) for form in forms for piece in form.pieces())])
        to_each = [0 if rank == self._env.rank else self._own.numel() for rank in range(world_size)]
        self._sizes = [0 if rank == self._env.rank else size for rank, size in enumerate(sizes)]
        self._received = self._own.new_empty(sum(self._sizes))
        if sum(sizes):
            self._work = self._env.communicator.all_to_all(
                self._received,
                self._own if world_size == _PAIR else self._own.repeat(world_size - 1),
                self._sizes,
                to_each,
                label="updates of copies",
            )

    def finish(self) -> None:
        """Wait, and give each form what arrived for it."""
        if self._env.world_size == 1:
            for form in self._forms:
                form.receive([form.pieces()])
            return
        if self._work is not None:
            self._work.wait()
        by_rank = list(self._received.split(self._sizes))
        by_rank[self._env.rank] = self._own
        starts = [0] * self._env.world_size
        for form in self._forms:
            arrived = []
            for rank, buffer in enumerate(by_rank):
                stop = starts[rank] + form.num_bytes(rank)
                arrived.append(form.unpack(rank, buffer[starts[rank] : stop]))
                starts[rank] = stop
            form.receive(arrived)


_PAIR = 2  # ranks; then what one sends goes to one


def _bytes(tensor: Tensor) -> Tensor:
    """The tensor's bytes, one after the other."""
    flat = tensor.contiguous().view(-1)
    return flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)
