"""Samples of requests as arrays: several requests are joined to one batch, and its outputs parted again.

Legend: B samples of a request, F features, N ids of a feature in a request.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen
from numpy.typing import NDArray


@frozen
class Samples:
    """The samples of one request.

    Attributes:
        lengths: number of ids of each sample in each feature, int64 ``[F, B]``.
        ids: ids of each feature, int64 ``[N]`` each.
        weights: weights of the ids of each feature, float32 ``[N]`` each; none unless programs take weights.
        dense: dense input, float32 ``[B, columns]``, if there is one.
    """

    lengths: NDArray[np.int64]
    ids: tuple[NDArray[np.int64], ...]
    weights: tuple[NDArray[np.float32], ...] = ()
    dense: NDArray[np.float32] | None = None

    def __len__(self) -> int:
        return int(self.lengths.shape[1])


def joined(requests: Sequence[Samples]) -> list[NDArray[np.int64] | NDArray[np.float32]]:
    """Join requests to the inputs of a program: values, lengths, weights and dense, the latter two if there are.

    Within a feature the requests follow one another in order, so that the batch has one request's samples after
    the other's.
    """
    first = requests[0]
    features = range(len(first.ids))
    inputs: list[NDArray[np.int64] | NDArray[np.float32]] = [
        np.concatenate([request.ids[feature] for feature in features for request in requests]),
        np.concatenate([request.lengths for request in requests], axis=1).reshape(-1),
    ]
    if first.weights:
        inputs.append(np.concatenate([one.weights[feature] for feature in features for one in requests]))
    if first.dense is not None:
        inputs.append(np.concatenate([one.dense for one in requests if one.dense is not None]))
    return inputs
