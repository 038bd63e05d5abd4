"""Checks of `KeyedJaggedTensor` beyond `_validation`: bags that fit keys, orders that fit keys."""

from __future__ import annotations

from collections.abc import Sequence
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


def check_weights_dtype(weights: Tensor) -> None:
    """Demand floating point."""
    if not weights.is_floating_point():
        dtype = _text.dtype_name(weights)
        raise InvalidInputError(f"{_NAME}: weights must be floating point, got {dtype}. Convert: .float()")


def derive_stride(num_keys: int, num_bags: int, stride: int | None) -> int:
    """The number of examples; one that was given must fit."""
    if stride is None:
        return _stride_of(num_keys, num_bags)
    if isinstance(stride, bool) or not isinstance(stride, int | Integral | torch.SymInt):
        raise InvalidInputError(f"{_NAME}: stride must be an integer, got {brief(stride)}.")
    if stride < 0 or stride * num_keys != num_bags:
        raise InvalidInputError(
            f"{_NAME}: a stride of {stride} and {num_keys} keys need {stride * num_keys} bags (lengths), got "
            f"{num_bags}."
        )
    return stride


def check_segments(segments: Sequence[int], num_keys: int) -> None:
    """Demand counts of keys that add up to all of them."""
    if any(segment < 0 for segment in segments) or sum(segments) != num_keys:
        raise InvalidInputError(
            f"{_NAME}.split: segments must be 0 or more and add up to the {num_keys} keys, got "
            f"{list(segments)}, which add up to {sum(segments)}."
        )


def check_permutation(
    indices: Sequence[int], keys: tuple[str, ...], indices_tensor: Tensor | None = None
) -> None:
    """Demand positions of keys, each at most once, and of a tensor that it can be the same."""
    if indices_tensor is not None and (
        tuple(indices_tensor.shape) != (len(indices),) or indices_tensor.dtype != torch.int32
    ):
        raise InvalidInputError(
            f"{_NAME}.permute: indices_tensor must be int32 [{len(indices)}], as the indices are; got "
            f"{_text.dtype_name(indices_tensor)} {list(indices_tensor.shape)}."
        )
    for position, index in enumerate(indices):
        if not 0 <= index < len(keys):
            raise InvalidInputError(
                f"{_NAME}.permute: indices[{position}] is {index}, but there are {len(keys)} keys; positions "
                "count from 0."
            )
    if len(set(indices)) != len(indices):
        twice = next(index for index in indices if list(indices).count(index) > 1)
        raise InvalidInputError(
            f"{_NAME}.permute: index {twice} (key {keys[twice]!r}) occurs {list(indices).count(twice)} "
            "times; keys must be distinct."
        )


def check_same_stride(owner: str, names: Sequence[str], strides: Sequence[int]) -> None:
    """Demand the same number of examples everywhere."""
    for name, stride in zip(names, strides, strict=True):
        if stride != strides[0]:
            raise InvalidInputError(
                f"{owner}: {names[0]} has {strides[0]} examples, {name} has {stride}. An example without the "
                "feature needs an empty bag (a length of 0)."
            )


def _stride_of(num_keys: int, num_bags: int) -> int:
    if num_keys == 0 and num_bags:
        raise InvalidInputError(f"{_NAME}: got {num_bags} bags (lengths) for 0 keys.")
    if num_keys and num_bags % num_keys:
        raise InvalidInputError(
            f"{_NAME}: {num_bags} bags (lengths) do not divide by {num_keys} keys; each key needs one "
            "per example."
        )
    return num_bags // num_keys if num_keys else 0
