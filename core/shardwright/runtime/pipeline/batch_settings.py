"""Settings of batches that are read in step on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any

import torch
from attrs import field, frozen

from shardwright.errors import InvalidInputError, nearest


class EndOfData(StrEnum):
    """End of a loop whose ranks have different numbers of batches."""

    FIRST_RANK = "first_rank"
    """All ranks end with the first rank whose data ends; batches that others have read ahead are dropped."""

    LAST_RANK = "last_rank"
    """All ranks end with the last; a rank whose data has ended goes on with empty batches."""

    @classmethod
    def of(cls, value: str) -> EndOfData:
        """The choice called ``value``.

        Raises:
            InvalidInputError: there is no such choice.
        """
        known = [choice.value for choice in cls]
        if value not in known:
            raise InvalidInputError(
                f"end_of_data is {value!r}; it must be one of {', '.join(known)}.{nearest(str(value), known)}"
            )
        return cls(value)


def _end_of_data(value: str) -> EndOfData:
    return EndOfData.of(value)


@frozen(eq=False)
class BatchSettings:
    """The user's settings of batches that are read in step.

    Args:
        device: device that batches are copied to; ``None`` if they stay.
        end_of_data: end of a loop whose ranks have different numbers of batches.
        empty_batch: function that makes a batch without examples, for a rank whose data has ended; by default a batch
            of the form of the first batch of any rank.
        is_ahead: ids are exchanged before the forward pass.
        is_strict: every forward pass must be given the part of the batch where the first batch had its input.
    """

    device: torch.device | None = None
    end_of_data: EndOfData = field(default=EndOfData.FIRST_RANK, converter=_end_of_data)
    empty_batch: Callable[[], Any] | None = None
    is_ahead: bool = True
    is_strict: bool = False
