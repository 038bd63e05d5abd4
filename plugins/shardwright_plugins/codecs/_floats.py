"""The common part of codecs whose bytes are numbers of one floating-point type."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shardwright.contracts import Codec

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class FloatCodec(Codec):
    """A codec that casts to a floating-point type of torch."""

    is_elementwise: ClassVar[bool] = True
    float_type: ClassVar[str]
    """Name of the type in torch."""
    num_bytes: ClassVar[int] = 2
    """Bytes of a number of the type."""

    @property
    def dtype(self) -> torch.dtype:
        """The type."""
        import torch

        dtype: torch.dtype = getattr(torch, self.float_type)
        return dtype

    def row_bytes(self, num_columns: int) -> int:
        return self.num_bytes * num_columns

    def decode(self, encoded: Tensor, values: Tensor) -> None:
        values.copy_(encoded.view(self.dtype))

    def rounding_bound(self, values: Tensor) -> Tensor:
        """Half the distance between neighbouring numbers of the type around each finite value in its range.

        That is ``|x| * eps / 2`` for normal numbers and half the least positive number for others (IEEE 754-2019, 3.3
        and 4.3.1: round to nearest); ``eps`` is the distance from 1 to the next number. What is itself too small for a
        float32 is given as the least positive float32.
        """
        import torch

        kind, single = torch.finfo(self.dtype), torch.finfo(torch.float32)
        least = max(kind.smallest_normal * kind.eps / 2, single.smallest_normal * 2**-23)
        return (values.abs() * (kind.eps / 2)).clamp(min=least)
