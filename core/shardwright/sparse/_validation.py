"""Checks of the sparse types' arguments.

Checks are of two sorts. Those of *form* (dtypes, shapes, devices, keys) look at metadata only, and are made at
construction. Those of *content* read lengths or offsets, which on an accelerator waits for it. A `JaggedTensor` on a
CPU is checked at construction, and a `KeyedJaggedTensor` on a CPU once, where it is first looked up or parted.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, KeysView, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from shardwright.arguments import brief
from shardwright.errors import DuplicateNameError, InvalidInputError, UnknownNameError, nearest
from shardwright.sparse import _text

_INDEX_DTYPES = (torch.int32, torch.int64)


class _NoTensorError(InvalidInputError, AttributeError):
    """An attribute that tensors may have is asked of several of them."""


class NoTensor:
    """The base of types that hold tensors: what is asked of them as of a tensor is an error that says so."""

    __slots__ = ()

    if not TYPE_CHECKING:  # which knows the attributes

        def __getattr__(self, name: str) -> Any:
            kind = type(self).__name__
            # torch.compile cannot trace the constructor of this library's errors.
            error = AttributeError if torch.compiler.is_compiling() else _NoTensorError
            raise error(f"{kind!r} object has no attribute {name!r}: it is no tensor, its values() are")


def as_indices(owner: str, what: str, tensor: Tensor) -> Tensor:
    """Demand int32 or int64; `torch.tensor([])`, which torch makes float32, is taken as no indices at all."""
    check_tensor(owner, what, tensor)
    if tensor.dtype in _INDEX_DTYPES:
        return tensor
    if tensor.numel() == 0:
        return tensor.long()
    raise InvalidInputError(
        f"{owner}: {what} must be int32 or int64, got {_text.dtype_name(tensor)}. Convert: .long()"
    )


def check_tensor(owner: str, what: str, value: object, others: str = " or a NumPy array") -> None:
    """Demand a tensor with an element for each place; ``others`` are what has been made one."""
    if not isinstance(value, Tensor):
        raise InvalidInputError(
            f"{owner}: {what} must be a torch.Tensor{others}, got {type(value).__name__}."
        )
    if value.layout is not torch.strided or value.is_nested:
        kind = "nested" if value.is_nested else str(value.layout).removeprefix("torch.")
        raise InvalidInputError(
            f"{owner}: {what} must be a dense tensor, got a {kind} one. Convert: .to_dense(); or, where ids are the "
            "places of a sparse one, .coalesce().indices()",
            subject=what,
            asked=kind,
        )


def check_vector(owner: str, what: str, tensor: Tensor) -> None:
    """Demand one dimension."""
    if tensor.dim() != 1:
        raise InvalidInputError(
            f"{owner}: {what} must have 1 dimension, got {tensor.dim()}: shape {list(tensor.shape)}."
        )


def check_one_of_lengths_offsets(owner: str, lengths: Tensor | None, offsets: Tensor | None) -> None:
    """Demand lengths or offsets."""
    if lengths is None and offsets is None:
        raise InvalidInputError(
            f"{owner}: give either lengths or offsets (the other is derived), got neither."
        )


def check_bags(
    owner: str,
    lengths: Tensor | None,
    offsets: Tensor | None,
    num_values: int,
    whose: Callable[[int], str] | None = None,
    *,
    others_allowed: bool = False,
) -> None:
    """Demand lengths and offsets, those that are given, of the same bags that hold the values. Reads them.

    Args:
        owner: The type that speaks.
        lengths: `[N]`.
        offsets: `[N + 1]`.
        num_values: Number of values.
        whose: Says, of the position of a bag, which one it is.
        others_allowed: There may be more values than the bags hold.
    """
    if lengths is not None:
        _check_lengths(owner, lengths, num_values, whose, others_allowed=others_allowed)
    if offsets is not None:
        _check_offsets(owner, offsets, num_values, whose, others_allowed=others_allowed)
    if lengths is None or offsets is None:
        return
    own = offsets.diff()
    if own.shape != lengths.shape:
        raise InvalidInputError(f"{owner}: got {lengths.numel()} lengths and offsets of {own.numel()} bags.")
    differ = (own != lengths).nonzero()
    if differ.numel():
        bag = int(differ[0])
        raise InvalidInputError(
            f"{owner}: lengths[{bag}] is {int(lengths[bag])}, but by the offsets bag {bag} holds {int(own[bag])} "
            "values."
        )


def check_offsets_form(owner: str, offsets: Tensor) -> None:
    """Demand a vector that has at least the leading 0."""
    check_vector(owner, "offsets", offsets)
    if offsets.numel() == 0:
        raise InvalidInputError(
            f"{owner}: offsets must have a leading 0, so 1 element for 0 bags; got 0 elements."
        )


def check_weights_form(owner: str, weights: Tensor, values: Tensor) -> None:
    """Demand one weight per value."""
    check_tensor(owner, "weights", weights)
    if weights.dim() == 0 or weights.shape[0] != values.shape[0]:
        got = f"{weights.shape[0]} weights" if weights.dim() else "a scalar weight"
        raise InvalidInputError(
            f"{owner}: got {got} for {values.shape[0]} values. Each value needs one weight."
        )


def check_column(owner: str, name: str, column: Tensor, values: Tensor) -> None:
    """Demand one number of a column per value; of weights any numbers, else such as travel beside ids."""
    if name == "weights":
        check_weights_form(owner, column, values)
    else:
        check_tensor(owner, f"column {name!r}", column)
        if column.dtype not in (torch.int64, torch.float32) or column.shape[:1] != values.shape[:1]:
            raise InvalidInputError(
                f"{owner}: column {name!r} is {column.dtype} {list(column.shape)} for {values.shape[0]} values; a "
                "column is int64 or float32, one number for each value.",
                subject=name,
            )
    check_vector(owner, name, column)


def check_devices(owner: str, values: Tensor, /, **others: Tensor | None) -> None:
    """Demand that everything lies where the values lie."""
    for what, tensor in others.items():
        if tensor is not None and tensor.device != values.device:
            raise InvalidInputError(
                f"{owner}: values are on {values.device}, {what} on {tensor.device}. Move them to one device."
            )


def joined(owner: str, what: str, tensors: Sequence[Tensor]) -> Tensor:
    """Join tensors along their first dimension.

    Raises:
        InvalidInputError: one is a scalar, or has another width or device than the first.
    """
    try:
        return torch.cat(list(tensors))
    except RuntimeError:
        first = tensors[0]
        for index, tensor in enumerate(tensors):
            is_alike = tensor.shape[1:] == first.shape[1:] and tensor.device == first.device
            if tensor.dim() == 0 or not is_alike:
                raise InvalidInputError(
                    f"{owner}: {what}[{index}] has shape {list(tensor.shape)} on {tensor.device}, and {what}[0] has "
                    f"{list(first.shape)} on {first.device}; all need the same but for the first dimension."
                ) from None
        raise


def check_keys(owner: str, keys: Sequence[str], *, distinct: bool = True) -> dict[str, int]:
    """Demand strings, and distinct ones unless told otherwise.

    Returns:
        The position of each key, the last one if it occurs several times.
    """
    if isinstance(keys, str):
        raise InvalidInputError(f"{owner}: keys must be a list of strings, got the string {keys!r}.")
    is_column = isinstance(keys, Collection) and getattr(keys, "ndim", 0) == 1
    if not (is_column or isinstance(keys, Sequence | KeysView)):
        raise InvalidInputError(f"{owner}: keys must be a list of strings, got {brief(keys)}.")
    for key in keys:
        if not isinstance(key, str):
            raise InvalidInputError(
                f"{owner}: keys must be strings, got {brief(key)} ({type(key).__name__})."
            )
    index = {key: i for i, key in enumerate(keys)}
    if distinct and len(index) != len(keys):
        first = next(place for place, key in enumerate(keys) if index[key] != place)
        raise DuplicateNameError(
            f"{owner}: key {keys[first]!r} occurs at positions {first} and {index[keys[first]]}; keys must be "
            "distinct. (A feature of several tables is one key: name it in feature_names of each.)"
        )
    return index


def check_derived(owner: str, given: Mapping[str, tuple[Any, Callable[[], Any]]]) -> None:
    """Demand that what was given is what follows from keys and lengths.

    Args:
        owner: The type that speaks.
        given: For each argument its value, and a function that derives it.
    """
    for name, (value, derive) in given.items():
        if value is None:
            continue
        derived = derive()
        if type(derived)(value) != derived:
            raise InvalidInputError(
                f"{owner}: {name} is {brief(value)}, but by keys and lengths it is {brief(derived)}. Leave it out."
            )


def _check_lengths(
    owner: str, lengths: Tensor, num_values: int, whose: Callable[[int], str] | None, *, others_allowed: bool
) -> None:
    """Demand lengths >= 0 that add up to the number of values.

    None may exceed that number by itself: huge lengths could add up to it again, modulo 2^64.
    """
    least, most = torch.aminmax(lengths) if lengths.numel() else (0, 0)
    if int(least) < 0:
        position = int(lengths.argmin())
        raise InvalidInputError(
            f"{owner}: lengths[{position}]{_of(whose, position)} is {int(least)}; a bag holds 0 values or more."
        )
    if int(most) > num_values:
        position = int(lengths.argmax())
        raise InvalidInputError(
            f"{owner}: lengths[{position}]{_of(whose, position)} is {int(most)}, but there are {num_values} values."
        )
    total = int(lengths.sum())
    if total > num_values or (total != num_values and not others_allowed):
        raise InvalidInputError(f"{owner}: lengths add up to {total}, but there are {num_values} values.")


def _check_offsets(
    owner: str, offsets: Tensor, num_values: int, whose: Callable[[int], str] | None, *, others_allowed: bool
) -> None:
    """Demand offsets from 0 to the number of values that never fall."""
    first, last = int(offsets[0]), int(offsets[-1])
    if first != 0:
        raise InvalidInputError(f"{owner}: offsets must start at 0, got {first} at their start.")
    if last > num_values or (last != num_values and not others_allowed):
        raise InvalidInputError(f"{owner}: offsets end at {last}, but there are {num_values} values.")
    falls = offsets[1:] < offsets[:-1]
    if bool(falls.any()):
        position = int(falls.nonzero()[0])
        raise InvalidInputError(
            f"{owner}: offsets fall from {int(offsets[position])} to {int(offsets[position + 1])} at bag "
            f"{position}{_of(whose, position)}; a bag holds 0 values or more."
        )


def unknown_key(owner: str, key: object, known: Iterable[str]) -> UnknownNameError:
    """The error for a key that is not there.

    Args:
        owner: The type that speaks.
        key: What was asked for.
        known: The keys that are there.

    Returns:
        The error, to be raised.
    """
    names = list(known)
    some = ", ".join(names[:20]) + (f", ... ({len(names) - 20} more)" if len(names) > 20 else "")
    hint = nearest(key, names) if isinstance(key, str) else " Keys are strings."
    return UnknownNameError(f"{owner}: no key {brief(key)}. It has {len(names)}: {some or 'none'}.{hint}")


def _of(whose: Callable[[int], str] | None, position: int) -> str:
    return f" ({whose(position)})" if whose else ""
