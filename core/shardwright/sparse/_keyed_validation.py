"""Checks of `KeyedJaggedTensor` beyond `_validation`: bags that fit keys, orders that fit keys."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from numbers import Integral

import torch
from torch import Tensor

from shardwright.arguments import brief
from shardwright.errors import InvalidInputError
from shardwright.sparse import _text, _validation

_NAME = "KeyedJaggedTensor"


def flat_lengths(lengths: Tensor, num_keys: int) -> Tensor:
    """Lengths as a vector; a matrix must be `[F, B]`."""
    lengths = _validation.as_indices(_NAME, "lengths", lengths)
    if lengths.dim() == 2 and lengths.shape[0] == num_keys:
        return lengths.flatten()
    if lengths.dim() != 1:
        raise InvalidInputError(
            f"{_NAME}: lengths must have shape [F * B] or [F, B] with F = {num_keys} keys, got "
            f"{list(lengths.shape)}."
        )
    return lengths


def as_values(owner: str, values: Tensor) -> Tensor:
    """Demand a tensor; `torch.tensor([])`, which torch makes float32, is taken as no ids."""
    _validation.check_tensor(owner, "values", values)
    return values.long() if values.numel() == 0 and values.dtype is torch.float32 else values


def lookup_problem(keys: Sequence[str], values: Tensor, num_used: int, wanted: Collection[str]) -> str:
    """The reason why tables cannot look a batch up, although it is a batch; empty if they can.

    Args:
        keys: Its keys.
        values: `[V]`.
        num_used: Number of values that bags hold.
        wanted: Features that are looked up, each of which must occur once.
    """
    if values.dtype not in (torch.int32, torch.int64):
        return f"the values of the {_NAME} are {_text.dtype_name(values)}; ids are int32 or int64. Convert: .long()"
    if torch.compiler.is_exporting():  # a check of the program, since numbers are not known yet
        torch._check(num_used == values.shape[0])
    elif num_used != values.shape[0]:
        return (
            f"the lengths of the {_NAME} add up to {num_used}, but there are {values.shape[0]} values: those beyond "
            "the bags would be left out. Give values[:number] if they are to be"
        )
    if not wanted or len(set(keys)) == len(keys):
        return ""
    for key in wanted:
        places = [place for place, own in enumerate(keys) if own == key]
        if len(places) > 1:
            return (
                f"key {key!r} of the {_NAME} occurs at positions {places[0]} and {places[1]}; which one is meant? "
                "For lookups keys must be unique: a feature of several tables is named in feature_names of each."
            )
    return ""


def derive_stride(num_keys: int, num_bags: int, stride: int | None) -> int:
    """The number of examples; one that was given must fit."""
    if stride is None:
        if not num_keys and num_bags:
            raise InvalidInputError(f"{_NAME}: got {num_bags} bags (lengths) for 0 keys.")
        if num_bags % max(num_keys, 1):
            raise InvalidInputError(
                f"{_NAME}: {num_bags} bags (lengths) do not divide by {num_keys} keys; each key needs one "
                "per example."
            )
        return num_bags // max(num_keys, 1)
    if isinstance(stride, bool) or not isinstance(stride, int | Integral | torch.SymInt):
        raise InvalidInputError(f"{_NAME}: stride must be an integer, got {brief(stride)}.")
    if stride < 0 or stride * num_keys != num_bags:
        raise InvalidInputError(
            f"{_NAME}: a stride of {stride} and {num_keys} keys need {stride * num_keys} bags (lengths), got "
            f"{num_bags}."
        )
    return stride


def even_counts(num_keys: int, num_values: int) -> list[int]:
    """Numbers of values of each key where lengths cannot be read, as even as can be."""
    return [num_values // num_keys + (place < num_values % num_keys) for place in range(num_keys)]


def check_segments(segments: Sequence[int], num_keys: int) -> None:
    """Demand counts of keys that add up to all of them."""
    if any(segment < 0 for segment in segments) or sum(segments) != num_keys:
        raise InvalidInputError(
            f"{_NAME}.split: segments must be 0 or more and add up to the {num_keys} keys, got "
            f"{list(segments)}, which add up to {sum(segments)}."
        )


def check_permutation(indices: Sequence[int], num_keys: int, indices_tensor: Tensor | None = None) -> None:
    """Demand positions of keys, and of a tensor that it can be the same."""
    if indices_tensor is not None and (
        tuple(indices_tensor.shape) != (len(indices),) or indices_tensor.dtype != torch.int32
    ):
        raise InvalidInputError(
            f"{_NAME}.permute: indices_tensor must be int32 [{len(indices)}], as the indices are; got "
            f"{_text.dtype_name(indices_tensor)} {list(indices_tensor.shape)}."
        )
    for position, index in enumerate(indices):
        if not 0 <= index < num_keys:
            raise InvalidInputError(
                f"{_NAME}.permute: indices[{position}] is {index}, but there are {num_keys} keys; positions "
                "count from 0."
            )


def check_same_stride(owner: str, names: Sequence[str], strides: Sequence[int]) -> None:
    """Demand the same number of examples everywhere."""
    for name, stride in zip(names, strides, strict=True):
        if stride != strides[0]:
            raise InvalidInputError(
                f"{owner}: {names[0]} has {strides[0]} examples, {name} has {stride}. An example without the "
                "feature needs an empty bag (a length of 0)."
            )
