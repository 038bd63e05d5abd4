"""fp16: IEEE half precision, 11 bits of significand, saturated at ±65504."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shardwright_plugins.codecs._floats import FloatCodec

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = 65504.0
"""The largest finite float16."""


class Fp16(FloatCodec):
    """Half the bytes; relative error at most ``2**-11`` from 6.1e-5 to 65504.

    Values beyond ±65504, infinities among them, become ±65504 (as in FBGEMM's codec, so that one large value does not
    make a loss infinite); below 6.1e-5 the error is at most ``2**-25``; NaN stays NaN. Gradients that are smaller than
    3e-8 come out as zero: take bf16 for those.
    """

    name: ClassVar[str] = "fp16"
    aliases: ClassVar[tuple[str, ...]] = ("float16", "half")
    float_type: ClassVar[str] = "float16"

    def encode(self, values: Tensor, encoded: Tensor) -> None:  # noqa: D102 - described in the base class
        encoded.view(self.dtype).copy_(values.clamp(-LARGEST, LARGEST))

    def error_bound(self, values: Tensor) -> Tensor:
        """Half a unit in the last place; what is beyond ±65504 may lose nearly all of itself."""
        import torch

        size = values.abs()
        return torch.where(size > LARGEST, size, self.rounding_bound(values))
