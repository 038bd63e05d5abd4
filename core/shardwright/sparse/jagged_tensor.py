"""`JaggedTensor`: a batch of bags of different lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self, final

import torch
from torch import Tensor

from shardwright.arguments import checked
from shardwright.errors import InvalidInputError
from shardwright.sparse import _foreign, _ops, _text, _tree, _validation
from shardwright.sparse._jagged import Jagged, named

_NAME = "JaggedTensor"
_MOST_COLUMNS = (1 << 31) - 1


@final
class JaggedTensor(Jagged):
    """A batch of bags, each holding any number of values: ids of one feature, or rows of an embedding table.

    NumPy arrays are taken as well as tensors, and share their memory where they may be written.

    Legend: B bags (the batch size), V values in all, D columns.

    Args:
        values: `[V]` or `[V, D]`, one bag after the other, of any dtype.
        weights: One weight per value, `[V]` (or of the shape of the values).
        lengths: How many values each bag holds: `[B]`, int32 or int64.
        offsets: Where each bag starts, and where the last ends: `[B + 1]`, the first 0. Instead of or beside lengths.

    Raises:
        InvalidInputError: Neither lengths nor offsets are given, or they contradict each other; a dtype, shape or
            device does not fit; on a CPU also if lengths are negative or do not add up to V.

    Example:
        >>> jagged = JaggedTensor(torch.tensor([5, 7, 1]), lengths=torch.tensor([1, 2]))
        >>> jagged.offsets()
        tensor([0, 1, 3])
        >>> print(jagged)
        JaggedTensor({
            [[5], [7, 1]]
        })
    """

    __slots__ = ()

    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        _validation.check_one_of_lengths_offsets(_NAME, lengths, offsets)
        values, weights, lengths, offsets = _foreign.as_tensors(
            _NAME, values=values, weights=weights, lengths=lengths, offsets=offsets
        )
        self._values, self._columns = values, named(weights)
        self._lengths = None if lengths is None else _validation.as_indices(_NAME, "lengths", lengths)
        self._offsets = None if offsets is None else _validation.as_indices(_NAME, "offsets", offsets)
        self._check_form()
        if values.is_cpu and not torch.compiler.is_exporting():
            self._check_content()

    @classmethod
    def _trusted(
        cls,
        values: Tensor,
        columns: dict[str, Tensor],
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> Self:
        """Construct from tensors known to fit, without a check."""
        self = cls.__new__(cls)
        self._values, self._columns, self._lengths, self._offsets = values, columns, lengths, offsets
        return self

    @staticmethod
    @checked
    def empty(
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        values_dtype: torch.dtype | None = None,
        weights_dtype: torch.dtype | None = None,
        lengths_dtype: torch.dtype = torch.int32,
    ) -> JaggedTensor:
        """A batch of no bags.

        Args:
            is_weighted: Whether it has (no) weights.
            device: Where; by default torch's default device.
            values_dtype: By default torch's default dtype.
            weights_dtype: By default torch's default dtype.
            lengths_dtype: int32 or int64.

        Returns:
            A `JaggedTensor` with B = 0 and V = 0.
        """
        return JaggedTensor(
            values=torch.empty(0, dtype=values_dtype, device=device),
            weights=torch.empty(0, dtype=weights_dtype, device=device) if is_weighted else None,
            lengths=torch.empty(0, dtype=lengths_dtype, device=device),
        )

    @staticmethod
    @checked
    def empty_like(jt: JaggedTensor, device: torch.device | str | None = None) -> JaggedTensor:
        """A batch of no bags with the dtypes and device of another.

        Args:
            jt: The other.
            device: Where, instead of the other's device.

        Returns:
            A `JaggedTensor` with B = 0 and V = 0.
        """
        return JaggedTensor._trusted(
            values=jt.values().new_empty((0, *jt.values().shape[1:]), device=device),
            columns={
                name: column.new_empty((0, *column.shape[1:]), device=device)
                for name, column in jt._columns.items()
            },
            lengths=jt.lengths().new_empty(0, device=device),
        )

    @staticmethod
    @checked
    def from_dense(values: Sequence[Tensor], weights: Sequence[Tensor] | None = None) -> JaggedTensor:
        """Make a bag of each tensor.

        Args:
            values: B tensors of any lengths.
            weights: B tensors of the same lengths.

        Returns:
            A `JaggedTensor` with int32 lengths.

        Raises:
            InvalidInputError: `values` is empty, or weights differ from values in number or lengths.
        """
        if not values:
            raise InvalidInputError(
                f"{_NAME}.from_dense: got 0 tensors. For an empty batch: {_NAME}.empty()."
            )
        joined = _concatenate("values", values)
        joined_weights = _concatenate("weights", weights) if weights else None
        lengths = [tensor.shape[0] for tensor in values]
        if weights is not None:
            _check_weights_of_bags(lengths, [tensor.shape[0] for tensor in weights])
        return JaggedTensor(
            values=joined,
            weights=joined_weights,
            lengths=torch.tensor(lengths, dtype=torch.int32, device=values[0].device),
        )

    @staticmethod
    @checked
    def from_dense_lengths(values: Tensor, lengths: Tensor, weights: Tensor | None = None) -> JaggedTensor:
        """Take the first values of each row.

        Args:
            values: `[B, W]` or `[B, W, D]`.
            lengths: How many values to take of each row: `[B]`.
            weights: `[B, W]`.

        Returns:
            A `JaggedTensor` with B bags.

        Raises:
            InvalidInputError: The batch sizes differ, or a length is negative or beyond W.
        """
        lengths = _validation.as_indices(f"{_NAME}.from_dense_lengths", "lengths", lengths)
        _check_dense(values, lengths, weights)
        taken = torch.arange(values.shape[1], device=lengths.device) < lengths[:, None]
        return JaggedTensor._trusted(values[taken], {} if weights is None else named(weights[taken]), lengths)

    def to_dense(self) -> list[Tensor]:
        """Each bag as a tensor of its own, a view: B tensors. Reads the lengths."""
        return list(self._values.split(self.lengths().tolist()))

    def to_dense_weights(self) -> list[Tensor] | None:
        """The weights of each bag as a tensor of its own, or None if there are none. Reads the lengths."""
        return None if self._weights is None else list(self._weights.split(self.lengths().tolist()))

    @checked
    def to_padded_dense(self, desired_length: int | None = None, padding_value: float = 0.0) -> Tensor:
        """One row per bag, padded or cut to the same width.

        Args:
            desired_length: The width; by default that of the longest bag, which reads the lengths.
            padding_value: What fills short rows.

        Returns:
            `[B, width]`, or `[B, width, D]`.
        """
        width = self._width(desired_length)
        return _ops.padded_dense(self._values, self.offsets(), width, padding_value)

    @checked
    def to_padded_dense_weights(
        self, desired_length: int | None = None, padding_value: float = 0.0
    ) -> Tensor | None:
        """One row of weights per bag, padded or cut to the same width; None if there are none.

        Args:
            desired_length: The width; by default that of the longest bag, which reads the lengths.
            padding_value: What fills short rows.

        Returns:
            `[B, width]`, or None.
        """
        if self._weights is None:
            return None
        width = self._width(desired_length)
        return _ops.padded_dense(self._weights, self.offsets(), width, padding_value)

    def __str__(self) -> str:
        columns = {"values": self._values, **self._columns}
        texts = {name: _text.bags(column, self.offsets()) for name, column in columns.items()}
        if not self._columns:
            return _text.braces(_NAME, texts.values(), 1)
        return _text.braces(_NAME, (f'"{name}": {text}' for name, text in texts.items()), len(texts))

    def __repr__(self) -> str:
        num_bags = self._lengths.numel() if self._lengths is not None else self.offsets().numel() - 1
        return f"{_NAME}(bags={num_bags}, values={self._values.shape[0]}, {self._described()})"

    def _with_tensors(
        self, values: Tensor, columns: dict[str, Tensor], lengths: Tensor | None, offsets: Tensor | None
    ) -> Self:
        return self._trusted(values, columns, lengths, offsets)

    def _check_form(self) -> None:
        _validation.check_tensor(_NAME, "values", self._values)
        if self._values.dim() == 0:
            raise InvalidInputError(f"{_NAME}: values must have 1 dimension or more, got 0 (a scalar).")
        if self._lengths is not None:
            _validation.check_vector(_NAME, "lengths", self._lengths)
        if self._offsets is not None:
            _validation.check_offsets_form(_NAME, self._offsets)
        if self._weights is not None:
            _validation.check_weights_form(_NAME, self._weights, self._values)
        _validation.check_devices(
            _NAME, self._values, weights=self._weights, lengths=self._lengths, offsets=self._offsets
        )

    def _check_content(self) -> None:
        _validation.check_bags(_NAME, self._lengths, self._offsets, self._values.shape[0])

    def _width(self, desired_length: int | None) -> int:
        if desired_length is None:
            lengths = self.lengths()
            return _longest(lengths) if lengths.numel() else 0
        if desired_length < 0:
            raise InvalidInputError(f"{_NAME}: desired_length must be 0 or more, got {desired_length}.")
        if desired_length > _MOST_COLUMNS:
            raise InvalidInputError(
                f"{_NAME}: desired_length can be {_MOST_COLUMNS} at most, got {desired_length}."
            )
        return desired_length


def _longest(lengths: Tensor) -> int:
    longest: Any = lengths.max().item()  # symbolic in `torch.export`, which `int()` would refuse
    torch._check(longest >= 0)
    return longest


def _concatenate(what: str, tensors: Sequence[Tensor]) -> Tensor:
    # torch.tensor([]) is float32: an empty bag must not turn the ids of the others into floats.
    some = [tensor for tensor in tensors if tensor.numel()] or tensors
    return _validation.joined(f"{_NAME}.from_dense", what, some)


def _check_weights_of_bags(lengths: list[int], weight_lengths: list[int]) -> None:
    if len(lengths) != len(weight_lengths):
        raise InvalidInputError(
            f"{_NAME}.from_dense: got {len(weight_lengths)} tensors of weights for {len(lengths)} of values."
        )
    for bag, (length, weight_length) in enumerate(zip(lengths, weight_lengths, strict=True)):
        if length != weight_length:
            raise InvalidInputError(
                f"{_NAME}.from_dense: bag {bag} has {length} values and {weight_length} weights."
            )


def _check_dense(values: Tensor, lengths: Tensor, weights: Tensor | None) -> None:
    owner = f"{_NAME}.from_dense_lengths"
    _validation.check_vector(owner, "lengths", lengths)
    if values.dim() < 2:
        raise InvalidInputError(f"{owner}: values must have 2 dimensions or more, got {values.dim()}.")
    if values.shape[0] != lengths.numel():
        raise InvalidInputError(
            f"{owner}: got {lengths.numel()} lengths for {values.shape[0]} rows of values."
        )
    if weights is not None and weights.shape != values.shape[:2]:
        raise InvalidInputError(
            f"{owner}: values have {list(values.shape[:2])} entries, weights {list(weights.shape)}."
        )
    # Selecting by these lengths waits for them on any device, so reading them here costs nothing more.
    wrong = (lengths < 0) | (lengths > values.shape[1])
    if bool(wrong.any()):
        row = int(wrong.nonzero()[0])
        raise InvalidInputError(
            f"{owner}: lengths[{row}] is {int(lengths[row])}; a row of values has 0 to {values.shape[1]}."
        )


def _unflatten(leaves: Any, context: list[Any]) -> JaggedTensor:
    values, lengths, *columns = leaves
    return JaggedTensor._trusted(values, dict(zip(context, columns, strict=True)), lengths)


_tree.register(JaggedTensor, lambda jagged: (jagged._leaves(), list(jagged._columns)), _unflatten)
