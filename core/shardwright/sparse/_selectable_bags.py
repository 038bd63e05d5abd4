"""Batches made from another's tensors: of some keys, in another order, on another device; and as text.

Legend: F keys, B examples, V values in all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, Self

import torch
from torch import Tensor

from shardwright.arguments import checked
from shardwright.contracts.compute_kernel import WEIGHTS
from shardwright.sparse import _keyed_validation, _ops, _text, _validation
from shardwright.sparse._jagged import named
from shardwright.sparse._keyed_bags import NAME, KeyedBags
from shardwright.sparse._variable_stride import InverseIndices, VariableStride
from shardwright.sparse.jagged_tensor import JaggedTensor


class SelectableBags(KeyedBags):
    """Bags of several keys, of which some keys can be taken, in any order."""

    __slots__ = ()

    @classmethod
    def _trusted(
        cls,
        keys: tuple[str, ...],
        values: Tensor,
        stride: int,
        *,
        columns: dict[str, Tensor] | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
        length_per_key: list[int] | None = None,
        index_per_key: dict[str, int] | None = None,
        variable: VariableStride | None = None,
        is_checked: bool = True,
    ) -> Self:
        """Construct from data known to fit, without a check: what the engine does in every step.

        Args:
            keys: F distinct names.
            values: `[V]`.
            stride: B.
            columns: `[V]` each.
            lengths: `[F * B]`; these, offsets, or both.
            offsets: `[F * B + 1]`.
            length_per_key: How many values each key has, if known: reading it from a device waits for it.
            index_per_key: The position of each key, if at hand.
            variable: Batch size of each key, where they differ.
            is_checked: The contents of lengths or offsets are known to fit, too.
        """
        self = cls.__new__(cls)
        self._keys, self._stride, self._variable = keys, stride, variable
        self._values, self._columns, self._lengths, self._offsets = values, columns or {}, lengths, offsets
        self._length_per_key, self._index_per_key = length_per_key, index_per_key
        self._offset_per_key, self._checked_at = None, self._versions() if is_checked else None
        return self

    @checked
    def split(self, segments: Sequence[int]) -> list[Self]:
        """Part the keys into runs; the tensors of the parts are views.

        Args:
            segments: How many keys each part gets; they add up to F. A part may have none.

        Returns:
            One `KeyedJaggedTensor` per segment, of the same stride.

        Raises:
            InvalidInputError: A segment is negative, or they do not add up to F.
        """
        _keyed_validation.check_segments(segments, len(self._keys))
        return [self._run(start, end) for start, end in pairwise([0, *accumulate(segments)])]

    @checked
    def permute(self, indices: Sequence[int], indices_tensor: Tensor | None = None) -> Self:
        """Put the keys in another order, or select some.

        Args:
            indices: The old position of each new key; a key may be taken several times.
            indices_tensor: The same as an int32 tensor on the device of the values: spares copying it there.

        Returns:
            A new `KeyedJaggedTensor`.

        Raises:
            InvalidInputError: A position is out of range.
        """
        _keyed_validation.check_permutation(indices, len(self._keys), indices_tensor)
        used, counts, weights = self._used(), self._counts(), None
        if self._variable is not None:
            lengths = _ops.permute_runs(self.lengths(), indices, self._variable.per_key)
            values = _ops.permute_runs(used._values, indices, counts)
        else:
            lengths, values, weights = _ops.permute_keys(
                indices, self._lengths_by_key(), used._values, used._weights, counts, indices_tensor
            )
        others = {
            name: _ops.permute_runs(column, indices, counts)
            for name, column in used._columns.items()
            if name != WEIGHTS or weights is None
        }
        return self._trusted(
            tuple(self._keys[i] for i in indices),
            values,
            self._stride,
            columns={**named(weights), **others},
            lengths=lengths.flatten(),
            length_per_key=[counts[i] for i in indices],
            variable=self._variable and self._variable.chosen(indices),
        )

    def __getitem__(self, key: str) -> JaggedTensor:
        """The bags of one feature; its tensors are views.

        Raises:
            UnknownNameError: There is no such key.
        """
        position = self._key_indices().get(key) if isinstance(key, str) else None
        if position is None:
            raise _validation.unknown_key(NAME, key, self._keys)
        return self._run(position, position + 1)._only()

    @checked
    def to_dict(self, compute_offsets: bool = True) -> dict[str, JaggedTensor]:
        """The bags of each feature; their tensors are views.

        Args:
            compute_offsets: Derive the offsets of all in one operation, instead of each on its first use.

        Returns:
            A `JaggedTensor` for each key, in order.
        """
        if self._variable is not None or not compute_offsets:
            return {key: self._run(i, i + 1)._only() for i, key in enumerate(self._keys)}
        used, counts, lengths = self._used(), self._counts(), self._lengths_by_key()
        offsets = _ops.offsets_from_lengths(lengths, self._values.shape[0])
        split = {name: column.split(counts) for name, column in used._columns.items()}
        parts = zip(used._values.split(counts), lengths.unbind(), offsets.unbind(), strict=True)
        return {
            key: JaggedTensor._trusted(values, {name: own[i] for name, own in split.items()}, *bags)
            for i, (key, (values, *bags)) in enumerate(zip(self._keys, parts, strict=True))
        }

    def __str__(self) -> str:
        return _text.braces(NAME, (self._entry(i) for i in range(len(self._keys))), len(self._keys))

    def __repr__(self) -> str:
        return (
            f"{NAME}(keys={_text.keys(self._keys)}, stride={self._stride}, values={self._values.shape[0]}, "
            f"{self._described()})"
        )

    def _entry(self, position: int) -> str:
        bags = self._bags(position, position + 1)
        offsets = self.offsets()[bags.start : bags.stop + 1]
        if not self._columns:
            return f'"{self._keys[position]}": {_text.bags(self._values, offsets)}'
        columns = {"values": self._values, **self._columns}
        inner = ",\n        ".join(f'"{name}": {_text.bags(own, offsets)}' for name, own in columns.items())
        return f'"{self._keys[position]}": {{\n        {inner}\n    }}'

    def _with_tensors(
        self, values: Tensor, columns: dict[str, Tensor], lengths: Tensor | None, offsets: Tensor | None
    ) -> Self:
        return self._trusted(
            self._keys,
            values,
            self._stride,
            columns=columns,
            lengths=lengths,
            offsets=offsets,
            length_per_key=self._length_per_key,
            index_per_key=self._index_per_key,
            variable=self._variable,
            is_checked=self._was_checked(),
        )

    def _map(self, function: Callable[[Tensor], Any]) -> Self:
        self._was_checked()  # else what was derived from lengths that were written would be taken over
        mapped = super()._map(function)
        mapped._variable = self._variable and self._variable.mapped(function)
        return mapped

    def _tensors(self) -> Iterator[Tensor]:
        yield from super()._tensors()
        if self._inverse is not None:
            yield self._inverse.places

    def _used(self) -> Self:
        """The batch without values beyond its bags."""
        self._check_once()
        stop = self._starts()[-1]
        if torch.compiler.is_exporting():  # numbers are not known yet: the program demands it of every batch
            torch._check(stop == self._values.shape[0])
        return self if stop == self._values.shape[0] else self._run(0, len(self._keys))

    def _run(self, first: int, end: int) -> Self:
        """The keys from `first` to before `end`."""
        self._check_once()
        starts = self._starts()
        run = slice(starts[first], starts[end])
        return self._trusted(
            self._keys[first:end],
            self._values[run],
            self._stride,
            columns={name: column[run] for name, column in self._columns.items()},
            lengths=self.lengths()[self._bags(first, end)],
            length_per_key=self._counts()[first:end],
            variable=self._variable and self._variable.chosen(range(first, end)),
        )

    def _only(self) -> JaggedTensor:
        """The bags of the only key."""
        return JaggedTensor._trusted(self._values, self._columns, self._lengths, self._offsets)

    def _leaves(self) -> list[Tensor]:
        return [*super()._leaves(), *([] if self._inverse is None else [self._inverse.places])]

    def _leaf_names(self) -> list[str]:
        return ["values", "lengths", *self._columns, *([] if self._inverse is None else ["inverse_indices"])]

    def _context(self) -> list[Any]:
        """All but the leaves, as JSON knows it."""
        context: list[Any] = [self.keys(), self.stride(), list(self._columns)]
        if self._variable is not None:
            inverse = self._inverse
            context += [self.stride_per_key_per_rank(), None if inverse is None else list(inverse.keys)]
        return context

    @classmethod
    def _unflattened(cls, leaves: Any, context: list[Any]) -> Self:
        """Construct from leaves, which need not be tensors."""
        values, lengths, *others = leaves
        keys, stride, columns, *sizes = context
        variable = None
        if sizes:
            numbers, inverse_keys = sizes
            inverse = None if inverse_keys is None else InverseIndices(tuple(inverse_keys), others[-1])
            variable = VariableStride(tuple(map(tuple, numbers)), inverse)
        return cls._trusted(
            tuple(keys),
            values,
            stride,
            columns=dict(zip(columns, others, strict=False)),
            lengths=lengths,
            variable=variable,
            is_checked=False,
        )
