"""Comparison, conversion and validation of `KeyedJaggedTensor`s, under TorchRec's names."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor, nn

import shardwright as sw

__all__ = [
    "ComputeJTDictToKJT",
    "ComputeKJTToJTDict",
    "jt_is_equal",
    "kjt_is_equal",
    "validate_keyed_jagged_tensor",
]


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


class ComputeKJTToJTDict(nn.Module):
    """A module that parts a batch into a `JaggedTensor` for each key."""

    def forward(self, keyed_jagged_tensor: sw.KeyedJaggedTensor) -> dict[str, sw.JaggedTensor]:
        """The bags of each key."""
        return keyed_jagged_tensor.to_dict()


class ComputeJTDictToKJT(nn.Module):
    """A module that joins a `JaggedTensor` for each key."""

    def forward(self, jt_dict: dict[str, sw.JaggedTensor]) -> sw.KeyedJaggedTensor:
        """A batch of the keys in the mapping's order."""
        return sw.KeyedJaggedTensor.from_jt_dict(jt_dict)


def validate_keyed_jagged_tensor(
    kjt: sw.KeyedJaggedTensor, configs: Sequence[sw.EmbeddingBagConfig] | None = None
) -> bool:
    """Check a batch, and its ids against the rows of tables.

    Args:
        kjt: the batch.
        configs: tables that it is looked up in; ids are not compared without them.

    Returns:
        True if each id is a row of its tables; false, with a warning that names the first other, if not.

    Raises:
        InvalidInputError: it is no valid batch, a `ValueError`.
    """
    kjt.validate()
    problem = kjt.lookup_problem(kjt.keys())
    if problem:
        raise sw.InvalidInputError(problem)
    bags = kjt.to_dict()
    return all(
        _are_rows(bags[feature].values(), feature, config)
        for config in configs or ()
        for feature in config.feature_names
        if feature in bags
    )


def _are_rows(ids: Tensor, feature: str, config: sw.EmbeddingBagConfig) -> bool:
    wrong = ids[(ids < 0) | (ids >= config.num_embeddings)]
    if wrong.numel():
        warnings.warn(
            f"feature {feature!r}: {wrong.numel()} of {ids.numel()} ids are no rows of table {config.name!r}, which "
            f"has {config.num_embeddings}; the first is {int(wrong[0])}",
            RuntimeWarning,
            stacklevel=3,
        )
    return not wrong.numel()
