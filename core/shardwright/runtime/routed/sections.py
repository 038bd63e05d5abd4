"""Sections of the direct return path, by kinds of kernel groups: matrices here, rows in :mod:`row_sections`.

Legend: B batch size of this rank, B_w of rank w.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from attrs import evolve
from torch import Tensor

from shardwright.planning.arrays import Ints
from shardwright.runtime.routed.plan import RoutingPlan
from shardwright.runtime.routed.return_path import Answers
from shardwright.runtime.routed.section import (
    Section,
    SectionStep,
    columns_of,
    first_columns,
    wire_of,
)
from shardwright.runtime.step.columns import Columns, Move, Placement, Room, selected
from shardwright.runtime.step.segments import (
    LastResult,
    counts_of,
    index_of,
    order_of,
    repeated,
    starts_of,
    sums,
    take,
)


class Matrices:
    """Pooled columns that travel as matrices ``[B, columns]``, one from each owner, and their gradients to it.

    Args:
        plan: routing plan of all slots.
        pieces: the pieces in the order in which they travel, ``[n]``.
        owners: owner of each, a rank or a host, rising, ``[n]``.
        num_owners: number of owners.

    Attributes:
        widths: columns of each owner's matrix, and of its gradient, ``[owners]`` each.
        units: greatest common divisor of the widths of all pieces, and of their gradients.
        brings: columns that arrive, and their placement in the received matrices.
        spread: copy of the outputs' gradient to the matrices' gradients.
    """

    def __init__(self, plan: RoutingPlan, pieces: Ints, owners: Ints, num_owners: int) -> None:
        columns = [columns_of(plan, pieces, gradient=own) for own in (False, True)]
        sizes = [own.stop - own.start for own in columns]
        self.widths = [np.bincount(owners, own, num_owners).astype(np.int64) for own in sizes]
        self.units = [int(np.gcd.reduce(own)) or 1 for own in sizes]
        results, gradients = (Placement.in_a_row(own, owners, num_owners) for own in sizes)
        self.brings = evolve(columns[0], placed=results)
        whole = Placement.in_one(first_columns(plan, columns[1]), plan.collection.width)
        self.spread = Move(sizes[1], whole, gradients)


class _MatrixStep(SectionStep):
    def __init__(self, section: MatrixSection, answers: Answers) -> None:
        self._section, self._device = section, answers.device
        self._results = list(map(answers.results.__getitem__, section.groups))
        self._size, self.sizes = section.last_sizes.of(section.sizes, answers.batch_sizes)

    def results(self) -> Tensor:
        results, self._results = self._results, []
        if len(results) == 1:
            return results[0]
        if not results:
            return torch.empty(0, dtype=torch.float32, device=self._device)
        pairs = zip(results, self._section.group_widths[False], strict=True)
        return torch.cat([result.view(result.numel() // width, width) for result, width in pairs], 1).view(-1)

    def outputs(self, received: Tensor) -> list[Tensor]:
        return [received]

    def gradients(self, gradients: Sequence[Tensor], room: Room | None = None) -> Tensor:
        return self._section.spread(gradients[0].reshape(-1), self._size, room)

    def by_group(self, received: Tensor) -> list[Tensor]:
        widths = self._section.group_widths[True]
        if len(widths) <= 1:
            return [received] * len(widths)
        rows = received.view(received.numel() // sum(widths), sum(widths))
        return [own.reshape(-1) for own in rows.split_with_sizes(widths, dim=1)]


class MatrixSection(Section):
    """A section of pooled results with a bag for each sample: each rank sends ``[B_w, columns of all its slots]``."""

    step = _MatrixStep

    def __init__(self, plan: RoutingPlan, kinds: Sequence[int]) -> None:
        super().__init__(plan, kinds)
        ranks = np.repeat(np.arange(self.slots.world_size), self.slots.per_rank)
        made = Matrices(plan, self.slots.piece, ranks, self.slots.world_size)
        self.widths, self.brings, self.spread = made.widths, [made.brings], made.spread
        of_groups = [self._columns_of_group(plan, group) for group in self.groups]
        # Columns of each local group's results, and of its gradients.
        self.group_widths = [[own[gradient].width for own in of_groups] for gradient in (False, True)]
        self.wire = wire_of(self.kind, self.kind.widths or made.units)
        self.last_sizes = LastResult()

    def sizes(self, batch_sizes: Ints) -> tuple[int, Ints]:
        """``B`` of this rank, and the numbers of values that travel, of batches of these sizes."""
        size, widths = int(batch_sizes[self.rank]), np.array(self.widths)
        return size, np.array([widths[:, self.rank, None] * batch_sizes, widths * size])

    def _columns_of_group(self, plan: RoutingPlan, group: int) -> list[Columns]:
        slots = plan.groups[group].slots
        first = int(plan.slots.first[plan.rank])
        pieces = plan.slots.piece[first + slots.start : first + slots.stop]
        return [columns_of(plan, pieces, gradient=own) for own in (False, True)]


def sections_of(plan: RoutingPlan, kinds: Sequence[int]) -> list[Section]:
    """Make the sections of some kinds of groups: one for all matrices of the same codecs, one for each kind of rows."""
    matrices: dict[object, list[int]] = {}
    rows = BagsSection if plan.collection.is_pooled else SequenceSection
    made: list[Section] = []
    for kind in kinds:
        own = plan.kinds[kind]
        if own.is_matrix:
            matrices.setdefault((own.codecs, own.widths), []).append(kind)
        else:
            made.append(rows(plan, [kind]))
    return [MatrixSection(plan, own) for own in matrices.values()] + made


_SUM = 0  # of the modes of torch.embedding_bag


class _Targets:
    """The distinct columns among those of a section's slots, all of one width, in the order of the outputs.

    Args:
        plan: routing plan of all slots.
        pieces: piece of each slot of the section, ``[S]``.
        gradient: take the columns whose gradient slots get, not those that they bring.

    Attributes:
        columns: columns of each target, ``[T]``.
        number: ``T``.
        of_slot: target of each slot, ``[S]``.
    """

    def __init__(self, plan: RoutingPlan, pieces: Ints, *, gradient: bool) -> None:
        used, place = np.unique(pieces, return_inverse=True)
        columns = columns_of(plan, used, gradient=gradient)
        _, first, target = np.unique(
            np.stack([columns.output, columns.start]), axis=1, return_index=True, return_inverse=True
        )
        self.of_slot: Ints = target.reshape(-1)[place]
        self.columns = Columns(columns.output[first], columns.start[first], columns.stop[first])
        self.number = len(first)


class RowsSection(Section):
    """A section of rows of one width, one for each bag of a slot: partial sums of cut rows, or rows of sequences."""

    def __init__(self, plan: RoutingPlan, kinds: Sequence[int]) -> None:
        super().__init__(plan, kinds)
        assert self.kind.widths is not None  # the planner of groups puts slots of one width together
        self.widths = self.kind.widths
        self.targets, gradient_targets = (
            _Targets(plan, self.slots.piece, gradient=own) for own in (False, True)
        )
        is_same = np.array_equal(self.targets.of_slot, gradient_targets.of_slot)
        self.gradient_targets = self.targets if is_same and len(set(self.widths)) == 1 else gradient_targets
        self.wire = wire_of(self.kind, self.widths)


class _RowsStep(SectionStep):
    def __init__(self, section: RowsSection, answers: Answers) -> None:
        self.section, self._device = section, answers.device
        self._result = list(map(answers.results.__getitem__, section.groups))
        self.bags = section.bags_asked(answers)
        asked, answered = sums(self.bags, section.slots.first), section.bags_answered(answers)
        result, gradient = section.widths
        self.sizes = np.array([[own * result, own * gradient] for own in (answered, asked)])

    def results(self) -> Tensor:
        (result,) = self._result or [torch.empty(0, dtype=torch.float32, device=self._device)]
        self._result = []
        return result

    def by_group(self, received: Tensor) -> list[Tensor]:
        return [received] * len(self.section.groups)

    def places(self, answers: Answers) -> Tensor | None:
        """Sample of each bag, or its place among its feature's ids; ``None`` if each slot has all, in order."""
        routed, own = answers.asked[self.section.kind.bucketing], self.section.places
        if routed.places is None or own is None:
            return routed.places
        return take(routed.places, starts_of(routed.num_bags)[own], self.bags)


class _BagsStep(_RowsStep):
    section: BagsSection

    def __init__(self, section: BagsSection, answers: Answers) -> None:
        super().__init__(section, answers)
        self._size = int(answers.batch_sizes[section.rank])
        samples = self.places(answers)
        if samples is None:
            samples = torch.arange(self._size, device=answers.device).repeat(len(self.bags))
        self._samples = samples

    def _rows_of(self, targets: _Targets) -> Tensor:
        """Row of each bag in ``[B, T]``, seen flat: ``sample * T + target``."""
        target = repeated(targets.of_slot, self.bags, self._device)
        return target.add_(self._samples, alpha=targets.number)

    def outputs(self, received: Tensor) -> list[Tensor]:
        num_targets, width = self.section.targets.number, self.section.widths[0]
        num_rows = self._size * num_targets
        self._rows = rows = self._rows_of(self.section.targets)
        # Sorted by output row; an embedding bag over the sorted order adds up the values of each row.
        order = order_of(rows, num_rows)
        num_bags = order.shape[0]
        values = received.view(num_bags, width)
        if num_bags == num_rows and len(self.bags) == num_targets:  # nothing is to be added up
            summed = values.index_select(0, order)
        else:
            offsets = torch.zeros(num_rows + 1, dtype=torch.int64, device=self._device)
            torch.cumsum(counts_of(rows, num_rows), 0, out=offsets[1:])
            # As F.embedding_bag(mode="sum", include_last_offset=True) does after its checks.
            summed, *_ = torch.embedding_bag(values, order, offsets, False, _SUM, False, None, True)
        return [summed.view(self._size, num_targets * width)]

    def gradients(self, gradients: Sequence[Tensor], room: Room | None = None) -> Tensor:
        targets, width = self.section.gradient_targets, self.section.widths[1]
        picked = self.section.pick(gradients[0].reshape(-1), self._size)
        rows = picked.view(self._size * targets.number, width)
        is_same = targets is self.section.targets
        return selected(rows, self._rows if is_same else self._rows_of(targets), room)


class BagsSection(RowsSection):
    """A section of pooled partial sums: rows of one target and sample are added up at home."""

    step = _BagsStep

    def __init__(self, plan: RoutingPlan, kinds: Sequence[int]) -> None:
        super().__init__(plan, kinds)
        self.brings = [self.targets.columns]
        wanted = self.gradient_targets.columns
        widths = wanted.stop - wanted.start
        at_first = Placement.in_one(first_columns(plan, wanted), plan.collection.width)
        self.pick = Move(widths, at_first, Placement.in_one(starts_of(widths), int(widths.sum())))


class _SequenceStep(_RowsStep):
    section: SequenceSection

    def __init__(self, section: SequenceSection, answers: Answers) -> None:
        super().__init__(section, answers)
        self._num_ids = answers.num_ids
        self._places = self.places(answers)

    def _rows_of(self, targets: _Targets, num_ids: Ints) -> Tensor:
        """Place of each arriving row among the rows of all targets, target after target."""
        first = starts_of(num_ids)[targets.of_slot]
        if self._places is None:
            return index_of(first, self.bags, self._device)
        return repeated(first, self.bags, self._device).add_(self._places)

    def outputs(self, received: Tensor) -> list[Tensor]:
        section, width = self.section, self.section.widths[0]
        if self._places is None:  # what a slot brings is an output
            pieces = received.split_with_sizes((self.bags * width).tolist())
            ordered = [pieces[slot] for slot in np.argsort(section.targets.of_slot)]
            return [own.view(own.numel() // width, width) for own in ordered]
        num_ids = self._num_ids[section.feature]
        values = received.view(received.numel() // width, width)
        rows = self._rows_of(section.targets, num_ids)
        total = int(num_ids.sum())
        out = values.new_empty(total, width) if len(rows) == total else values.new_zeros(total, width)
        out[rows] = values
        return list(out.split_with_sizes(num_ids.tolist()))

    def gradients(self, gradients: Sequence[Tensor], room: Room | None = None) -> Tensor:
        targets = self.section.gradient_targets
        columns = targets.columns
        spans = zip(columns.output.tolist(), columns.start.tolist(), columns.stop.tolist(), strict=True)
        every = torch.cat([gradients[output][:, start:stop] for output, start, stop in spans])
        rows = self._rows_of(targets, self._num_ids[self.section.gradient_feature])
        return selected(every, rows, room)


class SequenceSection(RowsSection):
    """A section of rows of sequences: each goes to the place of its id."""

    step = _SequenceStep

    def __init__(self, plan: RoutingPlan, kinds: Sequence[int]) -> None:
        super().__init__(plan, kinds)
        columns = self.targets.columns
        features = np.array([output.feature for output in plan.collection.outputs], dtype=np.int64)
        self.feature, self.gradient_feature = (
            features[own.columns.output] for own in (self.targets, self.gradient_targets)
        )
        self.brings = [
            Columns(
                columns.output[place : place + 1],
                columns.start[place : place + 1],
                columns.stop[place : place + 1],
            )
            for place in range(len(columns.output))
        ]
