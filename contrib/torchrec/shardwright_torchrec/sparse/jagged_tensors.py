"""Comparison of batches, under TorchRec's names."""

from __future__ import annotations

import torch
from torch import Tensor

import shardwright as sw


def kjt_is_equal(kjt_1: sw.KeyedJaggedTensor, kjt_2: sw.KeyedJaggedTensor) -> bool:
    """True if two batches have the same keys in the same order, and the same bags, ids and weights."""
    if not isinstance(kjt_1, sw.KeyedJaggedTensor) or not isinstance(kjt_2, sw.KeyedJaggedTensor):
        return False
    facts = [
        (kjt.keys(), kjt.stride(), kjt.stride_per_key_per_rank(), _keys_of_places(kjt))
        for kjt in (kjt_1, kjt_2)
    ]
    if facts[0] != facts[1]:
        return False
    pairs = zip(_tensors(kjt_1), _tensors(kjt_2), strict=True)
    return all(_is_equal(one, other) for one, other in pairs)


def jt_is_equal(jt_1: sw.JaggedTensor, jt_2: sw.JaggedTensor) -> bool:
    """True if two are `JaggedTensor`s of the same bags, values and weights."""
    if not isinstance(jt_1, sw.JaggedTensor) or not isinstance(jt_2, sw.JaggedTensor):
        return False
    pairs = [(own.values(), own.lengths(), own.weights_or_none()) for own in (jt_1, jt_2)]
    return all(_is_equal(one, other) for one, other in zip(*pairs, strict=True))


def _keys_of_places(kjt: sw.KeyedJaggedTensor) -> list[str] | None:
    inverse = kjt.inverse_indices_or_none()
    return None if inverse is None else inverse[0]


def _tensors(kjt: sw.KeyedJaggedTensor) -> list[Tensor | None]:
    inverse = kjt.inverse_indices_or_none()
    return [kjt.values(), kjt.lengths(), kjt.weights_or_none(), None if inverse is None else inverse[1]]


def _is_equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and torch.allclose(one, other)
