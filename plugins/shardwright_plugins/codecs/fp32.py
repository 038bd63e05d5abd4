"""fp32: results and gradients as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shardwright_plugins.codecs._floats import FloatCodec

if TYPE_CHECKING:
    from torch import Tensor


class Fp32(FloatCodec):
    """No loss, no work: for tables that are to be left alone where others have a codec."""

    name: ClassVar[str] = "fp32"
    is_identity: ClassVar[bool] = True
    float_type: ClassVar[str] = "float32"
    num_bytes: ClassVar[int] = 4

    def encode(self, values: Tensor, encoded: Tensor) -> None:  # noqa: D102 - described in the base class
        encoded.view(self.dtype).copy_(values)

    def error_bound(self, values: Tensor) -> Tensor:
        """Nothing is lost."""
        return values.new_zeros(values.shape)
