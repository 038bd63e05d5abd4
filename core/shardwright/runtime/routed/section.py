"""The contract of one batch on its way through a section of a return path.

Legend: W ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from shardwright.planning.layouts.blocks import Ints
from shardwright.runtime.step.columns import Room


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
