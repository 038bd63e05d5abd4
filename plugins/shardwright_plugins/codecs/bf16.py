"""bf16: float32's range with 8 bits of significand."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shardwright_plugins.codecs._floats import FloatCodec

if TYPE_CHECKING:
    from torch import Tensor


class Bf16(FloatCodec):
    """Half the bytes; relative error at most ``2**-8``, whatever the magnitude: what small gradients need.

    Infinities and NaN stay what they are; values beyond the largest bfloat16 (3.39e38) become infinite.
    """

    name: ClassVar[str] = "bf16"
    aliases: ClassVar[tuple[str, ...]] = ("bfloat16",)
    float_type: ClassVar[str] = "bfloat16"

    def encode(self, values: Tensor, encoded: Tensor) -> None:  # noqa: D102 - described in the base class
        encoded.view(self.dtype).copy_(values)

    def error_bound(self, values: Tensor) -> Tensor:
        """Half a unit in the last place; nothing is promised for what is beyond bfloat16's range."""
        import torch

        beyond = values.abs() > torch.finfo(self.dtype).max
        return self.rounding_bound(values).masked_fill(beyond, torch.inf)
