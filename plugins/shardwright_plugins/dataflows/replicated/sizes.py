"""A kernel group that every rank has a copy of, and the sizes of all ranks' lookups in it.

Legend: W ranks, B_w batch size of rank w, S slots of a group, K blocks, D gradient columns of a block.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen
from torch import Tensor

from shardwright.contracts.lookup import Lookup
from shardwright.planning.arrays import Ints
from shardwright.runtime.routed.wire import WireSegment
from shardwright.runtime.step.backward.row_gradients import BlockBags
from shardwright.runtime.step.kernel_groups import KernelGroup

FLOAT_BYTES = 4
ALIGNMENT = 8
"""Bytes to whose multiples sections of a buffer are aligned, so that each may be viewed as numbers."""


def padded(num_bytes: Ints) -> Ints:
    """Round sections' bytes up to the alignment of the next section."""
    rounded: Ints = -(-num_bytes // ALIGNMENT) * ALIGNMENT
    return rounded


class Copies:
    """A kernel group of replicas.

    Args:
        group: the kernel group.
        lookup: lookup of the group's blocks.

    Attributes:
        order: order of the slots' lookups and gradients.
        num_rows: rows of each block, ``[K]``.
        is_pooled: there is one gradient per bag, else one per id.
        is_weighted: ids carry weights.
        is_matrix: results are ``[bags, columns of all slots]``; else they stand slot after slot.
        dims: gradient columns of each slot, ``[S]``.
        first_slot: first slot of each block, ``[K]``.
        block_dims: ``D`` of each block, ``[K]``.
        wire: message segment of output gradients.
    """

    def __init__(self, group: KernelGroup, lookup: Lookup) -> None:
        self.group, self.lookup, self.is_matrix = group, lookup, group.kind.is_matrix
        request = group.blocks[0].request
        self.is_pooled, self.is_weighted = request.is_pooled, request.is_weighted
        self.order = BlockBags(group.blocks, group.kernel)
        self.num_rows = np.array([spec.block.num_rows for spec in group.blocks], dtype=np.int64)
        self.dims, self.first_slot = self.order.slot_dims, self.order.first_slots
        self.block_dims = self.dims[self.first_slot]
        widths = group.kind.widths
        self.wire = WireSegment(group.kind.codecs[1], widths[1] if widths else int(np.gcd.reduce(self.dims)))


@frozen(eq=False)
class LookedUp:
    """Sizes of all ranks' lookups in a group.

    Args:
        num_ids: number of ids of each rank and slot, ``[W, S]``.
        num_bags: number of bags of each rank and slot, ``[W, S]``.
    """

    num_ids: Ints
    num_bags: Ints

    @property
    def world_size(self) -> int:
        """``W``."""
        return len(self.num_ids)


def slot_views(copies: Copies, gradient: Tensor, num_bags: Sequence[int]) -> list[Tensor]:
    """View the flat gradient of one source as the gradients of each slot's bags, ``[bags, D]``."""
    dims = copies.dims.tolist()
    if copies.is_matrix:
        width = sum(dims)
        return list(gradient.view(gradient.numel() // width, width).split_with_sizes(dims, dim=1))
    pairs = list(zip(num_bags, dims, strict=True))
    pieces = gradient.split_with_sizes([count * dim for count, dim in pairs])
    return [piece.view(count, dim) for piece, (count, dim) in zip(pieces, pairs, strict=True)]
