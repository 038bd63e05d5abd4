"""fp32: results and gradients as they are."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from shardwright.contracts import Codec

if TYPE_CHECKING:
    from torch import Tensor


class Fp32(Codec):
    """No loss, no work: for tables that are to be left alone where others have a codec."""

    name: ClassVar[str] = "fp32"
    is_identity: ClassVar[bool] = True
    is_elementwise: ClassVar[bool] = True

    def row_bytes(self, num_columns: int) -> int:  # noqa: D102 - described in the base class
        return 4 * num_columns

    def encode(self, values: Tensor, encoded: Tensor) -> None:  # noqa: D102
        import torch

        encoded.view(torch.float32).copy_(values)

    def decode(self, encoded: Tensor, values: Tensor) -> None:  # noqa: D102
        import torch

        values.copy_(encoded.view(torch.float32))

    def error_bound(self, values: Tensor) -> Tensor:
        """Nothing is lost."""
        return values.new_zeros(values.shape)
