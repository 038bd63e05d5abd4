"""The forms in which replicated tables are synchronised, and the bytes each moves.

A form turns every rank's lookups and gradients of one kernel group into one update that all ranks make alike: bags and
their gradients, source by source, as if one rank had looked the whole batch up.

Legend: W ranks, B_w batch size of rank w, N_w ids of rank w, S slots, T blocks, R rows of a block, D gradient columns,
U rows touched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from shardwright.contracts.codec import Codec
from shardwright.runtime.buffers import joined, padded
from shardwright.runtime.environment import ShardingEnv
from shardwright.runtime.groups import Group
from shardwright.runtime.lookup import Bags, Lookup
from shardwright.runtime.return_paths import pack_slots
from shardwright.runtime.rows_as_bags import rows_as_bags, slots_of, touched_rows
from shardwright.runtime.wire import Piece, Segment, decode, encode, lay_out

_ID_BYTES, _LENGTH_BYTES, _FLOAT_BYTES = 8, 4, 4


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


class UpdateForm(ABC):
    """One group's synchronisation in one step.

    Args:
        env: the ranks.
        group: the kernel group.
        lookup: of the group.
        shares: what each rank looked up, in rank order.
        bags: this rank's bags.
        gradients: the gradient of each slot's bags here, ``[bags, D]``.
        scale: by what gradients are to be multiplied.
    """

    def __init__(
        self,
        env: ShardingEnv,
        group: Group,
        lookup: Lookup,
        shares: Sequence[Share],
        bags: Bags,
        gradients: Sequence[Tensor],
        scale: float,
    ) -> None:
        self.env, self.group, self.lookup, self.shares = env, group, lookup, shares
        self.bags, self.gradients, self.scale = bags, gradients, scale

    @classmethod
    @abstractmethod
    def bytes_moved(cls, group: Group, shares: Sequence[Share]) -> int:
        """The bytes that all ranks send together."""

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
    def update(self) -> Sequence[Tensor | None]:
        """Make the whole batch's update; returns the gradients of the parameters."""


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
    def bytes_moved(cls, group: Group, shares: Sequence[Share]) -> int:  # noqa: D102 - described in the base class
        return sum(sum(size for *_, size in _sections(group, share)) for share in shares) * (len(shares) - 1)

    def pieces(self) -> list[Tensor]:  # noqa: D102
        parts = [self.bags.ids]
        if self.bags.lengths is not None:
            parts.append(_pad(self.bags.lengths))
        if self.bags.weights is not None:
            parts.append(_pad(self.bags.weights))
        share = self.shares[self.env.rank]
        gradients = parts[0].new_empty(_num_values(self.group, share), dtype=torch.float32)
        pack_slots(self.group, self.gradients, gradients)
        gradients.mul_(self.scale)
        return [*parts, encode(gradients, _coded(self.group, share)) if share.codecs else _pad(gradients)]

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
        self._bags = Bags(
            ids=columns[0],
            lengths=columns[1] if first.is_pooled else None,
            weights=columns[-1] if first.is_weighted else None,
            counts=tuple(share.num_bags for share in self.shares),
        )
        self._gradients = [
            decode(own[-1], _coded(self.group, share), _num_values(self.group, share))
            if share.codecs
            else own[-1]
            for own, share in zip(exact, self.shares, strict=True)
        ]

    def update(self) -> Sequence[Tensor | None]:  # noqa: D102
        return self.lookup.backward(self.lookup.prepare(self._bags), torch.cat(self._gradients))


def _num_values(group: Group, share: Share) -> int:
    """Values of the gradients of all bags of a rank."""
    return sum(count * slot.gradient_dim for count, slot in zip(share.num_bags, group.slots, strict=True))


def _coded(group: Group, share: Share) -> list[list[Piece]]:
    """How the gradients of a rank's bags, in the order of the group's result, travel by codecs."""
    dims = group.gradient_dims
    return lay_out([[Segment(range(len(dims)), dims, share.num_bags, group.batch_major)]], share.codecs)


def _sections(group: Group, share: Share) -> list[tuple[torch.dtype, int, int]]:
    """Dtype, elements and padded bytes of each piece that a rank sends in the batch form."""
    num_ids = sum(share.num_ids)
    sections = [(torch.int64, num_ids, num_ids * _ID_BYTES)]
    if share.is_pooled:
        bags = sum(share.num_bags)
        sections.append((torch.int32, bags, padded(bags * _LENGTH_BYTES)))
    if share.is_weighted:
        sections.append((torch.float32, num_ids, padded(num_ids * _FLOAT_BYTES)))
    if share.codecs:
        size = sum(piece.num_bytes for own in _coded(group, share) for piece in own)
        return [*sections, (torch.uint8, size, size)]
    values = _num_values(group, share)
    return [*sections, (torch.float32, values, padded(values * _FLOAT_BYTES))]


class RowsForm(UpdateForm):
    """The rows each rank touched and their gradients; room for as many as its ids can touch."""

    @classmethod
    def bytes_moved(cls, group: Group, shares: Sequence[Share]) -> int:  # noqa: D102 - described in the base class
        own = [sum(size for *_, size in cls._row_sections(group, share)) for share in shares]
        return sum(own) * (len(shares) - 1)

    @staticmethod
    def _row_sections(group: Group, share: Share) -> list[tuple[int, int, int]]:
        """For each block: rows there is room for, gradient columns, and bytes."""
        sections = []
        for spec, slots in zip(group.blocks, slots_of(group.blocks), strict=True):
            room = min(sum(share.num_ids[slot] for slot in slots), spec.block.num_rows)
            dim = group.slots[slots[0]].gradient_dim
            sections.append((room, dim, room * _ID_BYTES + padded(room * dim * _FLOAT_BYTES)))
        return sections

    def pieces(self) -> list[Tensor]:  # noqa: D102
        rooms = self._row_sections(self.group, self.shares[self.env.rank])
        pieces: list[Tensor] = []
        for slots, (room, dim, _) in zip(slots_of(self.group.blocks), rooms, strict=True):
            rows, gradients = touched_rows(self.bags, self.gradients, slots)
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

    def update(self) -> Sequence[Tensor | None]:  # noqa: D102
        return _update_rows(self.group, self.lookup, self._rows, self.scale)


class DenseForm(UpdateForm):
    """The gradient of all rows: each rank sums a slice of the rows and sends it to all."""

    @classmethod
    def bytes_moved(cls, group: Group, shares: Sequence[Share]) -> int:  # noqa: D102 - described in the base class
        # Twice (W - 1) / W of it from each of W ranks, with a flag a row for whether it was touched.
        return 2 * (len(shares) - 1) * sum(cls._values(group)) * _FLOAT_BYTES

    @staticmethod
    def _values(group: Group) -> list[int]:
        firsts = [slots[0] for slots in slots_of(group.blocks)]
        return [
            spec.block.num_rows * (group.slots[slot].gradient_dim + 1)
            for spec, slot in zip(group.blocks, firsts, strict=True)
        ]

    def pieces(self) -> list[Tensor]:  # noqa: D102
        return []

    def num_bytes(self, rank: int) -> int:  # noqa: D102
        return 0

    def unpack(self, rank: int, buffer: Tensor) -> list[Tensor]:  # noqa: D102
        return []

    def receive(self, arrived: Sequence[Sequence[Tensor]]) -> None:
        """Nothing: :class:`DenseSum` brings what all such groups need, together."""

    def gradient(self) -> Tensor:
        """This rank's gradient of all rows, block after block, each row followed by a 1 if it was touched."""
        sums = self.lookup.row_sums(self.bags, self.gradients)
        return self._row_sums() if sums is None else sums

    def _row_sums(self) -> Tensor:
        parts = []
        for spec, slots in zip(self.group.blocks, slots_of(self.group.blocks), strict=True):
            rows, gradients = touched_rows(self.bags, self.gradients, slots)
            dense = gradients.new_zeros(spec.block.num_rows, gradients.shape[1] + 1)
            dense[rows, :-1] = gradients
            dense[rows, -1] = 1
            parts.append(dense.view(-1))
        return torch.cat(parts)

    def take(self, summed: Tensor) -> None:
        """Take the sum of all ranks' :meth:`gradient`."""
        self._summed = summed

    def update(self) -> Sequence[Tensor | None]:  # noqa: D102
        if self.lookup.update_rows(self._summed.mul_(self.scale)):
            return ()
        rows_of = []
        for spec, part in zip(self.group.blocks, self._summed.split(self._values(self.group)), strict=True):
            dense = part.view(spec.block.num_rows, -1)
            rows = dense[:, -1].nonzero().squeeze(1)
            rows_of.append((rows, dense[rows, :-1]))
        return _update_rows(self.group, self.lookup, rows_of, 1.0)


class DenseSum:
    """The sums of all dense groups: each rank sums a slice, and then all exchange the slices' sums."""

    def __init__(self, env: ShardingEnv, forms: Sequence[DenseForm]) -> None:
        self._env, self._forms = env, forms
        parts = [form.gradient() for form in forms]
        self._sizes = [part.numel() for part in parts]
        self._whole = joined(parts)
        if env.world_size == 1:
            return
        self._slices = self._cut()
        self._mine = self._slices[env.rank]
        # Nothing is sent to oneself.
        self._out = [0 if rank == env.rank else piece.numel() for rank, piece in enumerate(self._slices)]
        self._back = [0 if rank == env.rank else self._mine.numel() for rank in range(env.world_size)]
        self._partial = self._whole.new_empty(sum(self._back))
        self._work = env.communicator.all_to_all(
            self._partial, joined(self._others()), self._back, self._out, label="dense gradients"
        )

    def _cut(self) -> list[Tensor]:
        """The slice that each rank sums."""
        world_size = self._env.world_size
        first, rest = divmod(self._whole.numel(), world_size)
        return list(self._whole.split([first + (rank < rest) for rank in range(world_size)]))

    def _others(self) -> list[Tensor]:
        return [piece for rank, piece in enumerate(self._slices) if rank != self._env.rank]

    def finish(self) -> None:
        """Wait, and give each form its sum."""
        if self._env.world_size > 1:
            self._work.wait()
            self._add()
            self._gather()
        for form, summed in zip(self._forms, self._whole.split(self._sizes), strict=True):
            form.take(summed)

    def _add(self) -> None:
        """Sum this rank's slice. Of two terms the order does not matter, of more one rank alone decides it."""
        num_others = self._env.world_size - 1
        partial = self._partial.view(num_others, self._mine.numel())
        self._mine += partial.sum(0) if num_others > 1 else partial[0]

    def _gather(self) -> None:
        others = self._others()
        received = self._whole.new_empty(sum(self._out))
        self._env.communicator.all_to_all(
            received, self._mine.repeat(len(others)), self._out, self._back, label="dense sums"
        ).wait()
        for piece, values in zip(others, received.split([piece.numel() for piece in others]), strict=True):
            piece.copy_(values)


FORMS: Sequence[type[UpdateForm]] = (BatchForm, RowsForm, DenseForm)


def _update_rows(
    group: Group, lookup: Lookup, rows_of: Sequence[tuple[Tensor, Tensor]], scale: float
) -> Sequence[Tensor | None]:
    """Update rows of each block by ``scale`` times their gradients; rows may repeat."""
    bags, pieces = rows_as_bags(group.blocks, rows_of, is_pooled=group.blocks[0].request.is_pooled)
    packed = pieces[0].new_empty(sum(piece.numel() for piece in pieces))
    pack_slots(group, pieces, packed)
    return lookup.backward(lookup.prepare(bags), packed.mul_(scale))
