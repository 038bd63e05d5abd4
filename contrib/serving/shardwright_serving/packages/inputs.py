"""Checks of a program's inputs, which compiled programs do not make.

Legend: F features, B samples, N ids of all features.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from shardwright import InvalidInputError
from shardwright_serving.packages.manifest import Feature


def check_ids(features: Sequence[Feature], values: Tensor, lengths: Tensor) -> None:
    """Check that ids are rows.

    Args:
        features: the F features in order.
        values: ids ``[N]``, one feature after the other.
        lengths: number of ids of each sample and feature, ``[F * B]``.

    Raises:
        InvalidInputError: an id is no row of its feature's smallest table.
    """
    counts = lengths.reshape(len(features), -1).sum(1).tolist()
    for feature, own in zip(features, values.split(counts), strict=True):
        if feature.num_embeddings is None or not len(own):
            continue
        for found in (int(own.min()), int(own.max())):
            if not 0 <= found < feature.num_embeddings:
                raise InvalidInputError(
                    f"feature {feature.name!r}: id {found} is not an id of 0 to {feature.num_embeddings - 1}"
                )
