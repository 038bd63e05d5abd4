"""Ids that are out of their table's range.

Legend: F features, N ids.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardwright.planning.arrays import Ints
from shardwright.runtime.step.segments import FALSE, LastResult, starts_of

ANY = -1
"""Greatest id of a feature whose ids are not rows."""


def out_of_range(values: Tensor, counts: Tensor, highest: Tensor) -> Tensor:
    """True for each id that is out of range: ``[N]``; arguments are those of :func:`are_in_range`, on a device."""
    # Not by repeating each feature's: counts that do not add up to N, of which is told later, would write beyond it.
    places = torch.arange(values.numel(), device=values.device)
    feature = torch.searchsorted(counts.cumsum(0), places, right=True).clamp_(max=len(counts) - 1)
    most = highest.index_select(0, feature)
    return ((values < 0) | (values > most)) & (most != ANY)


def are_in_range(values: Tensor, counts: Ints, highest: Tensor, last: LastResult) -> bool:
    """Tell whether all ids in the host's memory are ``0 <= id <= highest`` of their feature, in one call of NumPy.

    Read as unsigned numbers, negative ids are greater than any row, and ``highest`` of -1 allows all.

    Args:
        values: ids, feature after feature, ``[N]`` int64.
        counts: number of ids of each feature, ``[F]``.
        highest: greatest id of each feature, ``[F]`` int64; -1 if any id is allowed.
        last: starts and limits found for the last counts, with the same ``highest``.
    """

    def with_ids(counts: Ints) -> tuple[Ints, Any]:
        used = counts.nonzero()[0]  # reduceat would take the next feature's first id for the maximum of none
        return starts_of(counts)[used], highest.numpy().view(np.uint64)[used]

    starts, most = last.of(with_ids, counts)
    if not starts.size:
        return True
    return FALSE not in (np.maximum.reduceat(values.numpy().view(np.uint64), starts) <= most).tobytes()
