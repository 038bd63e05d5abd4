"""One batch on its way through a section of a return path, and the trimming of its messages.

Where features have batch sizes of their own, only the rows of their examples travel. Lookups and arrangements see slots
that are filled up with empty bags to the batch size. On the wire between them, the rows of those bags are left out, of
results and of gradients.

Legend: W ranks, B_w batch size of rank w, S slots of a section, S_r those of one rank, D columns of a slot.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Self

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from shardwright.planning.layouts.blocks import Ints
from shardwright.runtime.ranks.devices import sent_to
from shardwright.runtime.step.columns import Room, selected


class SectionStep(ABC):
    """One batch on its way through a section.

    Attributes:
        asked: number of values of results that arrive from each rank, and of gradients that leave to it, ``[W]`` each.
        answered: number of values of results that leave to each rank, and of gradients that arrive, ``[W]`` each.
    """

    asked: tuple[Ints, Ints]
    answered: tuple[Ints, Ints]

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
        self.asked = self._arriving.num_values, self._leaving_gradients.num_values
        self.answered = self._leaving.num_values, self._arriving_gradients.num_values

    def results(self) -> Tensor:  # noqa: D102 - described in the base class
        return self._leaving.trimmed(self._step.results())

    def outputs(self, received: Tensor) -> list[Tensor]:  # noqa: D102
        return self._step.outputs(self._arriving.filled(received))

    def gradients(self, gradients: Sequence[Tensor], room: Room | None = None) -> Tensor:  # noqa: D102
        return self._leaving_gradients.trimmed(self._step.gradients(gradients), room)

    def by_group(self, received: Tensor) -> list[Tensor]:  # noqa: D102
        return self._step.by_group(self._arriving_gradients.filled(received))
