"""The common part of `JaggedTensor` and `KeyedJaggedTensor`: values in bags, and the bags' lengths and offsets.

Legend: V values in all, N bags in all.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch
from torch import Tensor

from shardwright.arguments import checked
from shardwright.contracts.compute_kernel import WEIGHTS
from shardwright.errors import InvalidInputError
from shardwright.sparse import _ops, _text
from shardwright.sparse._validation import NoTensor


class Jagged(NoTensor, abc.ABC):
    """Values, columns beside them (weights are one), and the bags they fall into, as lengths or as offsets.

    The one of lengths and offsets that was not given is derived on first use, and kept. Tensors given are kept as they
    are, not copied. Before a lookup on a CPU a keyed tensor derives again what follows from lengths or offsets that
    torch wrote since; a `JaggedTensor` does not.
    """

    __slots__ = ("_columns", "_lengths", "_offsets", "_values")

    _values: Tensor
    _columns: dict[str, Tensor]
    _lengths: Tensor | None
    _offsets: Tensor | None

    def validate(self) -> None:
        """Check everything, the contents of lengths or offsets included, wherever they are.

        On an accelerator reading the contents waits for it, so there it is done only here.

        Raises:
            InvalidInputError: Something is wrong; the text gives the numbers.
        """
        self._check_form()
        self._check_content()

    @abc.abstractmethod
    def _check_form(self) -> None:
        """Check what needs no look at the contents of tensors."""

    @abc.abstractmethod
    def _check_content(self) -> None:
        """Check lengths and offsets against the number of values."""

    @abc.abstractmethod
    def _with_tensors(
        self, values: Tensor, columns: dict[str, Tensor], lengths: Tensor | None, offsets: Tensor | None
    ) -> Self:
        """Make an object of the same kind from other tensors of the same contents, unchecked."""

    def values(self) -> Tensor:
        """The values of all bags, one bag after the other: `[V]`."""
        return self._values

    def weights(self) -> Tensor:
        """The weight of each value.

        Raises:
            InvalidInputError: There are none.
        """
        weights = self._weights
        if weights is None:
            raise InvalidInputError(
                f"{type(self).__name__}: it has no weights. Give weights= when constructing it, "
                "or ask weights_or_none()."
            )
        return weights

    def weights_or_none(self) -> Tensor | None:
        """The weight of each value, or None if there are none."""
        return self._weights

    def columns(self) -> dict[str, Tensor]:
        """The columns beside the values by name, in the values' order: `[V]` each; weights are one of them."""
        return dict(self._columns)

    @property
    def _weights(self) -> Tensor | None:
        return self._columns.get(WEIGHTS)

    def lengths(self) -> Tensor:
        """Number of values in each bag: `[N]`."""
        if self._lengths is None:
            assert self._offsets is not None
            self._lengths = self._offsets.diff()
        return self._lengths

    def lengths_or_none(self) -> Tensor | None:
        """The lengths, or None if they have not been derived yet."""
        return self._lengths

    def offsets(self) -> Tensor:
        """Start of each bag, and end of the last one: `[N + 1]`, the first is 0."""
        if self._offsets is None:
            assert self._lengths is not None
            self._offsets = _ops.offsets_from_lengths(self._lengths, self._values.shape[0])
        return self._offsets

    def offsets_or_none(self) -> Tensor | None:
        """The offsets, or None if they have not been derived yet."""
        return self._offsets

    def device(self) -> torch.device:
        """Device of the values."""
        return self._values.device

    def size_in_bytes(self) -> int:
        """Bytes of all tensors held, derived ones included."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors())

    @checked
    def to(
        self,
        device: torch.device | str | int,
        non_blocking: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Move to a device.

        Args:
            device: Where to.
            non_blocking: Do not wait for the copy (from pinned memory only).
            dtype: The dtype for the weights; values and lengths keep theirs.

        Returns:
            A new object. Tensors that are there already are shared, not copied.
        """
        moved = self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))
        if dtype is not None and moved._weights is not None:
            moved._columns = {**moved._columns, WEIGHTS: moved._weights.to(dtype)}
        return moved

    def pin_memory(self) -> Self:
        """A copy in page-locked memory, from which `to(..., non_blocking=True)` does not wait."""
        return self._map(lambda tensor: tensor.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory from being reused until the work queued on `stream` by now is done."""
        for tensor in self._tensors():
            tensor.record_stream(stream)

    def _described(self) -> str:
        """Text of dtype, columns and device, for `repr`."""
        others = [name for name in self._columns if name != WEIGHTS]
        columns = f"columns={_text.keys(others)}, " if others else ""
        return (
            f"dtype={_text.dtype_name(self._values)}, weighted={self._weights is not None}, {columns}"
            f"device='{self._values.device}'"
        )

    def _tensors(self) -> Iterator[Tensor]:
        for tensor in (self._values, *self._columns.values(), self._lengths, self._offsets):
            if tensor is not None:
                yield tensor

    def _map(self, function: Callable[[Tensor], Any]) -> Self:
        def apply(tensor: Tensor | None) -> Any:
            return None if tensor is None else function(tensor)

        columns = {name: function(column) for name, column in self._columns.items()}
        return self._with_tensors(function(self._values), columns, apply(self._lengths), apply(self._offsets))

    def _leaves(self) -> list[Tensor]:
        """The tensors as pytree leaves: always values, lengths, and the columns.

        Lengths stand for the offsets too, so that the structure does not depend on what has been derived.
        """
        return [self._values, self.lengths(), *self._columns.values()]


def named(weights: Tensor | None) -> dict[str, Tensor]:
    """The columns of which weights are the only one, or none."""
    return {} if weights is None else {WEIGHTS: weights}
