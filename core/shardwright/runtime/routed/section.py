"""A section of a return path: one part of its messages, for the slots of some kinds of kernel groups.

A section knows the places of its slots' results in the outputs, and the part of the outputs' gradients that its slots
need. Where features have batch sizes of their own, only the rows of their examples travel. Lookups and arrangements see
slots that are filled up with empty bags to the batch size. On the wire between them, the rows of those bags are left
out, of results and of gradients.

Legend: W ranks, B_w batch size of rank w, S slots of a section, S_r those of one rank, D columns of a slot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, Self

import numpy as np
import torch
from attrs import evolve, frozen
from torch import Tensor

from shardwright.planning.arrays import Ints
from shardwright.runtime.ranks.devices import sent_to
from shardwright.runtime.routed.plan import RoutingPlan
from shardwright.runtime.routed.return_path import Answers, PathSlots
from shardwright.runtime.routed.wire import WireSegment
from shardwright.runtime.step.columns import Columns, Room, selected
from shardwright.runtime.step.kernel_groups import Bucketing, GroupKind
from shardwright.runtime.step.segments import (
    run_or_places,
    total,
)


class SectionStep(ABC):
    """One batch on its way through a section.

    Attributes:
        sizes: numbers of values that this rank answers, then of those that it asks for: of results, and of gradients,
            which go back; to or from each rank, ``[2, 2, W]``.
    """

    sizes: Ints

    @abstractmethod
    def results(self) -> Tensor:
        """The results that leave, flat, rank after rank."""

    @abstractmethod
    def outputs(self, received: Tensor) -> list[Tensor]:
        """Arrange the results that arrived: a tensor for each of the section's ``brings``."""

    @abstractmethod
    def gradients(self, gradients: Sequence[Tensor], room: Room | None = None) -> Tensor:
        """The gradients that leave, flat: those of all outputs, as far as they are needed; made in a room if copied."""

    @abstractmethod
    def by_group(self, received: Tensor) -> list[Tensor]:
        """Deal the gradients that arrived to the local groups."""


@frozen(eq=False)
class Trim:
    """Places of the units that travel among those of the filled-up results between this rank and all others.

    Args:
        places: place of each unit, ``[units that travel]``.
        num_units: number of units of the filled-up results.
        unit: columns of a unit.
        num_values: number of values that travel between this rank and each other: ``[W]``.
    """

    places: Tensor
    num_units: int
    unit: int
    num_values: Ints

    @classmethod
    def of(
        cls,
        bags: Sequence[Ints],
        batch_sizes: Ints,
        widths: Sequence[Ints],
        *,
        unit: int,
        is_matrix: bool,
        device: torch.device,
    ) -> Self:
        """Find the units that travel, in one direction.

        Args:
            bags: number of bags of each slot that travel, for each rank, ``[S_r]`` each.
            batch_sizes: bags of each slot after filling up, for each rank, ``[W]``.
            widths: columns of each slot, for each rank, ``[S_r]`` each.
            unit: number of columns that divides all widths.
            is_matrix: results stand as ``[B_w, columns of all slots]``; else as ``[B_w, D]`` slot after slot.
            device: device of the results.
        """
        masks, num_values = [np.zeros(0, dtype=bool)], []
        for counts, size, columns in zip(bags, batch_sizes.tolist(), widths, strict=True):
            num_values.append(int((counts * columns).sum()))
            units = columns // unit
            if is_matrix:  # [B_w, units of all slots]
                masks.append((np.arange(size)[:, None] < np.repeat(counts, units)).reshape(-1))
            else:  # [S_r, B_w, units]: all slots have one width
                kept = np.arange(size) < counts[:, None]
                masks.append(np.repeat(kept.reshape(-1), int(units[0]) if len(units) else 1))
        mask = np.concatenate(masks)
        return cls(
            sent_to(device, np.flatnonzero(mask)), len(mask), unit, np.array(num_values, dtype=np.int64)
        )

    def trimmed(self, filled: Tensor, room: Room | None = None) -> Tensor:
        """The units that travel, flat."""
        return selected(filled.reshape(self.num_units, self.unit), self.places, room)

    def filled(self, trimmed: Tensor) -> Tensor:
        """All units, flat; those that did not travel are zeros."""
        rows = trimmed.new_zeros(self.num_units, self.unit)
        rows[self.places] = trimmed.view(len(self.places), self.unit)
        return rows.view(-1)


class TrimmedStep(SectionStep):
    """A section's step whose messages are trimmed.

    Args:
        step: the step of the section that sees filled-up slots.
        asked: trims of the results that arrive from each rank, and of their gradients.
        answered: trims of the results that leave to each rank, and of their gradients.
    """

    def __init__(self, step: SectionStep, asked: Sequence[Trim], answered: Sequence[Trim]) -> None:
        self._step = step
        self._arriving, self._leaving_gradients = asked
        self._leaving, self._arriving_gradients = answered
        self.sizes = np.array([[own.num_values for own in trims] for trims in (answered, asked)])

    def results(self) -> Tensor:  # noqa: D102 - described in the base class
        return self._leaving.trimmed(self._step.results())

    def outputs(self, received: Tensor) -> list[Tensor]:  # noqa: D102
        return self._step.outputs(self._arriving.filled(received))

    def gradients(self, gradients: Sequence[Tensor], room: Room | None = None) -> Tensor:  # noqa: D102
        return self._leaving_gradients.trimmed(self._step.gradients(gradients), room)

    def by_group(self, received: Tensor) -> list[Tensor]:  # noqa: D102
        return self._step.by_group(self._arriving_gradients.filled(received))


class Section(ABC):
    """The slots of some kinds of kernel groups.

    Args:
        plan: routing plan of all slots.
        kinds: indices of the kinds, which have one bucketing and one pair of codecs.

    Attributes:
        slots: slots of the section on all ranks.
        groups: indices of the local groups.
        brings: columns of each tensor that comes home.
        wire: message segment of results, and of gradients.
        step: class of its steps, made of the section and the results of a batch whose slots have all bags, or, where
            ids are parted, some.
    """

    brings: Sequence[Columns]
    wire: tuple[WireSegment, WireSegment]
    step: ClassVar[type[Any]]

    def __init__(self, plan: RoutingPlan, kinds: Sequence[int]) -> None:
        own = PathSlots.of_kinds(plan, kinds)
        self.slots, self.groups = own.columns, own.groups
        self.kind: GroupKind = plan.kinds[kinds[0]]
        self.rank = plan.rank
        self._may_be_trimmed = self.kind.bucketing is Bucketing.WHOLE and plan.collection.is_pooled
        # Places of the section's slots among those of their router.
        routed = plan.slots.chosen(plan.bucketing_of_piece[plan.slots.piece] == self.kind.bucketing)
        is_own = np.isin(plan.pieces.group[routed.piece], kinds)
        self.places = None if is_own.all() else np.flatnonzero(is_own)
        first, stop = routed.first[plan.rank : plan.rank + 2]
        self.local = run_or_places(np.flatnonzero(is_own[first:stop]))
        columns = [columns_of(plan, self.slots.piece, gradient=own) for own in (False, True)]
        self._slot_widths = [own.stop - own.start for own in columns]

    def begin(self, answers: Answers) -> SectionStep:
        """Start with the results of a batch."""
        if answers.are_full or not self._may_be_trimmed:
            begun: SectionStep = self.step(self, answers)
            return begun
        # The section sees slots that are filled up to the batch size; what travels is trimmed.
        bucketing, sizes = self.kind.bucketing, answers.batch_sizes
        step = self.step(self, _filled_up(answers, bucketing, self.rank))
        bounds = self.slots.first
        edges, own = bounds[1:-1], slice(*bounds[self.rank : self.rank + 2])
        bags_asked = np.split(self.bags_asked(answers), edges)
        bags_answered = list(answers.answered[bucketing][:, self.local])
        asked, answered = [], []
        trim = partial(Trim.of, is_matrix=self.kind.is_matrix, device=answers.device)
        for widths, wire in zip(self._slot_widths, self.wire, strict=True):  # results, then gradients
            here = np.full_like(sizes, sizes[self.rank])
            asked.append(trim(bags_asked, here, np.split(widths, edges), unit=wire.width))
            answered.append(trim(bags_answered, sizes, [widths[own]] * len(sizes), unit=wire.width))
        return TrimmedStep(step, asked, answered)

    def bags_asked(self, answers: Answers) -> Ints:
        """Number of bags that this rank sent to each slot: ``[S]``."""
        bags = answers.asked[self.kind.bucketing].num_bags
        return bags if self.places is None else bags[self.places]

    def bags_answered(self, answers: Answers) -> Ints:
        """Number of bags that each rank sent to the local slots together: ``[W]``."""
        answered: Ints = total(answers.answered[self.kind.bucketing][:, self.local], axis=1)
        return answered


def _filled_up(answers: Answers, bucketing: Bucketing, rank: int) -> Answers:
    """The same results, as if each slot of a bucketing had as many bags as its source has examples."""
    asked, answered, sizes = answers.asked[bucketing], answers.answered[bucketing], answers.batch_sizes
    whole = evolve(asked, num_bags=np.full_like(asked.num_bags, sizes[rank]))
    return evolve(
        answers,
        asked={**answers.asked, bucketing: whole},
        answered={**answers.answered, bucketing: np.zeros_like(answered) + sizes[:, None]},
    )


def columns_of(plan: RoutingPlan, pieces: Ints, *, gradient: bool = False) -> Columns:
    """The columns that pieces bring, or, with ``gradient``, those whose gradient they get."""
    own = plan.pieces
    start, stop = (own.gradient_start, own.gradient_stop) if gradient else (own.start, own.stop)
    return Columns(own.output[pieces], start[pieces], stop[pieces])


def first_columns(plan: RoutingPlan, columns: Columns) -> Ints:
    """First column of each piece in the collection's pooled output: ``[n]``."""
    starts = np.array([output.start for output in plan.collection.outputs], dtype=np.int64)
    return starts[columns.output] + columns.start


def wire_of(kind: GroupKind, widths: Sequence[int]) -> tuple[WireSegment, WireSegment]:
    """Message segments of results and gradients of these widths."""
    results, gradients = map(WireSegment, kind.codecs, widths)
    return results, gradients
