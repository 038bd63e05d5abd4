"""Ids as others hold them (nested lists, NumPy arrays, columns of pandas and Arrow), made into values and lengths.

Legend: B examples, V values of one feature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from numbers import Real
from operator import is_
from typing import Any, TypeAlias

import numpy as np
import torch
from attrs import frozen
from numpy.typing import NDArray
from torch import Tensor

from shardwright.arguments import brief, check_unmasked
from shardwright.contracts.compute_kernel import NO_COLUMNS, WEIGHTS
from shardwright.errors import InvalidInputError
from shardwright.sparse import _keyed_validation, _validation
from shardwright.sparse._jagged import named

_Convert: TypeAlias = Callable[[str, Any, NDArray[np.int32]], NDArray[Any]]


@frozen(eq=False)
class Column:
    """One feature.

    Args:
        values: ids, int64, or weights, float32: ``[V]``.
        lengths: number of values of each example, int32: ``[B]``.
    """

    values: NDArray[Any]
    lengths: NDArray[np.int32]


def as_tensors(owner: str, **given: Any) -> list[Any]:
    """The tensors of NumPy arrays, or of what can be made one (a pandas ``Series``); anything else as it is.

    Args:
        owner: who speaks.
        given: the arguments, by name.

    Raises:
        InvalidInputError: torch makes no tensor of an array, or some of it is masked; names the argument.
    """
    return [_as_tensor(owner, name, value) for name, value in given.items()]


def as_columns(owner: str, weights: Tensor | None, columns: Mapping[str, Any] | None) -> dict[str, Any]:
    """The columns beside ids, weights first; NumPy arrays as tensors.

    Raises:
        InvalidInputError: columns are no mapping, a name is none that a column may have, or weights are given twice.
    """
    return {name: _as_tensor(owner, name, own) for name, own in _beside(owner, weights, columns).items()}


def _beside(owner: str, weights: Any, columns: Mapping[str, Any] | None) -> dict[str, Any]:
    """The values of each column as they were given, weights first."""
    own, taken = {} if columns is None else columns, (*NO_COLUMNS, *named(weights))
    if not isinstance(own, Mapping) or not all(isinstance(name, str) and name not in taken for name in own):
        raise InvalidInputError(
            f"{owner}: columns={brief(list(own) if isinstance(own, Mapping) else own)} is not possible: names are "
            f"strings, each with its numbers in a mapping; {WEIGHTS!r} are given once, and no column is named "
            f"{', '.join(map(repr, NO_COLUMNS))}.",
            subject="columns",
        )
    return {**named(weights), **own}


def _as_tensor(owner: str, name: str, value: Any) -> Any:
    if isinstance(value, Tensor) or not hasattr(value, "__array__"):
        return value
    check_unmasked(owner, name, value)
    array = np.ascontiguousarray(value)
    try:
        # Memory that may not be written, such as Arrow's, is no memory for a tensor.
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    except (TypeError, ValueError) as error:
        raise InvalidInputError(
            f"{owner}: torch makes no tensor of {name}, an array of {array.dtype}. Bags as lists: "
            "KeyedJaggedTensor.from_lists",
            subject=name,
            asked=str(array.dtype),
        ) from error


def columns_of_lists(owner: str, lists: Any) -> dict[str, Column]:
    """The ids of each feature of a mapping, or of a pandas ``DataFrame``.

    Raises:
        InvalidInputError: it is neither, or something in it is no id; names feature and example.
    """
    return {key: _column(f"{owner}: key {key!r}", lists[key], _ids) for key in _keys(owner, lists)}


def beside_lists(owner: str, weights: Any, columns: Mapping[str, Any] | None) -> dict[str, dict[str, Column]]:
    """The weights and other columns by name, of each feature likewise."""
    return {
        name: {
            key: _column(f"{owner}: {name} of key {key!r}", own[key], partial(_reals, name))
            for key in _keys(f"{owner}: {name}", own)
        }
        for name, own in _beside(owner, weights, columns).items()
    }


def joined(
    owner: str, ids: Mapping[str, Column], columns: Mapping[str, Mapping[str, Column]]
) -> dict[str, Any]:
    """The arguments of a ``KeyedJaggedTensor``: all features, one after the other.

    Weights are float32; so is another column unless all its numbers are integers.

    Raises:
        InvalidInputError: features differ in their examples, or columns in theirs from the ids.
    """
    names = [f"key {key!r}" for key in ids]
    _keyed_validation.check_same_stride(owner, names, [len(column.lengths) for column in ids.values()])
    beside = {}
    for name, own in columns.items():
        _check_beside(owner, name, ids, own)
        array = np.concatenate([own[key].values for key in ids])
        beside[name] = array.astype(np.float32) if name == WEIGHTS or array.dtype.kind == "f" else array
    return {
        "values": torch.from_numpy(np.concatenate([column.values for column in ids.values()])),
        "lengths": torch.from_numpy(np.concatenate([column.lengths for column in ids.values()])),
        "columns": beside,
    }


def _keys(owner: str, lists: Any) -> list[str]:
    if not (hasattr(lists, "keys") and hasattr(lists, "__getitem__")):
        raise InvalidInputError(
            f"{owner}: a mapping from each feature to its bags is needed, as {{'user': [[7, 8], [], [9]]}}, or a "
            f"DataFrame of pandas; got {type(lists).__name__}."
        )
    keys = list(lists.keys())
    _validation.check_keys(owner, keys)
    return keys


def _column(where: str, column: Any, convert: _Convert) -> Column:
    """A feature's bags, each a list, an array, a single number or missing."""
    column = _unmasked(column)
    if isinstance(column, Tensor):
        _validation.check_tensor(where, "its bags", column)
        column = column.detach().cpu().numpy()
    elif hasattr(column, "__array__"):
        # A nullable column of pandas would be made floats, which hold no large ids.
        is_plain = isinstance(getattr(column, "dtype", None), np.dtype)
        column = np.asarray(column, dtype=None if is_plain else object)
    if isinstance(column, np.ndarray) and column.dtype != object:
        return _regular(where, column, convert)
    if isinstance(column, str | bytes | Mapping) or not isinstance(column, Iterable):
        raise InvalidInputError(f"{where}: a list with a bag for each example is needed, got {column!r}.")
    bags = [_bag(where, example, bag) for example, bag in enumerate(column)]
    lengths = np.fromiter(map(len, bags), dtype=np.int32, count=len(bags))
    return Column(convert(where, _flat(bags), lengths), lengths)


def _regular(where: str, array: NDArray[Any], convert: _Convert) -> Column:
    """Read an array ``[B]`` or ``[B, n]``, in which all examples have the same number of values."""
    if array.ndim not in (1, 2):
        raise InvalidInputError(
            f"{where}: an array must be [examples] or [examples, ids], got {list(array.shape)}."
        )
    lengths = np.full(len(array), array.shape[1] if array.ndim == 2 else 1, dtype=np.int32)
    return Column(convert(where, array.ravel(), lengths), lengths)


def _unmasked(values: Any) -> Any:
    """An array in which what was masked is ``None``; anything else as it is."""
    if values is np.ma.masked:
        return None
    is_masked = isinstance(values, np.ma.MaskedArray) and np.ma.is_masked(values)
    return np.where(np.ma.getmaskarray(values), None, values.data.astype(object)) if is_masked else values


def _bag(where: str, example: int, bag: Any) -> Any:
    """The numbers of one example."""
    bag = _unmasked(bag)
    if _is_missing(bag):
        return ()
    if isinstance(bag, Real):
        return (bag,)
    if isinstance(bag, str | bytes | Mapping) or not (hasattr(bag, "__len__") and hasattr(bag, "__iter__")):
        raise InvalidInputError(
            f"{where}, example {example}: a bag is a list of numbers, a single one or None, got {bag!r}."
        )
    return bag


def _is_missing(entry: Any) -> bool:
    """True if an entry is missing: ``None``, NaN, or pandas' ``NA``, without importing pandas."""
    return entry is None or (isinstance(entry, float) and entry != entry) or type(entry).__name__ == "NAType"


def _flat(bags: Sequence[Any]) -> Sequence[Any] | NDArray[Any]:
    if bags and all(isinstance(bag, np.ndarray) and bag.ndim == 1 for bag in bags):
        return np.concatenate(bags)
    return list(chain.from_iterable(bags))


def _ids(where: str, flat: Sequence[Any] | NDArray[Any], lengths: NDArray[np.int32]) -> NDArray[np.int64]:
    array = _numbers(flat, "iu")
    if array is None:
        raise InvalidInputError(
            f"{where}{_first_wrong(flat, lengths, (int, np.integer))} is no id: ids are integers below 2**63. Hash or "
            "look up strings first; .astype('Int64') keeps the integers of a pandas column with missing entries."
        )
    return array.astype(np.int64, copy=False)


def _reals(
    column: str, where: str, flat: Sequence[Any] | NDArray[Any], lengths: NDArray[np.int32]
) -> NDArray[Any]:
    array = _numbers(flat, "iuf")
    if array is None:
        raise InvalidInputError(
            f"{where}{_first_wrong(flat, lengths, (Real,))} is no {column.removesuffix('s')}: {column} must be numbers."
        )
    return array.astype(np.float32 if array.dtype.kind == "f" else np.int64, copy=False)


def _numbers(flat: Sequence[Any] | NDArray[Any], kinds: str) -> NDArray[Any] | None:
    """They as an array, if all are numbers of NumPy's ``kinds`` that 64 bits hold."""
    # Among floats NumPy makes NaN of what is masked; of integers it makes floats then, which are no ids.
    if "f" in kinds and isinstance(flat, list) and any(map(partial(is_, np.ma.masked), flat)):
        return None
    try:
        array = np.asarray(flat)
    except (ValueError, OverflowError, UserWarning):  # lists of unlike lengths in it; something masked
        return None
    if array.size == 0:
        return np.empty(0, dtype=np.int64)
    fits = array.ndim == 1 and array.dtype.kind in kinds
    return array if fits and not (array.dtype.kind == "u" and array.max() >= 2**63) else None


def _first_wrong(flat: Any, lengths: NDArray[np.int32], kinds: tuple[type, ...]) -> str:
    """Place and look of the first element that is none of ``kinds``, or is too large."""
    for position, element in enumerate(flat):
        is_number = isinstance(element, kinds) and not isinstance(element, bool | np.bool_)
        if not is_number or not -(2**63) <= element < 2**63:
            example = int(np.searchsorted(np.cumsum(lengths), position, side="right"))
            return f", example {example}: {element!r}"
    return ": what it holds"


def _check_beside(owner: str, name: str, ids: Mapping[str, Column], given: Mapping[str, Column]) -> None:
    if set(ids) != set(given):
        without = [key for key in ids if key not in given] or sorted(set(given) - set(ids))
        raise InvalidInputError(
            f"{owner}: {name} are of the keys {list(given)}, ids of {list(ids)}; {without[0]!r} has only one of "
            f"both. All keys have {name}, or none."
        )
    for key, column in ids.items():
        own = given[key].lengths
        if len(own) != len(column.lengths):
            raise InvalidInputError(
                f"{owner}: key {key!r} has ids of {len(column.lengths)} examples, and {name} of {len(own)}."
            )
        unlike = np.flatnonzero(own != column.lengths)
        if len(unlike):
            example = int(unlike[0])
            raise InvalidInputError(
                f"{owner}: key {key!r}, example {example}: {column.lengths[example]} ids and {own[example]} {name}. "
                "Each id needs one."
            )
