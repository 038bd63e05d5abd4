"""What the copies of a kernel group's blocks have to synchronise: sizes, and a choice of blocks.

Legend: W ranks, B_w batch size of rank w, S slots, K blocks, D gradient columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from attrs import evolve, frozen

from shardwright.contracts.codec import Codec
from shardwright.runtime.buffers import padded
from shardwright.runtime.groups import Group
from shardwright.runtime.lookup import Lookup
from shardwright.runtime.rows_as_bags import slots_of
from shardwright.runtime.wire import Piece, Segment, lay_out

Ints: TypeAlias = npt.NDArray[np.int64]
FLOAT_BYTES = 4


@frozen
class Share:
    """What one rank looked up in a group.

    Args:
        batch_size: ``B_w``.
        num_ids: ids of each slot.
        is_pooled: gradients are one per bag, else one per id.
        is_weighted: ids carry weights.
        codecs: by what each slot's output gradients travel; none if all do as they are.
    """

    batch_size: int
    num_ids: tuple[int, ...]
    is_pooled: bool
    is_weighted: bool
    codecs: tuple[Codec | None, ...] = ()

    @property
    def num_bags(self) -> tuple[int, ...]:
        """Bags of each slot."""
        return (self.batch_size,) * len(self.num_ids) if self.is_pooled else self.num_ids

    def of_slots(self, slots: Sequence[int]) -> Share:
        """What it looked up in some of the slots."""
        if len(slots) == len(self.num_ids):
            return self
        codecs = tuple(self.codecs[slot] for slot in slots) if self.codecs else ()
        return evolve(
            self,
            num_ids=tuple(self.num_ids[slot] for slot in slots),
            codecs=() if all(codec is None for codec in codecs) else codecs,
        )


@frozen(eq=False)
class Chosen:
    """Some blocks of a group.

    Args:
        group: the whole group.
        lookup: of the whole group.
        blocks: which blocks, rising.
    """

    group: Group
    lookup: Lookup
    blocks: tuple[int, ...]

    @property
    def is_all(self) -> bool:
        """Whether no block is left out."""
        return len(self.blocks) == len(self.group.blocks)

    @cached_property
    def ranges(self) -> list[range]:
        """The slots of each block, among those of the whole group."""
        ranges = slots_of(self.group.blocks)
        return [ranges[block] for block in self.blocks]

    @cached_property
    def slots(self) -> list[int]:
        """All of them."""
        return [slot for slots in self.ranges for slot in slots]

    @cached_property
    def shapes(self) -> list[tuple[int, int]]:
        """Rows and gradient columns of each block."""
        blocks = [self.group.blocks[block] for block in self.blocks]
        return [
            (spec.block.num_rows, self.group.slots[slots[0]].gradient_dim)
            for spec, slots in zip(blocks, self.ranges, strict=True)
        ]

    @cached_property
    def part(self) -> Group:
        """The blocks as a group of their own."""
        if self.is_all:
            return self.group
        return evolve(
            self.group,
            blocks=tuple(self.group.blocks[block] for block in self.blocks),
            slots=tuple(self.group.slots[slot] for slot in self.slots),
        )


@frozen(eq=False)
class Sizes:
    """What all ranks looked up in each block of a group.

    Args:
        num_rows: ``[K]``, of the blocks.
        dims: ``[K]``, ``D`` of each.
        num_ids: ``[W, K]``.
        num_bags: ``[W, K]``.
        gradient_bytes: ``[W, K]``, of the bags' gradients, by their codecs.
        is_pooled: bags have lengths.
        is_weighted: ids have weights.
    """

    num_rows: Ints
    dims: Ints
    num_ids: Ints
    num_bags: Ints
    gradient_bytes: Ints
    is_pooled: bool
    is_weighted: bool

    @classmethod
    def of(cls, group: Group, shares: Sequence[Share]) -> Sizes:
        """The sizes of a step."""
        ranges = slots_of(group.blocks)
        firsts = [slots.start for slots in ranges]
        dims = np.array([group.slots[first].gradient_dim for first in firsts], dtype=np.int64)

        def per_block(per_slot: list[tuple[int, ...]]) -> Ints:
            sums: Ints = np.add.reduceat(np.array(per_slot, dtype=np.int64), firsts, axis=1)
            return sums

        num_bags = per_block([share.num_bags for share in shares])
        return cls(
            num_rows=np.array([spec.block.num_rows for spec in group.blocks], dtype=np.int64),
            dims=dims,
            num_ids=per_block([share.num_ids for share in shares]),
            num_bags=num_bags,
            gradient_bytes=_coded_bytes(group, shares, ranges)
            if shares[0].codecs
            else padded(num_bags * dims * FLOAT_BYTES),
            is_pooled=shares[0].is_pooled,
            is_weighted=shares[0].is_weighted,
        )

    @property
    def world_size(self) -> int:
        """``W``."""
        return len(self.num_ids)


def _coded_bytes(group: Group, shares: Sequence[Share], ranges: Sequence[range]) -> Ints:
    """``[W, K]``: the bytes of each block's gradients by their codecs."""
    alone = [evolve(group, slots=tuple(group.slots[slot] for slot in slots)) for slots in ranges]
    sizes = [
        [coded_bytes(one, share.of_slots(slots)) for one, slots in zip(alone, ranges, strict=True)]
        for share in shares
    ]
    return np.array(sizes, dtype=np.int64)


def coded_bytes(group: Group, share: Share) -> int:
    """The bytes of the gradients of a rank's bags by their codecs."""
    return sum(piece.num_bytes for own in coded(group, share) for piece in own)


def coded(group: Group, share: Share) -> list[list[Piece]]:
    """How the gradients of a rank's bags, in the order of the group's result, travel by codecs."""
    dims = group.gradient_dims
    codecs = share.codecs or (None,) * len(dims)
    return lay_out([[Segment(range(len(dims)), dims, share.num_bags, group.batch_major)]], codecs)
