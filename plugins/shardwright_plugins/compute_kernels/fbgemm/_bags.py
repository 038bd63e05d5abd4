"""The order of bags in FBGEMM's calls: slot after slot, and within a slot source after source.

Legend: S slots, W sources, N ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from shardwright.contracts.lookup import Bags
from shardwright.planning.arrays import Ints
from shardwright.runtime.ranks.devices import is_host, sent_to
from shardwright.runtime.step.segments import starts_of, sums, take


def offsets_of_ids(counts: Ints, device: torch.device) -> Tensor:
    """Offsets of bags that hold a slot's ids, as many bags in each slot: ``[bags + 1]``.

    On the CPU a slot's ids are one bag. On a device FBGEMM gives a bag one warp, so each id is a bag; slots with fewer
    ids than others have empty bags at their end.

    Args:
        counts: ids of each slot, ``[S]``.
        device: device of the offsets.
    """
    starts = starts_of(counts)
    if is_host(device):
        return torch.from_numpy(np.append(starts, counts.sum()))
    first, own = sent_to(device, starts)[:, None], sent_to(device, counts)[:, None]
    number = torch.arange(int(counts.max(initial=1)), device=device)
    return torch.cat([(first + torch.minimum(number, own)).view(-1), (first + own)[-1]])


def offsets_of(lengths: Tensor) -> Tensor:
    offsets = lengths.new_zeros(lengths.numel() + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets


class Cells:
    """Reordering of values that come by source, then by slot, to FBGEMM's order: by slot, then by source.

    Args:
        sizes: number of elements of each source and slot, ``[W, S]``.
    """

    def __init__(self, sizes: Ints) -> None:
        self._sizes, self._of_slots = np.ascontiguousarray(sizes.T).reshape(-1), sizes.sum(0).tolist()
        self._place = np.arange(sizes.size).reshape(sizes.shape).T.reshape(-1)
        self._starts = starts_of(sizes.reshape(-1))[self._place]

    def slot_major(self, values: Tensor) -> Tensor:
        """The elements slot after slot."""
        return take(values, self._starts, self._sizes)

    def dealt(self, values: Tensor) -> Sequence[Tensor]:
        """The elements of each slot, source after source."""
        return self.slot_major(values).split(self._of_slots)

    def as_they_came(self, values: Tensor) -> Tensor:
        """Reorder from FBGEMM's order to that in which values came."""
        back = np.argsort(self._place)
        return take(values, starts_of(self._sizes)[back], self._sizes[back])


def slot_major(bags: Bags, lengths: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Ids, lengths and weights in the order slot, source, sample: FBGEMM's table-major bags."""
    counts, weights = bags.table, bags.weights
    if bags.num_sources == 1 or bags.num_slots == 1:
        return bags.ids, lengths, weights
    if (counts == counts[0, 0]).all():
        order = np.arange(counts.size, dtype=np.int32).reshape(counts.shape).T.reshape(-1)
        permuted = torch.ops.fbgemm.permute_2D_sparse_data(
            sent_to(bags.ids.device, order),
            lengths.view(counts.size, -1),
            bags.ids,
            weights,
            bags.ids.numel(),
        )
        return permuted[1], permuted[0].view(-1), permuted[2]
    bounds = np.append(0, np.cumsum(counts))
    num_ids = Cells(sums(lengths.cpu().numpy(), bounds).reshape(counts.shape))
    return (
        num_ids.slot_major(bags.ids),
        Cells(counts).slot_major(lengths),
        None if weights is None else num_ids.slot_major(weights),
    )
