"""Batch sizes that differ between keys: a request's features once, its candidates' features many times.

Legend: F keys, B examples of the whole batch, B_f distinct examples of key f, K keys of the inverse indices.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, Self

import torch
from attrs import evolve, frozen
from torch import Tensor

from shardwright.arguments import brief
from shardwright.errors import InvalidInputError
from shardwright.sparse import _validation

_NAME = "KeyedJaggedTensor"


@frozen(eq=False)
class InverseIndices:
    """The place of each example among the distinct examples of each key.

    Args:
        keys: K keys, in the order of the rows.
        places: `[K, B]`, int32 or int64.
    """

    keys: tuple[str, ...]
    places: Tensor

    @property
    def batch_size(self) -> int:
        """B."""
        return self.places.shape[1]

    def of(self, wanted: Sequence[str]) -> Tensor:
        """The rows of some keys, all of which are there: `[len(wanted), B]`."""
        row = {key: index for index, key in enumerate(self.keys)}
        if tuple(wanted) == self.keys:
            return self.places
        return self.places[[row[key] for key in wanted]]


@frozen(eq=False)
class VariableStride:
    """The batch size of each key, and the way back to the whole batch.

    Args:
        per_key_per_rank: For each key B_f, as the numbers that ranks brought of it; without an exchange one number.
        inverse: Place of each example among each key's, or None.
    """

    per_key_per_rank: tuple[tuple[int, ...], ...]
    inverse: InverseIndices | None = None

    @cached_property
    def per_key(self) -> list[int]:
        """B_f of each key."""
        return [sum(numbers) for numbers in self.per_key_per_rank]

    @cached_property
    def starts(self) -> list[int]:
        """Start of each key's bags, and end of the last's: F + 1 numbers."""
        return [0, *accumulate(self.per_key)]

    @property
    def stride(self) -> int:
        """B, if the way back is known, else the greatest B_f."""
        return self.inverse.batch_size if self.inverse else max(self.per_key, default=0)

    def chosen(self, positions: Sequence[int]) -> Self:
        """The same of some keys, in another order."""
        return evolve(self, per_key_per_rank=tuple(self.per_key_per_rank[place] for place in positions))

    def mapped(self, function: Callable[[Tensor], Any]) -> Self:
        """The same with another tensor of places."""
        if self.inverse is None:
            return self
        return evolve(self, inverse=evolve(self.inverse, places=function(self.inverse.places)))


def read(
    keys: Sequence[str],
    num_bags: int,
    stride_per_key_per_rank: Any,
    stride_per_key: Any,
    inverse_indices: Any,
) -> VariableStride | None:
    """Read the arguments of a batch size per key; None if none of them was given.

    Args:
        keys: F names.
        num_bags: Number of bags (lengths) that there are in all.
        stride_per_key_per_rank: For each key a list of numbers, or an int tensor `[F, ranks]`.
        stride_per_key: For each key its number; instead of the former.
        inverse_indices: K keys and `[K, B]`.

    Raises:
        InvalidInputError: They do not fit keys or bags; the text gives the numbers.
    """
    inverse = None if inverse_indices is None else _inverse(inverse_indices)
    if stride_per_key_per_rank is None:
        if stride_per_key is None and inverse is None:
            return None
        even = [num_bags // max(len(keys), 1)] * len(keys)
        strides = [[number] for number in (even if stride_per_key is None else stride_per_key)]
    else:
        strides = stride_per_key_per_rank
    variable = VariableStride(_numbers(keys, strides), inverse)
    if stride_per_key is not None and list(stride_per_key) != variable.per_key:
        raise InvalidInputError(
            f"{_NAME}: stride_per_key is {list(stride_per_key)}, but stride_per_key_per_rank adds up to "
            f"{variable.per_key}."
        )
    if variable.starts[-1] != num_bags:
        sizes = ", ".join(
            f"{key!r} {size}" for key, size in zip(keys[:10], variable.per_key[:10], strict=True)
        )
        raise InvalidInputError(
            f"{_NAME}: the batch sizes of the keys ({sizes}) add up to {variable.starts[-1]}, but there are {num_bags} "
            "bags (lengths); each key needs one for each of its examples."
        )
    return variable


def _numbers(keys: Sequence[str], strides: Any) -> tuple[tuple[int, ...], ...]:
    if isinstance(strides, Tensor):
        strides = strides.tolist()
    try:
        numbers = tuple(tuple(int(number) for number in of_key) for of_key in strides)
    except (TypeError, ValueError):
        raise InvalidInputError(
            f"{_NAME}: stride_per_key_per_rank must be a list of numbers for each key, such as [[1], [4]], got "
            f"{brief(strides)}."
        ) from None
    if len(numbers) != len(keys):
        raise InvalidInputError(
            f"{_NAME}: stride_per_key_per_rank has {len(numbers)} lists for {len(keys)} keys; each key needs one."
        )
    for key, of_key in zip(keys, numbers, strict=True):
        if min(of_key, default=0) < 0:
            raise InvalidInputError(
                f"{_NAME}: stride_per_key_per_rank of key {key!r} is {list(of_key)}; sizes are 0 or more."
            )
    return numbers


def _inverse(given: Any) -> InverseIndices:
    if not isinstance(given, tuple | list) or len(given) != 2 or not isinstance(given[1], Tensor):
        raise InvalidInputError(
            f"{_NAME}: inverse_indices must be (keys, tensor [number of keys, examples]), got {brief(given)}."
        )
    keys, places = given
    _validation.check_keys(_NAME, keys)
    places = _validation.as_indices(_NAME, "inverse_indices", places)
    if places.dim() != 2 or places.shape[0] != len(keys):
        raise InvalidInputError(
            f"{_NAME}: inverse_indices have {len(keys)} keys and shape {list(places.shape)}; they need one row for "
            "each key."
        )
    return InverseIndices(tuple(keys), places)


def check_places(keys: Sequence[str], variable: VariableStride) -> None:
    """Demand that the inverse indices of each key are places of its examples. Reads them.

    Raises:
        InvalidInputError: One is not; names key, example and number.
    """
    inverse = variable.inverse
    if inverse is None or not inverse.places.numel():
        return
    size_of: Mapping[str, int] = dict(zip(keys, variable.per_key, strict=True))
    # Of keys that are not in the batch any place will do: nobody looks them up.
    most = torch.tensor([size_of.get(key, 1 << 62) for key in inverse.keys], device=inverse.places.device)
    wrong = ((inverse.places < 0) | (inverse.places >= most[:, None])).nonzero()
    if wrong.numel():
        row, example = wrong[0].tolist()
        key = inverse.keys[row]
        raise InvalidInputError(
            f"{_NAME}: inverse_indices of key {key!r} are {int(inverse.places[row, example])} for example {example}, "
            f"but the key has {size_of[key]} examples of its own."
        )


def joined(owner: str, parts: Sequence[tuple[Sequence[str], VariableStride]]) -> VariableStride:
    """Join the keys of several batches of the same examples.

    Args:
        owner: The function that speaks.
        parts: Keys and sizes of each batch.

    Raises:
        InvalidInputError: Some have inverse indices and some have none, or theirs are of different batch sizes.
    """
    numbers = tuple(numbers for _, own in parts for numbers in own.per_key_per_rank)
    found = [own.inverse for _, own in parts if own.inverse is not None]
    if not found:
        return VariableStride(numbers)
    if len(found) != len(parts):
        raise InvalidInputError(
            f"{owner}: {len(found)} of {len(parts)} have inverse_indices. Give them to all or to none."
        )
    sizes = [own.batch_size for own in found]
    if len(set(sizes)) > 1:
        raise InvalidInputError(f"{owner}: the inverse_indices are of {sizes} examples; all need the same.")
    places = torch.cat([own.of(keys) for (keys, _), own in zip(parts, found, strict=True)])
    return VariableStride(numbers, InverseIndices(tuple(key for keys, _ in parts for key in keys), places))
