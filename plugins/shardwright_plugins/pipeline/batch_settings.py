"""Settings of batches that are read in step on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from attrs import field, frozen

from shardwright_plugins.pipeline.stages import (
    EXCHANGE,
    CopyToDevice,
    ExchangeHeaders,
    ExchangeIds,
    Forward,
    Prefetch,
    Stages,
)

STAGES_AHEAD = (CopyToDevice(), ExchangeHeaders(), ExchangeIds(), Prefetch(), Forward())
"""Stages of loops of one's own, of which those ahead of the forward pass are run."""


EndOfData: TypeAlias = Literal["first_rank", "last_rank"]
"""End of a loop whose ranks have different numbers of batches.

``"first_rank"``: all ranks end with the first whose data ends; batches that others have read ahead are dropped.
``"last_rank"``: all end with the last; a rank whose data has ended goes on with empty batches.
"""


@frozen(eq=False)
class BatchSettings:
    """The user's settings of batches that are read in step.

    Args:
        device: device that batches are copied to; ``None`` if they stay.
        end_of_data: end of a loop whose ranks have different numbers of batches.
        empty_batch: function that makes a batch without examples, for a rank whose data has ended; by default a batch
            of the form of the first batch of any rank.
        stages: stages that batches go through; those ahead of the forward pass are run here.
        is_strict: every forward pass must be given the part of the batch where the first batch had its input.
        overlaps: the exchange of the next batch begins while this one computes.
        optimizer: optimizer that stages use.
    """

    device: torch.device | None = None
    end_of_data: EndOfData = "first_rank"
    empty_batch: Callable[[], Any] | None = None
    stages: Stages = field(factory=lambda: Stages(STAGES_AHEAD))
    is_strict: bool = False
    overlaps: bool = True
    optimizer: Any = None

    @property
    def is_ahead(self) -> bool:
        """Ids are exchanged before the forward pass."""
        return bool(self.stages.of(EXCHANGE))

    @property
    def way(self) -> str:
        """The way to exchange ids, which must be the same on all ranks."""
        if not self.is_ahead:
            return "in the forward pass"
        return "while the batch before computes" if self.overlaps else "between two batches"
