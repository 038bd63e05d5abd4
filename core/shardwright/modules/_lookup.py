"""Lookups in one table by plain torch, feature by feature, and the checks on what is looked up.

Legend: R rows, D columns, V ids, B bags.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from shardwright.arguments import brief
from shardwright.errors import IdRangeError, InvalidInputError, UnknownNameError, nearest
from shardwright.planning.tables.spec import EmbeddingConfig
from shardwright.sparse import JaggedTensor, KeyedJaggedTensor


def bags_of_feature(
    bags_by_feature: Mapping[str, JaggedTensor], feature: str, table: EmbeddingConfig
) -> JaggedTensor:
    """The bags of a feature, checked: they are there, and their ids are rows of the table.

    On an accelerator reading ids would wait for it, and in ``torch.export`` there are none: then only the kernel checks
    them.

    Args:
        bags_by_feature: the input, by feature.
        feature: one of the table's features.
        table: the table that it is looked up in.

    Returns:
        The feature's bags.

    Raises:
        UnknownNameError: the input has no such feature.
        IdRangeError: an id is no row of the table.
    """
    if feature not in bags_by_feature:
        raise UnknownNameError(
            f"feature {feature!r} of table {table.name!r} is not in the input. "
            f"The input has: {', '.join(sorted(bags_by_feature)) or 'nothing'}."
            f"{nearest(feature, bags_by_feature)}"
        )
    bags = bags_by_feature[feature]
    if bags.values().is_cpu and not torch.compiler.is_exporting():
        _check_ids(bags, feature, table)
    return bags


def _check_ids(bags: JaggedTensor, feature: str, table: EmbeddingConfig) -> None:
    ids = bags.values()
    if ids.numel() == 0:
        return
    lowest, highest = (int(extreme) for extreme in torch.aminmax(ids))
    if lowest >= 0 and highest < table.num_embeddings:
        return
    wrong = (ids < 0) | (ids >= table.num_embeddings)
    position = int(wrong.nonzero()[0])
    bag = int(torch.searchsorted(bags.offsets(), position, right=True)) - 1
    raise IdRangeError(
        f"feature {feature!r}: id {int(ids[position])} at position {position} (sample {bag}) is no row of "
        f"table {table.name!r}, which has rows 0 to {table.num_embeddings - 1}. "
        f"{int(wrong.sum())} of {ids.numel()} ids are out of range."
    )


def weights_of_ids(bags: JaggedTensor, feature: str, table: EmbeddingConfig) -> Tensor:
    """The weight of each id, float32: ``[V]``.

    Raises:
        InvalidInputError: the input has no weights.
    """
    weights = bags.weights_or_none()
    if weights is None:
        raise InvalidInputError(
            f"feature {feature!r} of table {table.name!r} has no weights, but the collection is weighted. "
            "Give the KeyedJaggedTensor weights=, or build the collection with is_weighted=False."
        )
    return weights.float()


def look_up(weight: Tensor, ids: Tensor) -> Tensor:
    """The rows of ``ids``, float32 whatever the table's type: ``[V, D]``."""
    return functional.embedding(ids.long(), weight).float()


def look_up_and_pool(
    weight: Tensor, ids: Tensor, offsets: Tensor, weights: Tensor | None, is_mean: bool
) -> Tensor:
    """Sum or average the rows of each bag, in float32; an empty bag gives zeros.

    The mean of weighted rows is their weighted sum divided by their number, not by the sum of weights, as in
    FBGEMM. (``torch.nn.EmbeddingBag`` has no weighted mean.)

    Args:
        weight: ``[R, D]``, the table.
        ids: ``[V]``.
        offsets: ``[B + 1]``, where each bag begins, and the end of the last.
        weights: ``[V]`` float32, or ``None`` for ones.
        is_mean: sums are divided by the numbers of their rows.

    Returns:
        ``[B, D]``, float32.
    """
    ids, offsets = ids.long(), offsets.long()
    if weight.dtype != torch.float32:
        # Sums in half precision lose digits with each id: convert the rows that are used, and sum those.
        weight, ids = look_up(weight, ids), torch.arange(ids.numel(), device=ids.device)
    sums = functional.embedding_bag(
        ids, weight, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True
    )
    if is_mean:
        return sums / offsets.diff().clamp(min=1).unsqueeze(1)
    return sums


def bags_by_feature_of(
    owner: str, features: Any, tables: Sequence[EmbeddingConfig]
) -> dict[str, JaggedTensor]:
    """The bags of each feature, of a batch that tables can look up.

    Raises:
        InvalidInputError: they cannot; the text begins with the owner's name.
    """
    if not isinstance(features, KeyedJaggedTensor):
        raise InvalidInputError(f"{owner}: features must be a KeyedJaggedTensor, got {brief(features)}")
    problem = features.lookup_problem([name for table in tables for name in table.feature_names])
    if problem:
        raise InvalidInputError(f"{owner}: {problem}")
    return features.to_dict()


def places_of_examples(
    features: KeyedJaggedTensor, tables: Sequence[EmbeddingConfig]
) -> Mapping[str, Tensor] | None:
    """The place of each example among those of each feature, ``[B]``; ``None`` if all features have all examples."""
    if not features.variable_stride_per_key():
        return None
    wanted = list(dict.fromkeys(name for table in tables for name in table.feature_names))
    inverse = features.inverse_indices_or_none()
    if inverse is not None:
        keys, places = inverse
        row = {key: index for index, key in enumerate(keys)}
        for name in wanted:
            if name not in row:
                raise InvalidInputError(
                    f"feature {name!r} has no row in the KeyedJaggedTensor's inverse_indices, whose keys are {keys}"
                )
        return {name: places[row[name]].long() for name in wanted}
    sizes = dict(zip(features.keys(), features.stride_per_key(), strict=True))
    own = {name: sizes[name] for name in wanted if name in sizes}
    if len(set(own.values())) > 1:
        raise InvalidInputError(
            f"features have different batch sizes, {own}, and the KeyedJaggedTensor does not say which examples belong "
            "together: give inverse_indices=(keys, places [keys, examples])"
        )
    return None
