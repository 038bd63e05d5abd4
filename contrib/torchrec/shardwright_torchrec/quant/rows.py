"""Rows of one byte a column, with a scale and a bias each, and their error.

Legend: R rows, D columns, N ids.
"""

from __future__ import annotations

import numpy as np
import torch
from attrs import frozen
from torch import Tensor, nn

import shardwright as sw

__all__ = ["QuantizedBlock", "QuantizedRows", "quantize_rows"]

LEVELS = 255
"""The largest of the numbers that one byte holds."""


@frozen(eq=False)
class QuantizedRows:
    """A column of a row is ``values * scale + bias``, in float32.

    Args:
        values: ``[R, D]`` uint8.
        scale: ``[R, 1]`` float16.
        bias: ``[R, 1]`` float16.
    """

    values: Tensor
    scale: Tensor
    bias: Tensor

    def dequantized(self) -> Tensor:
        """Rows as float32, ``[R, D]``: ``value * scale + bias``."""
        return self.values.float() * self.scale.float() + self.bias.float()

    def error_bound(self) -> Tensor:
        """Largest quantisation error of a row's values, ``[R, 1]``: half a step, beside float32's rounding."""
        return self.scale.float() / 2

    def columns(self, start: int, stop: int) -> QuantizedRows:
        """Some of the columns; scale and bias are still those of the whole rows."""
        return QuantizedRows(self.values[:, start:stop], self.scale, self.bias)

    def rows(self, chosen: slice | Tensor) -> QuantizedRows:
        """Some of the rows."""
        return QuantizedRows(self.values[chosen], self.scale[chosen], self.bias[chosen])


def quantize_rows(weight: Tensor) -> QuantizedRows:
    """Quantise each row between its least and its greatest value, as FBGEMM's 8-bit rows with float16 parameters.

    The bias is rounded down and the scale up, so that no value is cut off, and the nearest level is within half a step.

    Args:
        weight: ``[R, D]``, of any float type.

    Raises:
        InvalidInputError: a value is not finite, or beyond what float16 holds.
    """
    weight = weight.detach().float()
    least, most = weight.aminmax(dim=1, keepdim=True)
    bias = _rounded(least, -torch.inf)
    scale = _rounded((most - bias.float()) / LEVELS, torch.inf)
    if not (bias.isfinite() & scale.isfinite()).all():
        row = int((~(bias.isfinite() & scale.isfinite())).flatten().nonzero()[0])
        raise sw.InvalidInputError(
            f"row {row} has values from {float(least[row])} to {float(most[row])}; scales and biases are float16, "
            "which ends at 65504: scale the table down before it is quantised"
        )
    step = torch.where(scale > 0, scale.float(), 1.0)
    values = ((weight - bias.float()) / step).round().clamp(0, LEVELS)
    return QuantizedRows(values.to(torch.uint8), scale, bias)


def _rounded(values: Tensor, towards: float) -> Tensor:
    """Round to float16 towards an infinity."""
    near = values.half()
    wrong = near.float() > values if towards < 0 else near.float() < values
    next_one = torch.from_numpy(np.nextafter(near.cpu().numpy(), np.float16(towards))).to(near.device)
    return torch.where(wrong, next_one, near)


class QuantizedBlock(nn.Module):
    """Rows as buffers, under TorchRec's names.

    Args:
        rows: rows of the block.
        first_column: first of its columns in the table.
        part: row part of the table that they are; ``None`` if they are all rows.
    """

    weight: Tensor
    weight_qscale: Tensor
    weight_qbias: Tensor

    def __init__(self, rows: QuantizedRows, first_column: int = 0, part: sw.RowPart | None = None) -> None:
        super().__init__()
        self.register_buffer("weight", rows.values)
        self.register_buffer("weight_qscale", rows.scale)
        self.register_buffer("weight_qbias", rows.bias)
        self.first_column, self.part = first_column, part

    def extra_repr(self) -> str:
        """Shape and dtype, for printing a model."""
        return f"{self.weight.shape[0]} x {self.weight.shape[1]}, {self.weight.dtype}"

    @property
    def rows(self) -> QuantizedRows:
        """The quantised rows in the buffers."""
        return QuantizedRows(self.weight, self.weight_qscale, self.weight_qbias)

    @property
    def columns(self) -> slice:
        """Its columns in the table."""
        return slice(self.first_column, self.first_column + self.weight.shape[1])

    def is_mine(self, ids: Tensor) -> Tensor | None:
        """Mask of the ids whose rows are here: ``[N]``; ``None`` if all are."""
        return None if self.part is None else self.part.row_map.part_of(ids) == self.part.index

    def local(self, ids: Tensor) -> Tensor:
        """The rows of ids that are here: ``[N]``."""
        return ids if self.part is None else self.part.row_map.local_row_of(ids)
