"""What a user chooses of batches in step."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any

import torch
from attrs import field, frozen

from shardwright.errors import InvalidInputError, nearest


class EndOfData(StrEnum):
    """When a loop ends whose ranks have different numbers of batches."""

    FIRST_RANK = "first_rank"
    """For all ranks with the first rank whose data ends; what the others have read of the next step is dropped."""

    LAST_RANK = "last_rank"
    """With the last: a rank whose data has ended goes on with empty batches."""

    @classmethod
    def of(cls, value: str) -> EndOfData:
        """The choice called ``value``.

        Raises:
            InvalidInputError: there is none.
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
    """What a user chooses of batches in step.

    Args:
        device: where batches go; ``None``: they stay.
        end_of_data: see :class:`EndOfData`.
        empty_batch: makes a batch without examples, for a rank whose data has ended; by default one of the form of the
            first batch of any rank.
        is_ahead: exchange ids before the forward pass.
        is_strict: every forward pass is given what the batch has where the first batch had the collection's input.
    """

    device: torch.device | None = None
    end_of_data: EndOfData = field(default=EndOfData.FIRST_RANK, converter=_end_of_data)
    empty_batch: Callable[[], Any] | None = None
    is_ahead: bool = True
    is_strict: bool = False
