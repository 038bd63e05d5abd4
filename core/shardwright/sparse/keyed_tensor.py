"""`KeyedTensor`: several dense tensors side by side, each with a name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Self, final

import torch
from torch import Tensor

from shardwright.arguments import checked, checked_only
from shardwright.errors import InvalidInputError
from shardwright.sparse import _ops, _text, _tree, _validation

_NAME = "KeyedTensor"


@final
class KeyedTensor(_validation.NoTensor):
    """Dense tensors joined along one dimension, each found by its key, such as pooled embeddings.

    Legend: F keys, B examples, D columns in all.

    Args:
        keys: F distinct names.
        length_per_key: How many columns each key has; they add up to D.
        values: `[B, D]`.
        key_dim: The dimension along which the keys lie.
        offset_per_key: First column of each key, and the end of the last; compared with what follows.
        index_per_key: Position of each key; compared with what follows.

    Raises:
        InvalidInputError: Lengths and keys differ in number, one is negative, or they do not add up to D.
        DuplicateNameError: A key occurs twice.

    Example:
        >>> tensor = KeyedTensor(["a", "b"], [1, 2], torch.tensor([[1.0, 2.0, 3.0]]))
        >>> tensor["b"]
        tensor([[2., 3.]])
    """

    __slots__ = ("_index_per_key", "_key_dim", "_keys", "_length_per_key", "_offset_per_key", "_values")

    _keys: tuple[str, ...]
    _length_per_key: tuple[int, ...]
    _values: Tensor
    _key_dim: int
    _offset_per_key: list[int] | None
    _index_per_key: dict[str, int] | None

    @checked_only("length_per_key", "key_dim")
    def __init__(
        self,
        keys: Sequence[str],
        length_per_key: Sequence[int],
        values: Tensor,
        key_dim: int = 1,
        offset_per_key: Sequence[int] | None = None,
        index_per_key: Mapping[str, int] | None = None,
    ) -> None:
        self._index_per_key = _validation.check_keys(_NAME, keys)
        self._keys = tuple(keys)
        self._length_per_key = tuple(length_per_key)
        self._values = values
        self._key_dim = key_dim
        self._offset_per_key = None
        self.validate()
        _validation.check_derived(
            _NAME,
            {
                "offset_per_key": (offset_per_key, self.offset_per_key),
                "index_per_key": (index_per_key, lambda: self._index_per_key),
            },
        )

    def validate(self) -> None:
        """Check that keys, lengths and values fit. Looks at shapes only; construction does it by itself.

        Raises:
            InvalidInputError: They do not; the text gives the numbers.
        """
        _validation.check_tensor(_NAME, "values", self._values, others="")
        _check_key_dim(_NAME, self._key_dim, self._values)
        lengths = self._length_per_key
        if len(lengths) != len(self._keys):
            raise InvalidInputError(f"{_NAME}: got {len(lengths)} lengths for {len(self._keys)} keys.")
        for key, length in zip(self._keys, lengths, strict=True):
            if length < 0:
                raise InvalidInputError(f"{_NAME}: key {key!r} has length {length}; it must be 0 or more.")
        size = self._values.shape[self._key_dim]
        if sum(lengths) != size:
            raise InvalidInputError(
                f"{_NAME}: lengths add up to {sum(lengths)}, but dimension {self._key_dim} of the values "
                f"has {size}."
            )

    @classmethod
    def _trusted(
        cls,
        keys: tuple[str, ...],
        length_per_key: tuple[int, ...],
        values: Tensor,
        key_dim: int = 1,
        *,
        offset_per_key: list[int] | None = None,
        index_per_key: dict[str, int] | None = None,
    ) -> Self:
        """Construct from data known to fit, without a check: what the engine does in every step."""
        self = cls.__new__(cls)
        self._keys, self._length_per_key, self._values, self._key_dim = keys, length_per_key, values, key_dim
        self._offset_per_key, self._index_per_key = offset_per_key, index_per_key
        return self

    @staticmethod
    @checked
    def from_tensor_list(
        keys: Sequence[str], tensors: Sequence[Tensor], key_dim: int = 1, cat_dim: int | None = None
    ) -> KeyedTensor:
        """Join tensors.

        Args:
            keys: F distinct names.
            tensors: F tensors, of the same shape but for `key_dim`.
            key_dim: The dimension along which to join.
            cat_dim: The same; it exists because TorchRec has it.

        Returns:
            A `KeyedTensor`.

        Raises:
            InvalidInputError: Keys and tensors differ in number, or shapes do not fit.
        """
        owner = f"{_NAME}.from_tensor_list"
        if len(keys) != len(tensors):
            raise InvalidInputError(f"{owner}: got {len(tensors)} tensors for {len(keys)} keys.")
        if not tensors:
            raise InvalidInputError(f"{owner}: got 0 tensors; at least one is needed.")
        if cat_dim is not None and cat_dim != key_dim:
            raise InvalidInputError(
                f"{owner}: cat_dim is {cat_dim}, but must be key_dim, which is {key_dim}."
            )
        _check_key_dim(owner, key_dim, tensors[0])
        shapes = [[*tensor.shape[:key_dim], *tensor.shape[key_dim + 1 :]] for tensor in tensors]
        _check_same_shape(owner, keys, shapes, key_dim)
        lengths = [tensor.shape[key_dim] for tensor in tensors]
        return KeyedTensor(keys, lengths, torch.cat(list(tensors), dim=key_dim), key_dim)

    @staticmethod
    @checked
    def regroup(keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]]) -> list[Tensor]:
        """Gather the tensors of keys from several `KeyedTensor` into groups.

        Args:
            keyed_tensors: Where to find the keys.
            groups: The keys of each result, in order. A key may be in several groups.

        Returns:
            One tensor per group, its keys joined along the key dimension. Gradients flow back.

        Raises:
            UnknownNameError: None of them has such a key.
            InvalidInputError: Two have a key asked for, or they have different key dimensions.
        """
        if not keyed_tensors:
            raise InvalidInputError(
                f"{_NAME}.regroup: got a list of 0 keyed tensors; at least one is needed."
            )
        dim = _common_key_dim(keyed_tensors)
        places = _places(keyed_tensors)
        return [_gather(keyed_tensors, [_place(places, key) for key in group], dim) for group in groups]

    @staticmethod
    @checked
    def regroup_as_dict(
        keyed_tensors: Sequence[KeyedTensor], groups: Sequence[Sequence[str]], keys: Sequence[str]
    ) -> dict[str, Tensor]:
        """Regroup as `regroup` does, and give each group a name.

        Args:
            keyed_tensors: Keyed tensors that have the keys.
            groups: The keys of each result, in order.
            keys: The name of each group.

        Returns:
            One tensor per name.

        Raises:
            InvalidInputError: As many names as groups are needed.
        """
        owner = f"{_NAME}.regroup_as_dict"
        if len(keys) != len(groups):
            raise InvalidInputError(f"{owner}: got {len(keys)} names (keys) for {len(groups)} groups.")
        _validation.check_keys(owner, keys)
        return dict(zip(keys, KeyedTensor.regroup(keyed_tensors, groups), strict=True))

    def keys(self) -> list[str]:
        """The names, in order."""
        return list(self._keys)

    def values(self) -> Tensor:
        """All tensors side by side: `[B, D]`."""
        return self._values

    def key_dim(self) -> int:
        """The dimension along which the keys lie."""
        return self._key_dim

    def device(self) -> torch.device:
        """Device of the values."""
        return self._values.device

    def length_per_key(self) -> list[int]:
        """Number of columns of each key."""
        return list(self._length_per_key)

    def offset_per_key(self) -> list[int]:
        """The column at which each key starts, and at which the last ends: F + 1 numbers."""
        return list(self._offsets())

    def size_in_bytes(self) -> int:
        """Bytes of the values."""
        return self._values.numel() * self._values.element_size()

    def __getitem__(self, key: str) -> Tensor:
        """The tensor of one key, a view.

        Raises:
            UnknownNameError: There is no such key.
        """
        position = self._key_indices().get(key) if isinstance(key, str) else None
        if position is None:
            raise _validation.unknown_key(_NAME, key, self._keys)
        return self._values.narrow(self._key_dim, self._offsets()[position], self._length_per_key[position])

    def to_dict(self) -> dict[str, Tensor]:
        """The tensor of each key, all views."""
        parts = self._values.split(self._length_per_key, dim=self._key_dim)
        return dict(zip(self._keys, parts, strict=True))

    @checked
    def to(self, device: torch.device | str, non_blocking: bool = False) -> KeyedTensor:
        """Move to a device.

        Args:
            device: Where to.
            non_blocking: Do not wait for the copy (from pinned memory only).

        Returns:
            A new `KeyedTensor`.
        """
        return self.with_values(self._values.to(device, non_blocking=non_blocking))

    def with_values(self, values: Tensor) -> KeyedTensor:
        """The same keys over other values: what a collection gives in every step, without checking keys again.

        Args:
            values: `[B, D]`.

        Raises:
            InvalidInputError: They have not D columns.
        """
        _validation.check_tensor(_NAME, "values", values, others="")
        if values.shape[self._key_dim : self._key_dim + 1] != self._values.shape[self._key_dim :][:1]:
            raise InvalidInputError(
                f"{_NAME}.with_values: the lengths add up to {sum(self._length_per_key)}, which dimension "
                f"{self._key_dim} of values {list(values.shape)} must have."
            )
        return self._trusted(
            self._keys,
            self._length_per_key,
            values,
            self._key_dim,
            offset_per_key=self._offset_per_key,
            index_per_key=self._index_per_key,
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Keep the memory from being reused until the work queued on `stream` by now is done."""
        self._values.record_stream(stream)

    def __str__(self) -> str:
        entries = (f'"{key}": {_text.rows(self[key])}' for key in self._keys)
        return _text.braces(_NAME, entries, len(self._keys))

    def __repr__(self) -> str:
        return (
            f"{_NAME}(keys={_text.keys(self._keys)}, shape={list(self._values.shape)}, "
            f"key_dim={self._key_dim}, dtype={_text.dtype_name(self._values)}, "
            f"device='{self._values.device}')"
        )

    def _key_indices(self) -> dict[str, int]:
        if self._index_per_key is None:
            self._index_per_key = {key: i for i, key in enumerate(self._keys)}
        return self._index_per_key

    def _offsets(self) -> list[int]:
        if self._offset_per_key is None:
            self._offset_per_key = [0, *accumulate(self._length_per_key)]
        return self._offset_per_key


def _check_key_dim(owner: str, key_dim: int, values: Tensor) -> None:
    if not 0 <= key_dim < values.dim():
        raise InvalidInputError(
            f"{owner}: key_dim is {key_dim}, but the values have {values.dim()} dimensions, which "
            "count from 0."
        )


def _check_same_shape(owner: str, keys: Sequence[str], shapes: Sequence[list[int]], key_dim: int) -> None:
    for key, shape in zip(keys, shapes, strict=True):
        if shape != shapes[0]:
            raise InvalidInputError(
                f"{owner}: besides dimension {key_dim}, key {keys[0]!r} has shape {shapes[0]}, "
                f"key {key!r} {shape}."
            )


def _common_key_dim(keyed_tensors: Sequence[KeyedTensor]) -> int:
    dims = [keyed.key_dim() for keyed in keyed_tensors]
    for position, dim in enumerate(dims):
        if dim != dims[0]:
            raise InvalidInputError(
                f"{_NAME}.regroup: keyed tensor 0 has key_dim {dims[0]}, keyed tensor {position} has {dim}."
            )
    return dims[0]


def _places(keyed_tensors: Sequence[KeyedTensor]) -> dict[str, list[tuple[int, int, int]]]:
    """Places of each key: `(number of the keyed tensor, start, length)`, several if it is ambiguous."""
    places: dict[str, list[tuple[int, int, int]]] = {}
    for which, keyed in enumerate(keyed_tensors):
        for key, start, length in zip(keyed._keys, keyed._offsets(), keyed._length_per_key, strict=False):
            places.setdefault(key, []).append((which, start, length))
    return places


def _place(places: dict[str, list[tuple[int, int, int]]], key: str) -> tuple[int, int, int]:
    found = places.get(key)
    if found is None:
        raise _validation.unknown_key(f"{_NAME}.regroup", key, places)
    if len(found) > 1:
        raise InvalidInputError(
            f"{_NAME}.regroup: key {key!r} is in keyed tensors {found[0][0]} and {found[1][0]}; which one "
            "is meant?"
        )
    return found[0]


def _gather(keyed_tensors: Sequence[KeyedTensor], spans: Sequence[tuple[int, int, int]], dim: int) -> Tensor:
    # A group of no keys is a tensor of no columns.
    spans = _ops.merge_adjacent(spans) or [(0, 0, 0)]
    parts = [keyed_tensors[which].values().narrow(dim, start, length) for which, start, length in spans]
    return torch.cat(parts, dim=dim)


def _unflatten(leaves: Any, context: list[Any]) -> KeyedTensor:
    (values,) = leaves
    keys, lengths, key_dim = context
    return KeyedTensor._trusted(tuple(keys), tuple(lengths), values, key_dim)


_tree.register(
    KeyedTensor,
    lambda keyed: ([keyed.values()], [keyed.keys(), keyed.length_per_key(), keyed.key_dim()]),
    _unflatten,
)
