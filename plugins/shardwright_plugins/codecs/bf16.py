"""bf16: float32's range with 8 bits of significand."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shardwright.contracts import Codec

if TYPE_CHECKING:
    from torch import Tensor


class Bf16(Codec):
    """Half the bytes; relative error at most ``2**-8``, whatever the magnitude: what small gradients need.

    Infinities and NaN stay what they are; values beyond the largest bfloat16 (3.39e38) become infinite.
    """

    name: ClassVar[str] = "bf16"
    aliases: ClassVar[tuple[str, ...]] = ("bfloat16",)
    is_elementwise: ClassVar[bool] = True

    def row_bytes(self, num_columns: int) -> int:  # noqa: D102 - described in the base class
        return 2 * num_columns

    def encode(self, values: Tensor, encoded: Tensor) -> None:  # noqa: D102
        import torch

        encoded.view(torch.bfloat16).copy_(values)

    def decode(self, encoded: Tensor, values: Tensor) -> None:  # noqa: D102
        import torch

        values.copy_(encoded.view(torch.bfloat16))

    def error_bound(self, values: Tensor) -> Tensor:
        """Half a unit in the last place; nothing is promised for what is beyond bfloat16's range."""
        import torch

        from shardwright_plugins.codecs._rounding import rounding_bound

        bound = rounding_bound(values, torch.bfloat16)
        return bound.masked_fill(values.abs() > torch.finfo(torch.bfloat16).max, torch.inf)
