"""Rows of a few bits a column, with a scale and a bias each, and their error.

A stored row is ``[scale, bias, elements]``: two float16, then the elements in whole bytes, the first in the lowest
bits. This is the layout that FBGEMM's table-batched kernels read. Rows of FP16 are float16 elements alone.

Legend: R rows, D columns.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from shardwright import DataType, InvalidInputError, UnsupportedError
from shardwright_serving.rows.formats import HEADER_BYTES, SERVED, bits_of, has_header, row_bytes

_INTEGERS = (DataType.INT8, DataType.INT4, DataType.INT2)
_AT_ONCE = 1 << 22
"""Elements that are quantized at once, so that their float32 copies stay small beside the table."""
_FP8_LARGEST = 0.875 * 2.0**9
"""The largest value of float8 e4m3 (448), as ``frexp`` gives it."""
_LEAST_EXPONENT, _MOST_EXPONENT = -24, 7
"""Exponents of the powers of two that scale FP8: the least of float16, and one that a kernel may multiply by 2^120."""


@frozen(eq=False)
class QuantizedRows:
    """Stored rows; a column of a row is ``value * scale + bias``, in float32.

    Args:
        data_type: precision of the values: INT8, INT4, INT2, FP8 (e4m3) or FP16.
        num_columns: ``D``.
        stored: ``[R, bytes]`` uint8, see the module; of FP16 ``[R, D]`` float16; any strides.
    """

    data_type: DataType
    num_columns: int
    stored: Tensor

    @classmethod
    def of(
        cls, data_type: DataType, values: Tensor, scale: Tensor | None = None, bias: Tensor | None = None
    ) -> QuantizedRows:
        """Pack values into rows.

        Args:
            data_type: precision of the values.
            values: ``[R, D]``: uint8 for integers, float8 e4m3 for FP8, float16 for FP16.
            scale: ``[R, 1]`` float16; ``None`` for FP16.
            bias: ``[R, 1]`` float16; ``None`` for FP16.
        """
        if not has_header(data_type):
            return cls(data_type, values.shape[1], values)
        assert scale is not None  # those of all types with a header
        assert bias is not None
        header = torch.cat([scale, bias], dim=1).contiguous().view(torch.uint8)
        stored = torch.cat([header, _packed(values, data_type)], dim=1)
        return cls(data_type, values.shape[1], stored)

    @property
    def num_rows(self) -> int:
        """``R``."""
        return self.stored.shape[0]

    def packed(self) -> Tensor:
        """The stored rows, in shared storage: ``[R, bytes]`` uint8, or ``[R, D]`` float16."""
        return self.stored

    @property
    def values(self) -> Tensor:
        """Elements before scale and bias, ``[R, D]``: uint8 of integers, float8 e4m3 of FP8, float16 of FP16."""
        if not has_header(self.data_type):
            return self.stored
        elements = self.stored[:, HEADER_BYTES:]
        if self.data_type in _INTEGERS:
            return _unpacked(elements, bits_of(self.data_type), self.num_columns)
        return elements.contiguous().view(torch.float8_e4m3fn)

    @property
    def scale(self) -> Tensor:
        """Scale of each row, ``[R, 1]`` float16; ones for FP16."""
        return self._header(0, 1.0)

    @property
    def bias(self) -> Tensor:
        """Bias of each row, ``[R, 1]`` float16; zeros for FP16."""
        return self._header(2, 0.0)

    def _header(self, start: int, otherwise: float) -> Tensor:
        if not has_header(self.data_type):
            return self.stored.new_full((self.num_rows, 1), otherwise, dtype=torch.float16)
        # A copy, since what lies at an odd address is no view of float16.
        return (
            self.stored[:, start : start + 2].clone(memory_format=torch.contiguous_format).view(torch.float16)
        )

    def dequantized(self) -> Tensor:
        """Rows as float32, ``[R, D]``.

        The product has no more bits than float32 holds, so that only the sum is rounded: every kernel comes to the same
        bits, with fused multiply-adds and without.
        """
        values = self.values.float()
        return values if not has_header(self.data_type) else values * self.scale.float() + self.bias.float()

    def error_bound(self) -> Tensor:
        """Largest quantization error of a row's values, ``[R, 1]`` float32, beside float32's own rounding.

        Integers: half a step. Floats of ``m`` bits of mantissa: ``2^-(m + 1)`` of the largest value, and half of the
        least float that there is.
        """
        if self.data_type in _INTEGERS:
            return self.scale.float() / 2
        largest = self.dequantized().abs().amax(dim=1, keepdim=True)
        if self.data_type is DataType.FP8:  # m = 3; the least float is 2^-9
            return torch.maximum(largest * 2.0**-4, self.scale.float() * 2.0**-10)
        return (largest * 2.0**-11).clamp(min=2.0**-25)  # m = 10; the least float is 2^-24

    def columns(self, start: int, stop: int) -> QuantizedRows:
        """Some of the columns, a copy; scale and bias are still those of the whole rows."""
        if (start, stop) == (0, self.num_columns):
            return self
        return QuantizedRows.of(self.data_type, self.values[:, start:stop], self.scale, self.bias)

    def rows(self, chosen: slice | Tensor) -> QuantizedRows:
        """Some of the rows; of a slice in shared storage."""
        return QuantizedRows(self.data_type, self.num_columns, self.stored[chosen])


def _packed(values: Tensor, data_type: DataType) -> Tensor:
    """Elements as bytes, ``[R, bytes]`` uint8; the last byte of a row is filled up with zeros."""
    per_byte = 8 // bits_of(data_type)
    if per_byte == 1:
        return values.contiguous().view(torch.uint8)
    filled = torch.nn.functional.pad(values, (0, -values.shape[1] % per_byte))
    parts = filled.unflatten(1, (-1, per_byte)) << _shifts(bits_of(data_type), values)
    return parts.sum(dim=2, dtype=torch.uint8)


def _unpacked(elements: Tensor, bits: int, num_columns: int) -> Tensor:
    if bits == 8:
        return elements
    parts = (elements.unsqueeze(2) >> _shifts(bits, elements)) & ((1 << bits) - 1)
    return parts.flatten(1)[:, :num_columns]


def _shifts(bits: int, like: Tensor) -> Tensor:
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=like.device)


def empty_rows(
    data_type: DataType, num_rows: int, num_columns: int, device: torch.device | str | None = None
) -> QuantizedRows:
    """Rows of zeros.

    Args:
        data_type: their precision.
        num_rows: ``R``.
        num_columns: ``D``.
        device: device of the rows.

    Raises:
        UnsupportedError: tables cannot be quantized to that type.
    """
    check_served(data_type)
    is_packed = has_header(data_type)
    size = (num_rows, row_bytes(data_type, num_columns) if is_packed else num_columns)
    dtype = torch.uint8 if is_packed else torch.float16
    return QuantizedRows(data_type, num_columns, torch.zeros(size, dtype=dtype, device=device))


def check_served(data_type: DataType) -> None:
    """Check that tables can be quantized to a type.

    Raises:
        UnsupportedError: they cannot.
    """
    if data_type not in SERVED:
        known = ", ".join(SERVED)
        raise UnsupportedError(f"tables cannot be quantized to {data_type}; possible: {known}")


@torch.no_grad()
def quantize_rows(weight: Tensor, data_type: DataType | str = DataType.INT8) -> QuantizedRows:
    """Quantize each row by itself.

    Integers stand between the row's least and greatest value: the bias is rounded down and the scale up, so that no
    value is cut off, and the nearest level is within half a step. FP8 has a power of two as scale and no bias, so that
    scaling loses nothing.

    Args:
        weight: ``[R, D]``, of any float type.
        data_type: precision of the values.

    Raises:
        InvalidInputError: a value is not finite, or beyond what the precision holds, or the weight is no float matrix.
        UnsupportedError: tables cannot be quantized to that type.
    """
    if not isinstance(weight, Tensor) or weight.ndim != 2 or not weight.is_floating_point():
        got = f"{weight.dtype} {list(weight.shape)}" if isinstance(weight, Tensor) else type(weight).__name__
        raise InvalidInputError(f"weight must be a tensor [rows, columns] of floats, got {got}")
    if weight.shape[1] == 0:
        raise InvalidInputError(f"weight must have columns, got {list(weight.shape)}")
    data_type = DataType(data_type)
    made = empty_rows(data_type, weight.shape[0], weight.shape[1], device=weight.device)
    for start, some in _some_rows(weight.detach()):
        values, scale, bias = _quantized(some.float(), data_type, start)
        own = QuantizedRows.of(data_type, values, scale, bias)
        made.stored[start : start + len(some)] = own.stored
    return made


def _some_rows(weight: Tensor) -> Iterator[tuple[int, Tensor]]:
    most = max(1, _AT_ONCE // max(1, weight.shape[1]))
    for start in range(0, weight.shape[0], most):
        yield start, weight[start : start + most]


def _quantized(
    weight: Tensor, data_type: DataType, first: int
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Values, scale and bias of some rows, of which the first has the number ``first`` in its table."""
    if data_type is DataType.FP16:
        values = weight.half()
        _check_finite(values.isfinite().all(dim=1), weight, first, "values of FP16 end at 65504")
        return values, None, None
    if data_type is DataType.FP8:
        return _floats(weight, first)
    levels = (1 << bits_of(data_type)) - 1
    least, most = weight.aminmax(dim=1, keepdim=True)
    bias = _rounded(least, -torch.inf)
    scale = _rounded((most - bias.float()) / levels, torch.inf)
    finite = (bias.isfinite() & scale.isfinite()).flatten()
    ends = f"values of {data_type} begin at -65504, and span {levels} * 65504"
    _check_finite(finite, weight, first, ends)
    step = torch.where(scale > 0, scale.float(), 1.0)
    values = ((weight - bias.float()) / step).round().clamp(0, levels)
    return values.to(torch.uint8), scale, bias


def _floats(weight: Tensor, first: int) -> tuple[Tensor, Tensor, Tensor]:
    """Float8 values under the least power of two by which the largest value is no more than 448."""
    largest = weight.abs().amax(dim=1, keepdim=True)
    mantissa, exponent = torch.frexp(largest)
    # largest / 2^e <= 0.875 * 2^9, where largest = mantissa * 2^exponent and mantissa < 1
    wanted = exponent - 9 + (mantissa > _FP8_LARGEST * 2.0**-9).to(exponent.dtype)
    finite = (largest.isfinite() & (wanted <= _MOST_EXPONENT)).flatten()
    _check_finite(finite, weight, first, f"values of FP8 end at {448 * 2**_MOST_EXPONENT}")
    scale = torch.ldexp(torch.ones_like(largest), wanted.clamp(min=_LEAST_EXPONENT))
    values = (weight / scale).to(torch.float8_e4m3fn)
    return values, scale.half(), torch.zeros_like(scale, dtype=torch.float16)


def _check_finite(finite: Tensor, weight: Tensor, first: int, ends: str) -> None:
    if finite.all():
        return
    row = int((~finite).nonzero()[0])
    least, most = (float(extreme) for extreme in weight[row].aminmax())
    advice = f"{ends}: scale the table down before it is quantized"
    if not weight[row].isfinite().all():
        advice = "those that are not finite have no quantized value: mend the weights"
    raise InvalidInputError(f"row {first + row} has values from {least} to {most}; {advice}")


def _rounded(values: Tensor, towards: float) -> Tensor:
    """Round to float16 towards an infinity."""
    near = values.half()
    wrong = near.float() > values if towards < 0 else near.float() < values
    next_one = torch.from_numpy(np.nextafter(near.cpu().numpy(), np.float16(towards))).to(near.device)
    return torch.where(wrong, next_one, near)
