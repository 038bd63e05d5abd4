"""Trimming of results: where features have batch sizes of their own, only the rows of their examples travel.

Lookups and arrangements see slots that are filled up with empty bags to the batch size. On the wire between them, the
rows of those bags are left out, of results and of gradients.

Legend: W ranks, B_w batch size of rank w, S slots of a section, S_r those of one rank, D columns of a slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from attrs import frozen
from torch import Tensor

from shardwright.planning.layouts.blocks import Ints
from shardwright.runtime.ranks.devices import sent_to
from shardwright.runtime.routed.section import SectionStep
from shardwright.runtime.step.columns import Room, selected


@frozen(eq=False)
class FilledUpResults:
    """The form of the filled-up results that pass between one rank and all others, in one direction.

    Args:
        bags: number of bags of each slot that travel, for each rank, ``[S_r]`` each.
        batch_sizes: bags of each slot after filling up, for each rank, ``[W]``.
        widths: columns of each slot, for each rank, ``[S_r]`` each.
        unit: number of columns that divides all widths.
        is_matrix: results stand as ``[B_w, columns of all slots]``; else as ``[B_w, D]`` slot after slot.
    """

    bags: Sequence[Ints]
    batch_sizes: Ints
    widths: Sequence[Ints]
    unit: int
    is_matrix: bool

    def num_values(self) -> Ints:
        """Number of values that travel between this rank and each other: ``[W]``."""
        pairs = zip(self.bags, self.widths, strict=True)
        return np.array([int((bags * widths).sum()) for bags, widths in pairs], dtype=np.int64)

    def masks(self) -> Iterable[npt.NDArray[np.bool_]]:
        """True for each unit of each rank's results that travels."""
        for bags, size, widths in zip(self.bags, self.batch_sizes.tolist(), self.widths, strict=True):
            units = widths // self.unit
            if self.is_matrix:  # [B_w, units of all slots]
                yield (np.arange(size)[:, None] < np.repeat(bags, units)).reshape(-1)
            else:  # [S_r, B_w, units]: all slots have one width
                kept = np.arange(size) < bags[:, None]
                yield np.repeat(kept.reshape(-1), int(units[0]) if len(units) else 1)


@frozen(eq=False)
class Trim:
    """Places of the units that travel among those of filled-up results.

    Args:
        places: place of each unit, ``[units that travel]``.
        num_units: number of units of the filled-up results.
        unit: columns of a unit.
    """

    places: Tensor
    num_units: int
    unit: int

    @classmethod
    def of(cls, shape: FilledUpResults, device: torch.device) -> Self:
        """The places in results of a form."""
        mask = np.concatenate([np.zeros(0, dtype=bool), *shape.masks()])
        return cls(sent_to(device, np.flatnonzero(mask)), len(mask), shape.unit)

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
        asked: forms of the results that arrive from each rank, and of their gradients.
        answered: forms of the results that leave to each rank, and of their gradients.
        device: device of all tensors.
    """

    def __init__(
        self,
        step: SectionStep,
        asked: Sequence[FilledUpResults],
        answered: Sequence[FilledUpResults],
        device: torch.device,
    ) -> None:
        self._step = step
        self.asked = asked[0].num_values(), asked[1].num_values()
        self.answered = answered[0].num_values(), answered[1].num_values()
        self._arriving, self._leaving_gradients = (Trim.of(shape, device) for shape in asked)
        self._leaving, self._arriving_gradients = (Trim.of(shape, device) for shape in answered)

    def results(self) -> Tensor:  # noqa: D102 - described in the base class
        return self._leaving.trimmed(self._step.results())

    def outputs(self, received: Tensor) -> list[Tensor]:  # noqa: D102
        return self._step.outputs(self._arriving.filled(received))

    def gradients(self, gradients: Sequence[Tensor], room: Room | None = None) -> Tensor:  # noqa: D102
        return self._leaving_gradients.trimmed(self._step.gradients(gradients), room)

    def by_group(self, received: Tensor) -> list[Tensor]:  # noqa: D102
        return self._step.by_group(self._arriving_gradients.filled(received))
