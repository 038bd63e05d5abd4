"""fp16: IEEE half precision, 11 bits of significand, saturated at ±65504."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shardwright.contracts import Codec

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = 65504.0
"""The largest finite float16."""


class Fp16(Codec):
    """Half the bytes; relative error at most ``2**-11`` from 6.1e-5 to 65504.

    Values beyond ±65504, infinities among them, become ±65504 (as in FBGEMM's codec, so that one large value does not
    make a loss infinite); below 6.1e-5 the error is at most ``2**-25``; NaN stays NaN. Gradients that are smaller than
    3e-8 come out as zero: take bf16 for those.
    """

    name: ClassVar[str] = "fp16"
    aliases: ClassVar[tuple[str, ...]] = ("float16", "half")
    is_elementwise: ClassVar[bool] = True

    def row_bytes(self, num_columns: int) -> int:  # noqa: D102 - described in the base class
        return 2 * num_columns

    def encode(self, values: Tensor, encoded: Tensor) -> None:  # noqa: D102
        import torch

        encoded.view(torch.float16).copy_(values.clamp(-LARGEST, LARGEST))

    def decode(self, encoded: Tensor, values: Tensor) -> None:  # noqa: D102
        import torch

        values.copy_(encoded.view(torch.float16))

    def error_bound(self, values: Tensor) -> Tensor:
        """Half a unit in the last place; what is beyond ±65504 may lose nearly all of itself."""
        import torch

        from shardwright_plugins.codecs._rounding import rounding_bound

        size = values.abs()
        return torch.where(size > LARGEST, size, rounding_bound(values, torch.float16))
