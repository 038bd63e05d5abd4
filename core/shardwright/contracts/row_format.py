"""The contract of a row format: how the rows of a table are stored, where they are no floats of torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

from attrs import frozen

from shardwright.planning.tables.data_types import TORCH_NAMES

if TYPE_CHECKING:
    from torch import Tensor


class RowFormat(ABC):
    """Stores rows ``[n, D]`` of float32 values as ``[n, row_bytes(D)]`` uint8, each row by itself.

    Compute kernels bring formats (:attr:`ComputeKernel.row_formats`). A table whose ``data_type`` is a format's name
    has such rows in its module, in state dicts and in each block on each rank. They are looked up and not trained. A
    format has no state, and its bytes depend neither on the device nor on what else is installed.

    Laws, which the conformance kit checks:

    - Rows are independent: ``pack(values)[rows]`` is ``pack(values[rows])`` for any ``rows``. So they are gathered,
      moved and saved by their numbers, as bytes.
    - A block of columns is a table of its own: ``unpack(columns(stored, D, start, stop), stop - start)`` equals
      ``unpack(stored, D)[:, start:stop]`` to the last bit.
    - ``join`` of all blocks of columns in their order is what they were cut from, to the last bit.
    - ``unpack(pack(values))`` is within ``error_bound`` of the values.
    """

    name: ClassVar[str]
    """Name of the data type, in capitals."""
    bits: ClassVar[int]
    """Bits of one element, without what a row has beside its elements, such as a scale."""
    torch_name: ClassVar[str] = "uint8"
    """Name of the torch dtype of stored rows."""

    @abstractmethod
    def row_bytes(self, num_columns: int) -> int:
        """The bytes of a row; asked by planners, so without torch."""

    @abstractmethod
    def pack(self, values: Tensor) -> Tensor:
        """The stored rows of float32 values ``[n, D]``.

        Raises:
            InvalidInputError: a value is beyond what the format holds; the text has the row's number.
        """

    @abstractmethod
    def unpack(self, stored: Tensor, num_columns: int) -> Tensor:
        """The float32 values ``[n, D]`` of stored rows, ``num_columns`` being ``D``."""

    @abstractmethod
    def columns(self, stored: Tensor, num_columns: int, start: int, stop: int) -> Tensor:
        """The stored rows of the columns from ``start`` to before ``stop``: ``[n, row_bytes(stop - start)]``."""

    @abstractmethod
    def join(self, blocks: Sequence[Tensor], widths: Sequence[int]) -> Tensor:
        """Put blocks of columns side by side: ``[n, row_bytes(sum of widths)]``.

        Args:
            blocks: stored rows of neighbouring columns, all cut from the same rows.
            widths: columns of each.
        """

    @abstractmethod
    def error_bound(self, stored: Tensor, num_columns: int) -> Tensor:
        """Bound the error of packing that each value of stored rows may have: float32, ``[n, D]`` or ``[n, 1]``."""


@frozen
class FloatRows(RowFormat):
    """Rows of floats of torch, ``[n, D]`` of their dtype: the one format whose tables are trained.

    Args:
        name: name of the data type.
        bits: bits of an element.
        torch_name: name of the torch dtype.
    """

    name: str  # type: ignore[misc]  # of objects, where other formats have it in their class
    bits: int  # type: ignore[misc]
    torch_name: str  # type: ignore[misc]

    def row_bytes(self, num_columns: int) -> int:  # noqa: D102 - described in the base class
        return num_columns * self.bits // 8

    def pack(self, values: Tensor) -> Tensor:  # noqa: D102
        import torch

        return values.to(getattr(torch, self.torch_name))

    def unpack(self, stored: Tensor, num_columns: int) -> Tensor:  # noqa: D102
        return stored.float()

    def columns(self, stored: Tensor, num_columns: int, start: int, stop: int) -> Tensor:  # noqa: D102
        return stored[:, start:stop]

    def join(self, blocks: Sequence[Tensor], widths: Sequence[int]) -> Tensor:  # noqa: D102
        import torch

        return torch.cat(list(blocks), dim=1)

    def error_bound(self, stored: Tensor, num_columns: int) -> Tensor:
        """A unit in the last place of the row's largest value, or of the least normal number."""
        import torch

        kind = torch.finfo(stored.dtype)
        largest = stored.float().abs().amax(dim=1, keepdim=True)
        return largest.clamp(min=kind.smallest_normal) * kind.eps


_BITS = {"FP32": 32, "FP16": 16, "BF16": 16}

FLOATS: Mapping[str, FloatRows] = MappingProxyType(
    {name: FloatRows(name, _BITS[name], torch_name) for name, torch_name in TORCH_NAMES.items()}
)
"""Formats of torch's floats, by the names of their data types."""
