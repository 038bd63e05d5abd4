"""int8: each vector by its own scale and least value, one byte a column.

The bytes are FBGEMM's *fused 8-bit row-wise* format (``FloatToFused8BitRowwiseQuantized``): D codes, then scale and
least value as float32; a value is ``code * scale + least``. FBGEMM writes and reads it where it has a kernel for the
CPU and the numbers suit it: it adds 1e-8 to the range of each row, which small gradients do not stand, and takes NaN
for a number. Otherwise plain torch does, in the same format.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from shardwright.contracts import Codec

if TYPE_CHECKING:
    from torch import Tensor

_CODES = 255
_PARAMETER_BYTES = 8  # scale and least value
# Of FBGEMM's codes, those of a row with a scale from here on are off by less than half a step because of its 1e-8
# (1e-8 / 255 steps of the scale each, 255 steps at most).
_LEAST_FBGEMM_SCALE = 2e-8
# From here on its reciprocal is finite; a row with less is taken for constant.
_LEAST_SCALE = 2.0**-126
# Beyond half of what float32 holds a scale is smaller by so much, that the largest value is not rounded to infinity:
# the scale is off by 3 roundings of 2**-24 at most, and the value by one more.
_NO_OVERFLOW = 1 - 2.0**-21
_WRITES, _READS = "FloatToFused8BitRowwiseQuantized", "Fused8BitRowwiseQuantizedToFloat"


class Int8(Codec):
    """A quarter of the bytes, and 8 more a vector; the error is at most a 255th of the range of its row.

    (Half of that, and half for FBGEMM's way of rounding.) Rows of equal values come back exactly, and rows of zeros.
    A row with a NaN or an infinity comes back as NaN, all of it.
    """

    name: ClassVar[str] = "int8"
    aliases: ClassVar[tuple[str, ...]] = ("int8_rowwise",)

    def row_bytes(self, num_columns: int) -> int:  # noqa: D102 - described in the base class
        return num_columns + _PARAMETER_BYTES

    def encode(self, values: Tensor, encoded: Tensor) -> None:  # noqa: D102
        if values.numel() and not _write_fbgemm(values, encoded):
            _write(values, encoded)

    def decode(self, encoded: Tensor, values: Tensor) -> None:  # noqa: D102
        import torch

        from shardwright import _fbgemm

        if values.device.type == "cpu" and _fbgemm.serves(_READS, "cpu"):
            values.copy_(torch.ops.fbgemm.Fused8BitRowwiseQuantizedToFloat(encoded))
            return
        scale, least = _parameters(encoded).unbind(1)
        # A row whose range is no float32 is read in float64; a device would have to be waited for to know.
        is_wide = scale.is_cpu and bool((scale > torch.finfo(torch.float32).max / _CODES).any())
        read = torch.empty_like(values, dtype=torch.float64) if is_wide else values
        read.copy_(encoded[:, :-_PARAMETER_BYTES])
        read.mul_(scale[:, None]).add_(least[:, None])
        if is_wide:
            values.copy_(read)

    def error_bound(self, values: Tensor) -> Tensor:
        """A 255th of the row's range, and float32's rounding of its largest value."""
        import torch

        if not values.numel():
            return values.clone()
        low, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
        step = high / _CODES - low / _CODES
        rounding = 4 * torch.finfo(torch.float32).eps * torch.maximum(high.abs(), low.abs())
        return (step + rounding + _CODES * _LEAST_SCALE).expand(values.shape)


def _parameters(encoded: Tensor) -> Tensor:
    """Scale and least value of each row, ``[n, 2]``, a copy."""
    import torch

    own = encoded[:, -_PARAMETER_BYTES:].clone(memory_format=torch.contiguous_format)
    return own.view(torch.float32)


def _write(values: Tensor, encoded: Tensor) -> None:
    """Encode in plain torch."""
    import torch

    least, high = values.amin(1, keepdim=True), values.amax(1, keepdim=True)
    scale = high / _CODES - least / _CODES  # the range itself may be no float32
    scale = torch.where(scale.isfinite(), scale, torch.nan)
    is_near_end = torch.maximum(high.abs(), least.abs()) > torch.finfo(torch.float32).max / 2
    scale = torch.where(is_near_end, scale * _NO_OVERFLOW, scale)
    scale = torch.where(scale < _LEAST_SCALE, 0.0, scale)
    inverse = torch.where(scale > 0, scale.reciprocal(), 0.0)
    codes = torch.addcmul(-least * inverse, values, inverse).nan_to_num_(0.0).round_().clamp_(0, _CODES)
    encoded[:, :-_PARAMETER_BYTES].copy_(codes)
    encoded[:, -_PARAMETER_BYTES:].copy_(torch.cat([scale, least], dim=1).view(torch.uint8))


def _write_fbgemm(values: Tensor, encoded: Tensor) -> bool:
    """Encode with FBGEMM, if it has a kernel and the values are numbers; what it does not write well is mended."""
    import torch

    from shardwright import _fbgemm

    if values.device.type != "cpu" or not _fbgemm.serves(_WRITES, "cpu"):
        return False
    low, high = torch.aminmax(values)
    largest = max(-low.item(), high.item())
    if not largest < torch.finfo(torch.float32).max / 4 or 0 < largest < _LEAST_SCALE:
        return False
    # A power of two changes no digit: the largest value of a block of small ones comes to lie between 1 and 2.
    factor = max(1.0, math.ldexp(1.0, 1 - math.frexp(largest)[1])) if largest else 1.0
    written = torch.ops.fbgemm.FloatToFused8BitRowwiseQuantized(values.mul(factor))
    parameters = _parameters(written)
    scale = parameters[:, 0]
    poor = ((scale > 0) & (scale < _LEAST_FBGEMM_SCALE)).nonzero().squeeze(1)
    parameters /= factor
    written[:, -_PARAMETER_BYTES:] = parameters.view(torch.uint8)
    encoded.copy_(written)
    if poor.numel():
        mended = encoded.new_empty(poor.numel(), encoded.shape[1])
        _write(values[poor], mended)
        encoded[poor] = mended
    return True
