"""The forms in which replicated tables are synchronised, and the bytes each moves.

A form turns every rank's lookups and gradients of some blocks of a kernel group into one update that all ranks make
alike: bags and their gradients, source by source, as if one rank had looked the whole batch up.

Legend: W ranks, B_w batch size of rank w, S slots, K blocks, R rows of a block, D gradient columns, U rows touched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from shardwright.runtime.buffers import padded
from shardwright.runtime.copies import FLOAT_BYTES, Chosen, Ints, Share, Sizes, coded, coded_bytes
from shardwright.runtime.environment import ShardingEnv
from shardwright.runtime.groups import Group
from shardwright.runtime.lookup import Bags
from shardwright.runtime.return_paths import pack_slots
from shardwright.runtime.rows_as_bags import bags_of_slots, rows_as_bags, slots_of, touched_rows
from shardwright.runtime.wire import decode, encode

_ID_BYTES, _LENGTH_BYTES = 8, 4

Sources: TypeAlias = tuple[Bags, Sequence[Tensor]]
"""Bags of several sources, and each source's gradient, flat, in the order of the result."""


class UpdateForm(ABC):
    """The synchronisation of some blocks of a group in one step.

    Args:
        env: the ranks.
        chosen: the blocks.
        shares: what each rank looked up in the whole group, in rank order.
        bags: this rank's bags, of the whole group.
        gradients: the gradient of each slot's bags here, ``[bags, D]``, of the whole group.
        scale: by what gradients are to be multiplied.
    """

    def __init__(
        self,
        env: ShardingEnv,
        chosen: Chosen,
        shares: Sequence[Share],
        bags: Bags,
        gradients: Sequence[Tensor],
        scale: float,
    ) -> None:
        self.env, self.chosen, self.group = env, chosen, chosen.part
        self.shares = [share.of_slots(chosen.slots) for share in shares]
        self.num_ids = shares[env.rank].num_ids
        self.bags, self.gradients, self.scale = bags, gradients, scale

    @classmethod
    @abstractmethod
    def bytes_moved(cls, sizes: Sizes) -> Ints:
        """The bytes that all ranks send together, for each block if it were alone: ``[K]``."""

    @abstractmethod
    def pieces(self) -> list[Tensor]:
        """What this rank sends to every rank; each a multiple of 8 bytes."""

    @abstractmethod
    def num_bytes(self, rank: int) -> int:
        """The bytes of ``rank``'s pieces."""

    @abstractmethod
    def unpack(self, rank: int, buffer: Tensor) -> list[Tensor]:
        """``rank``'s pieces, from their bytes."""

    @abstractmethod
    def receive(self, arrived: Sequence[Sequence[Tensor]]) -> None:
        """Take every rank's pieces, in rank order."""

    @abstractmethod
    def sources(self) -> Sources:
        """The whole batch's lookups of these blocks, once all has arrived."""

    def touched(self) -> list[tuple[Tensor, Tensor]]:
        """For each block the rows that this rank touched, and their gradients."""
        return [touched_rows(self.bags, self.num_ids, self.gradients, slots) for slots in self.chosen.ranges]


def _to_others(num_bytes: Ints) -> Ints:
    """What all ranks send together if each sends so many bytes to all others: ``[K]``, of ``[W, K]``."""
    sums: Ints = num_bytes.sum(0) * (len(num_bytes) - 1)
    return sums


def _pad(tensor: Tensor) -> Tensor:
    """The tensor, flat, filled up with zeros to a multiple of 8 bytes."""
    flat = tensor.reshape(-1)
    missing = (
        padded(flat.numel() * flat.element_size()) - flat.numel() * flat.element_size()
    ) // flat.element_size()
    return torch.cat([flat, flat.new_zeros(missing)]) if missing else flat


class BatchForm(UpdateForm):
    """Every rank's ids, lengths, weights and output gradients, these by their codecs."""

    @classmethod
    def bytes_moved(cls, sizes: Sizes) -> Ints:  # noqa: D102 - described in the base class
        own = sizes.num_ids * _ID_BYTES + sizes.gradient_bytes
        if sizes.is_pooled:
            own += padded(sizes.num_bags * _LENGTH_BYTES)
        if sizes.is_weighted:
            own += padded(sizes.num_ids * FLOAT_BYTES)
        return _to_others(own)

    def pieces(self) -> list[Tensor]:  # noqa: D102
        bags = bags_of_slots(self.bags, self.num_ids, self.chosen.slots)
        parts = [bags.ids]
        if bags.lengths is not None:
            parts.append(_pad(bags.lengths))
        if bags.weights is not None:
            parts.append(_pad(bags.weights))
        share = self.shares[self.env.rank]
        gradients = parts[0].new_empty(_num_values(self.group, share), dtype=torch.float32)
        pack_slots(self.group, [self.gradients[slot] for slot in self.chosen.slots], gradients)
        gradients.mul_(self.scale)
        return [*parts, encode(gradients, coded(self.group, share)) if share.codecs else _pad(gradients)]

    def num_bytes(self, rank: int) -> int:  # noqa: D102
        return sum(size for *_, size in _sections(self.group, self.shares[rank]))

    def unpack(self, rank: int, buffer: Tensor) -> list[Tensor]:  # noqa: D102
        sections = _sections(self.group, self.shares[rank])
        pieces = buffer.split([size for *_, size in sections])
        return [piece.view(dtype) for piece, (dtype, *_) in zip(pieces, sections, strict=True)]

    def receive(self, arrived: Sequence[Sequence[Tensor]]) -> None:  # noqa: D102
        exact = [
            [piece[:count] for piece, (_, count, _) in zip(own, _sections(self.group, share), strict=True)]
            for own, share in zip(arrived, self.shares, strict=True)
        ]
        columns = [torch.cat(pieces) for pieces in zip(*[own[:-1] for own in exact], strict=True)]
        first = self.shares[0]
        bags = Bags(
            ids=columns[0],
            lengths=columns[1] if first.is_pooled else None,
            weights=columns[-1] if first.is_weighted else None,
            counts=tuple(share.num_bags for share in self.shares),
        )
        gradients = [
            decode(own[-1], coded(self.group, share), _num_values(self.group, share))
            if share.codecs
            else own[-1]
            for own, share in zip(exact, self.shares, strict=True)
        ]
        self._sources = bags, gradients

    def sources(self) -> Sources:  # noqa: D102
        return self._sources


def _num_values(group: Group, share: Share) -> int:
    """Values of the gradients of all bags of a rank."""
    return sum(count * slot.gradient_dim for count, slot in zip(share.num_bags, group.slots, strict=True))


def _sections(group: Group, share: Share) -> list[tuple[torch.dtype, int, int]]:
    """Dtype, elements and padded bytes of each piece that a rank sends in the batch form."""
    num_ids = sum(share.num_ids)
    sections = [(torch.int64, num_ids, num_ids * _ID_BYTES)]
    if share.is_pooled:
        bags = sum(share.num_bags)
        sections.append((torch.int32, bags, padded(bags * _LENGTH_BYTES)))
    if share.is_weighted:
        sections.append((torch.float32, num_ids, padded(num_ids * FLOAT_BYTES)))
    if share.codecs:
        size = coded_bytes(group, share)
        return [*sections, (torch.uint8, size, size)]
    values = _num_values(group, share)
    return [*sections, (torch.float32, values, padded(values * FLOAT_BYTES))]


class RowsForm(UpdateForm):
    """The rows each rank touched and their gradients; room for as many as its ids can touch."""

    @classmethod
    def bytes_moved(cls, sizes: Sizes) -> Ints:  # noqa: D102 - described in the base class
        rooms = np.minimum(sizes.num_ids, sizes.num_rows)
        return _to_others(rooms * _ID_BYTES + padded(rooms * sizes.dims * FLOAT_BYTES))

    @staticmethod
    def _row_sections(group: Group, share: Share) -> list[tuple[int, int, int]]:
        """For each block: rows there is room for, gradient columns, and bytes."""
        sections = []
        for spec, slots in zip(group.blocks, slots_of(group.blocks), strict=True):
            room = min(sum(share.num_ids[slot] for slot in slots), spec.block.num_rows)
            dim = group.slots[slots[0]].gradient_dim
            sections.append((room, dim, room * _ID_BYTES + padded(room * dim * FLOAT_BYTES)))
        return sections

    def pieces(self) -> list[Tensor]:  # noqa: D102
        rooms = self._row_sections(self.group, self.shares[self.env.rank])
        pieces: list[Tensor] = []
        for (rows, gradients), (room, dim, _) in zip(self.touched(), rooms, strict=True):
            missing = room - rows.numel()
            pieces.append(torch.cat([rows, rows.new_full((missing,), -1)]))
            pieces.append(_pad(torch.cat([gradients, gradients.new_zeros(missing, dim)])))
        return pieces

    def num_bytes(self, rank: int) -> int:  # noqa: D102
        return sum(size for *_, size in self._row_sections(self.group, self.shares[rank]))

    def unpack(self, rank: int, buffer: Tensor) -> list[Tensor]:  # noqa: D102
        pieces: list[Tensor] = []
        start = 0
        for room, _, size in self._row_sections(self.group, self.shares[rank]):
            middle = start + room * _ID_BYTES
            pieces += [
                buffer[start:middle].view(torch.int64),
                buffer[middle : start + size].view(torch.float32),
            ]
            start += size
        return pieces

    def receive(self, arrived: Sequence[Sequence[Tensor]]) -> None:  # noqa: D102
        self._rows: list[tuple[Tensor, Tensor]] = []
        for block in range(len(self.group.blocks)):
            rows, gradients = [], []
            for own, share in zip(arrived, self.shares, strict=True):
                room, dim, _ = self._row_sections(self.group, share)[block]
                used = own[2 * block] >= 0
                rows.append(own[2 * block][used])
                gradients.append(own[2 * block + 1][: room * dim].view(room, dim)[used])
            self._rows.append((torch.cat(rows), torch.cat(gradients)))

    def sources(self) -> Sources:  # noqa: D102
        return rows_as_sources(self.group, self._rows, self.scale)


def rows_as_sources(group: Group, rows_of: Sequence[tuple[Tensor, Tensor]], scale: float) -> Sources:
    """The update of rows of each block by ``scale`` times their gradients, as one source's lookups; rows may repeat."""
    bags, pieces = rows_as_bags(group.blocks, rows_of, is_pooled=group.blocks[0].request.is_pooled)
    packed = pieces[0].new_empty(sum(piece.numel() for piece in pieces))
    pack_slots(group, pieces, packed)
    return bags, [packed.mul_(scale)]
