"""The forms in which replicas are synchronised, and the bytes that each moves.

A form turns every rank's lookups and gradients of some blocks of a kernel group into one update that is the same on all
ranks: bags and their gradients, source by source, as if one rank had looked up the whole batch. From the other ranks it
needs pieces, which all gather, or values, which all add up.

Legend: W ranks, S slots of the group, K blocks of the form, R rows of a block, D gradient columns, U rows touched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from shardwright.contracts.lookup import Bags
from shardwright.planning.layouts.blocks import Ints
from shardwright.runtime.replicated.sizes import FLOAT_BYTES, Copies, LookedUp, Sizes, slot_views
from shardwright.runtime.step.backward.row_gradients import row_gradients
from shardwright.runtime.step.buffers import ALIGNMENT, padded
from shardwright.runtime.step.segments import starts_of, take

_ID_BYTES, _LENGTH_BYTES = 8, 4


@frozen(eq=False)
class CopiedBatch:
    """This rank's part of a step of a group of copies.

    Args:
        copies: the group.
        rank: this rank.
        looked_up: sizes of all ranks' lookups.
        bags: bags that this rank looked up.
        gradient: gradient of its bags, flat, in the order of the group's result.
        scale: factor of the gradients.
    """

    copies: Copies
    rank: int
    looked_up: LookedUp
    bags: Bags
    gradient: Tensor
    scale: float

    @cached_property
    def slot_gradients(self) -> list[Tensor]:
        """Gradient of each slot's bags, ``[bags, D]`` each."""
        return slot_views(self.copies, self.gradient, self.looked_up.num_bags[self.rank].tolist())


@frozen(eq=False)
class Sources:
    """Lookups whose backward pass makes an update.

    Args:
        bags: bags of some slots, from several sources.
        gradient: gradient of the bags, flat, in the order of the slots' result.
        slots: places of the slots in the group, ``[n]``.
    """

    bags: Bags
    gradient: Tensor
    slots: Ints


class UpdateForm(ABC):
    """The synchronisation of some blocks of a group in one step.

    Args:
        batch: this rank's part of the step.
        blocks: indices of the blocks in the group, rising.
    """

    adds_up_on_each_rank: ClassVar[bool] = False
    """True if each rank adds up the gradients of the whole batch: copies then stay equal by kernels of equal bits."""
    effort: ClassVar[float] = 1.0
    """Time that a byte of it takes, beside one of the others."""

    def __init__(self, batch: CopiedBatch, blocks: Ints) -> None:
        self.batch, self.copies, self.blocks = batch, batch.copies, blocks
        self.slots: Ints = np.flatnonzero(np.isin(self.copies.block_of_slot, blocks))
        self.looked_up = batch.looked_up.of_slots(self.slots)

    @classmethod
    @abstractmethod
    def bytes_moved(cls, sizes: Sizes) -> Ints:
        """Bytes that all ranks together send for each block in this form: ``[K]``."""

    def pieces(self) -> list[Tensor]:
        """This rank's pieces, which every rank gathers; each is a multiple of 8 bytes."""
        return []

    def piece_bytes(self) -> list[Ints]:
        """Bytes of each piece on each rank, ``[W]`` for each piece."""
        return []

    def gather(self, pieces: Sequence[Tensor]) -> None:  # noqa: B027 - a form may have none
        """Take all ranks' pieces: for each piece the bytes of all ranks, in rank order."""

    @property
    def num_values(self) -> int:
        """Number of values that all ranks add up."""
        return 0

    def write(self, out: Tensor) -> None:  # noqa: B027 - a form may have none
        """Write this rank's values into ``out``, ``[num_values]`` float32."""

    def take_sum(self, terms: Sequence[Tensor]) -> None:  # noqa: B027 - a form may have none
        """Take the terms whose sum is that of all ranks' values: the same terms, in the same order, on every rank."""

    @abstractmethod
    def sources(self) -> Sources | None:
        """The whole batch's lookups of these blocks, once all has arrived; ``None`` if :meth:`update` updates them."""

    def update(self) -> None:  # noqa: B027 - most forms have the kernel look up
        """Update the blocks if :meth:`sources` is ``None``; called after all other blocks of the group were updated."""


def _to_others(num_bytes: Ints) -> Ints:
    """Bytes that all ranks together send if each sends its ``[W, K]`` bytes to all others: ``[K]``."""
    sums: Ints = num_bytes.sum(0) * (len(num_bytes) - 1)
    return sums


def _filled(tensor: Tensor) -> Tensor:
    """View a tensor as flat bytes, padded with zeros to a multiple of 8, and aligned to 8."""
    flat = tensor.reshape(-1)
    flat = flat.view(torch.uint8) if flat.numel() else flat.new_empty(0, dtype=torch.uint8)
    missing = -len(flat) % ALIGNMENT
    if missing:
        return torch.cat([flat, flat.new_zeros(missing)])
    return flat.clone() if flat.storage_offset() % ALIGNMENT else flat


def _exact(piece: Tensor, dtype: torch.dtype, counts: Ints) -> Tensor:
    """Take each rank's elements out of a gathered piece, without the padding; ``counts`` of them, ``[W]``."""
    size = dtype.itemsize
    return take(piece.view(dtype), starts_of(padded(counts * size)) // size, counts)


class BatchForm(UpdateForm):
    """The form that gathers every rank's ids, lengths, weights, and output gradients by their codec."""

    adds_up_on_each_rank: ClassVar[bool] = True

    @classmethod
    def bytes_moved(cls, sizes: Sizes) -> Ints:  # noqa: D102 - described in the base class
        own = sizes.num_ids * _ID_BYTES + sizes.gradient_bytes
        if sizes.is_pooled:
            own += padded(sizes.num_bags * _LENGTH_BYTES)
        if sizes.is_weighted:
            own += padded(sizes.num_ids * FLOAT_BYTES)
        return _to_others(own)

    def pieces(self) -> list[Tensor]:  # noqa: D102
        bags, own = self._own_bags(), [self._own_gradient()]
        gradient = own[0] if self.batch.scale == 1 else own[0] * self.batch.scale
        parts = [bags.ids, bags.lengths, bags.weights, self.copies.wire.encoded(gradient)]
        return [_filled(part) for part in parts if part is not None]

    def _own_bags(self) -> Bags:
        """This rank's bags of the slots."""
        bags, rank = self.batch.bags, self.batch.rank
        if len(self.slots) == bags.num_slots:
            return bags
        num_ids, num_bags = self.batch.looked_up.num_ids[rank], self.batch.looked_up.num_bags[rank]

        def of_slots(values: Tensor | None, sizes: Ints) -> Tensor | None:
            return None if values is None else take(values, starts_of(sizes)[self.slots], sizes[self.slots])

        ids = of_slots(bags.ids, num_ids)
        assert ids is not None  # bags have ids
        lengths, weights = of_slots(bags.lengths, num_bags), of_slots(bags.weights, num_ids)
        return Bags(ids, lengths, weights, num_bags[None, self.slots])

    def _own_gradient(self) -> Tensor:
        """This rank's gradient of the slots' bags, flat."""
        if len(self.slots) == self.batch.bags.num_slots:
            return self.batch.gradient
        pieces = [self.batch.slot_gradients[slot] for slot in self.slots]
        if self.copies.is_matrix:
            return torch.cat(pieces, dim=1).view(-1)
        return torch.cat([piece.reshape(-1) for piece in pieces])

    def _counts(self) -> list[tuple[torch.dtype, Ints]]:
        """Dtype of each piece, and its elements on each rank, ``[W]``, without padding."""
        num_ids, num_bags = self.looked_up.num_ids.sum(1), self.looked_up.num_bags.sum(1)
        counts = [(torch.int64, num_ids)]
        counts += [(torch.int32, num_bags)] if self.copies.is_pooled else []
        counts += [(torch.float32, num_ids)] if self.copies.is_weighted else []
        wire = self.copies.wire
        values = self.looked_up.num_bags @ self.copies.dims[self.slots]
        return [*counts, (torch.uint8, values // wire.width * wire.row_bytes)]

    def piece_bytes(self) -> list[Ints]:  # noqa: D102
        return [padded(count * dtype.itemsize) for dtype, count in self._counts()]

    def gather(self, pieces: Sequence[Tensor]) -> None:  # noqa: D102
        exact = [
            _exact(piece, dtype, count) for piece, (dtype, count) in zip(pieces, self._counts(), strict=True)
        ]
        bags = Bags(
            ids=exact[0],
            lengths=exact[1] if self.copies.is_pooled else None,
            weights=exact[-2] if self.copies.is_weighted else None,
            counts=self.looked_up.num_bags,
        )
        self._sources = Sources(bags, self.copies.wire.decoded(exact[-1]), self.slots)

    def sources(self) -> Sources | None:  # noqa: D102
        return self._sources


class RowsForm(UpdateForm):
    """The form that gathers the rows that each rank touched, and their gradients.

    A piece has room for as many rows as the rank's ids can touch, because other ranks know only the number of ids.
    """

    # Two ranks on an AMD EPYC, 8 tables of 50k x 32, batch 2048, 1 id: 17.5 ms so, 8.4 ms by as many bytes of batches.
    effort: ClassVar[float] = 2.0

    @classmethod
    def bytes_moved(cls, sizes: Sizes) -> Ints:  # noqa: D102 - described in the base class
        # Distinct rows are at most as many as ids, and at most all rows.
        rooms = np.minimum(sizes.num_ids, sizes.num_rows)
        return _to_others(rooms * _ID_BYTES + padded(rooms * sizes.dims * FLOAT_BYTES))

    @property
    def _rooms(self) -> Ints:
        """Rows that there is room for, of each rank and block: ``[W, K]``."""
        num_ids = np.add.reduceat(self.batch.looked_up.num_ids, self.copies.first_slot, axis=1)
        return np.minimum(num_ids, self.copies.num_rows)[:, self.blocks]

    def pieces(self) -> list[Tensor]:  # noqa: D102
        pieces: list[Tensor] = []
        for block, room in zip(self.blocks.tolist(), self._rooms[self.batch.rank].tolist(), strict=True):
            rows, gradients = touched_rows(self.batch, block)
            missing = room - rows.numel()
            pieces.append(_filled(torch.cat([rows, rows.new_full((missing,), -1)])))
            pieces.append(_filled(torch.cat([gradients, gradients.new_zeros(missing, gradients.shape[1])])))
        return pieces

    def piece_bytes(self) -> list[Ints]:  # noqa: D102
        pairs = zip(self._rooms.T, self.copies.block_dims[self.blocks], strict=True)
        return [size for room, dim in pairs for size in (room * _ID_BYTES, padded(room * dim * FLOAT_BYTES))]

    def gather(self, pieces: Sequence[Tensor]) -> None:  # noqa: D102
        self._rows: list[tuple[Tensor, Tensor]] = []
        dims = self.copies.block_dims[self.blocks].tolist()
        for number, (room, dim) in enumerate(zip(self._rooms.T, dims, strict=True)):
            rows = pieces[2 * number].view(torch.int64)
            gradients = _exact(pieces[2 * number + 1], torch.float32, room * dim).view(len(rows), dim)
            used = rows >= 0
            self._rows.append((rows[used], gradients[used]))

    def sources(self) -> Sources | None:  # noqa: D102
        return rows_as_sources(self, self._rows)


class DenseForm(UpdateForm):
    """The form that sums the gradient of all rows of the blocks, and a mark of each row that is positive if touched."""

    _is_of_kernel = False

    @classmethod
    def bytes_moved(cls, sizes: Sizes) -> Ints:  # noqa: D102 - described in the base class
        # Each of W ranks sends 2 (W - 1) / W of the values, as in a ring all-reduce; D values and a mark for each row.
        moved: Ints = 2 * (sizes.world_size - 1) * sizes.num_rows * (sizes.dims + 1) * FLOAT_BYTES
        return moved

    @property
    def _shapes(self) -> list[tuple[int, int]]:
        """Number of rows and of gradient columns of each block."""
        rows, dims = self.copies.num_rows[self.blocks], self.copies.block_dims[self.blocks]
        return list(zip(rows.tolist(), dims.tolist(), strict=True))

    @property
    def num_values(self) -> int:  # noqa: D102
        return sum(rows * (dim + 1) for rows, dim in self._shapes)

    def write(self, out: Tensor) -> None:  # noqa: D102
        batch, blocks = self.batch, tuple(self.blocks.tolist())
        self._is_of_kernel = self.copies.lookup.row_sums(batch.bags, batch.slot_gradients, blocks, out)
        if self._is_of_kernel:
            return
        for block, (dense, marks) in zip(blocks, self._views(out.zero_()), strict=True):
            rows, gradients = touched_rows(batch, block)
            dense[rows] = gradients
            marks[rows] = 1

    def _views(self, values: Tensor) -> list[tuple[Tensor, Tensor]]:
        """View flat values as each block's gradient ``[R, D]`` and marks ``[R]``."""
        shapes = self._shapes
        pieces = values.split([rows * dim for rows, dim in shapes] + [rows for rows, _ in shapes])
        dense = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=False)]
        return list(zip(dense, pieces[len(shapes) :], strict=True))

    def take_sum(self, terms: Sequence[Tensor]) -> None:  # noqa: D102
        self._terms = terms

    def sources(self) -> Sources | None:  # noqa: D102
        if self._is_of_kernel:
            return None
        summed = self._terms[0] if len(self._terms) == 1 else torch.stack(list(self._terms)).sum(0)
        rows_of = []
        for dense, marks in self._views(summed):
            rows = marks.nonzero().squeeze(1)
            rows_of.append((rows, dense[rows]))
        return rows_as_sources(self, rows_of)

    def update(self) -> None:
        """Have the kernel update the rows from the terms that it wrote on each rank."""
        self.copies.lookup.update_rows(self._terms, tuple(self.blocks.tolist()), self.batch.scale)


FORMS: Sequence[type[UpdateForm]] = (BatchForm, RowsForm, DenseForm)


def touched_rows(batch: CopiedBatch, block: int) -> tuple[Tensor, Tensor]:
    """Find the rows of one block that this rank touched, ``[U]``, and sum their gradients, ``[U, D]``."""
    slots = np.flatnonzero(batch.copies.block_of_slot == block)
    num_ids, num_bags = (own[batch.rank] for own in (batch.looked_up.num_ids, batch.looked_up.num_bags))
    first, stop = slots[0], slots[-1] + 1  # a block's slots follow one another

    def of_block(values: Tensor | None, sizes: Ints) -> Tensor | None:
        return None if values is None else values[int(sizes[:first].sum()) : int(sizes[:stop].sum())]

    ids = of_block(batch.bags.ids, num_ids)
    assert ids is not None  # bags have ids
    own = Bags(ids, of_block(batch.bags.lengths, num_bags), of_block(batch.bags.weights, num_ids), ())
    return row_gradients(own, torch.cat(batch.slot_gradients[first:stop]))


def rows_as_sources(form: UpdateForm, rows_of: Sequence[tuple[Tensor, Tensor]]) -> Sources:
    """Express updates of rows by their gradients as lookups: bags of one id each, in the first slot of each block.

    Pooled lookups want the same number of bags in every slot, so shorter slots are filled up with empty bags.

    Args:
        form: update form of the blocks.
        rows_of: rows ``[U]`` of each block, which may repeat, and their gradients ``[U, D]``, not scaled yet.
    """
    copies, slots = form.copies, form.slots
    is_first = np.isin(slots, copies.first_slot)
    used = np.zeros(len(slots), dtype=np.int64)
    used[is_first] = [len(rows) for rows, _ in rows_of]
    counts = np.full_like(used, used.max()) if copies.is_pooled else used
    ids = torch.cat([rows for rows, _ in rows_of])
    dims = copies.dims[slots]
    gradient = torch.zeros(int((counts * dims).sum()), dtype=torch.float32, device=ids.device)
    lengths = torch.zeros(int(counts.sum()), dtype=torch.int32, device=ids.device)
    most, width = int(counts.max()), int(dims.sum())
    starts, columns, values = (starts_of(own).tolist() for own in (counts, dims, counts * dims))
    for slot, (_, own) in zip(np.flatnonzero(is_first).tolist(), rows_of, strict=True):
        count, dim = own.shape
        lengths[starts[slot] : starts[slot] + count] = 1
        if copies.is_matrix:
            room = gradient.view(most, width)[:count, columns[slot] : columns[slot] + dim]
        else:
            room = gradient[values[slot] : values[slot] + count * dim].view(count, dim)
        torch.mul(own, form.batch.scale, out=room)
    # The weights of ids are in the rows' gradients already.
    weights = torch.ones(len(ids), dtype=torch.float32, device=ids.device) if copies.is_weighted else None
    bags = Bags(ids, lengths if copies.is_pooled else None, weights, counts[None])
    return Sources(bags, gradient, slots)
