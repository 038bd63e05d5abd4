"""The forms in which replicas are synchronised, and the bytes that each moves.

A form turns every rank's lookups and gradients of a kernel group into one update that is the same on all ranks: bags
and their gradients, source by source, as if one rank had looked up the whole batch. From the other ranks it needs
pieces, which all gather, or values, which all add up.

Legend: W ranks, S slots of the group, K blocks of the group, R rows of a block, D gradient columns, U rows touched.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, TypeAlias

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from shardwright.contracts.lookup import Bags
from shardwright.planning.arrays import Ints
from shardwright.runtime.step.backward.row_gradients import row_gradients, rows_as_bags
from shardwright.runtime.step.segments import total
from shardwright_plugins.dataflows.replicated.sizes import FLOAT_BYTES, Copies, LookedUp, padded, slot_views

_ID_BYTES = 8


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

    def touched_rows(self) -> list[tuple[Tensor, Tensor]]:
        """Find the rows of each block that this rank touched, ``[U]``, and sum their gradients, ``[U, D]``."""
        return [row_gradients(*own) for own in self.copies.order.of(self.bags, self.gradient)]

    @property
    def slot_gradients(self) -> list[Tensor]:
        """Gradient of each slot's bags, ``[bags, D]`` each."""
        return slot_views(self.copies, self.gradient, self.looked_up.num_bags[self.rank].tolist())


Sources: TypeAlias = tuple[Bags, Tensor]
"""Bags of a group's slots, from several sources, and their gradient, flat; their backward pass makes the update."""


class UpdateForm(ABC):
    """The synchronisation of a group in one step.

    Args:
        batch: this rank's part of the step.
    """

    adds_up_on_each_rank: ClassVar[bool] = False
    """True if each rank adds up the gradients of the whole batch: copies then stay equal by kernels of equal bits."""
    effort: ClassVar[float] = 1.0
    """Time that a byte of it takes, beside one of the others."""

    def __init__(self, batch: CopiedBatch) -> None:
        self.batch, self.copies, self.looked_up = batch, batch.copies, batch.looked_up

    @property
    def bytes_moved(self) -> int:
        """Bytes that all ranks together send in this form.

        Each of W ranks sends its pieces to W - 1 others, and 2 (W - 1) / W of the values that are added up, as in a
        ring all-reduce.
        """
        return (self.looked_up.world_size - 1) * (self.gathered_bytes + 2 * self.num_values * FLOAT_BYTES)

    @property
    def gathered_bytes(self) -> int:
        """Bytes of all ranks' pieces."""
        return sum(int(padded(counts * dtype.itemsize).sum()) for dtype, counts in self.piece_counts())

    def pieces(self) -> list[Tensor]:
        """This rank's pieces, flat, which every rank gathers."""
        return []

    def piece_counts(self) -> list[tuple[torch.dtype, Ints]]:
        """Dtype of each piece, and its elements on each rank, ``[W]``."""
        return []

    def gather(self, pieces: Sequence[Tensor]) -> Sequence[Tensor]:
        """Take all ranks' pieces, the first of these: for each the elements of all ranks, flat, in rank order.

        Returns:
            The others.
        """
        return pieces

    @property
    def num_values(self) -> int:
        """Number of values that all ranks add up."""
        return 0

    def write(self, out: Tensor) -> None:  # noqa: B027 - a form may have none
        """Write this rank's values into ``out``, ``[num_values]`` float32."""

    def take_sum(self, terms: Sequence[Tensor]) -> None:  # noqa: B027 - a form may have none
        """Take the terms whose sum is that of all ranks' values: the same terms, in the same order, on every rank."""

    def _from_rows(self, rows_of: Sequence[tuple[Tensor, Tensor]]) -> Sources:
        """Lookups that update rows ``[U]`` of each block by their gradients ``[U, D]``, which are not scaled yet."""
        copies = self.copies
        return rows_as_bags(
            rows_of,
            copies.dims,
            copies.first_slot,
            is_pooled=copies.is_pooled,
            is_weighted=copies.is_weighted,
            is_matrix=copies.is_matrix,
            scale=self.batch.scale,
        )

    @abstractmethod
    def sources(self) -> Sources:
        """The whole batch's lookups, once all has arrived."""

    def update(self) -> Sequence[Tensor | None]:
        """Make the whole batch's update, as if one rank had looked it up; return the gradients of parameters."""
        bags, gradient = self.sources()
        lookup = self.copies.lookup
        return lookup.backward(lookup.prepare(bags), gradient)


class BatchForm(UpdateForm):
    """The form that gathers every rank's ids, lengths, weights, and output gradients by their codec."""

    adds_up_on_each_rank: ClassVar[bool] = True

    def pieces(self) -> list[Tensor]:  # noqa: D102
        bags, own = self.batch.bags, self.batch.gradient
        gradient = own if self.batch.scale == 1 else own * self.batch.scale
        parts = [bags.ids, bags.lengths, bags.weights, self.copies.wire.encoded(gradient)]
        return [part for part in parts if part is not None]

    def piece_counts(self) -> list[tuple[torch.dtype, Ints]]:  # noqa: D102
        copies, num_bags = self.copies, self.looked_up.num_bags
        num_ids, wire = total(self.looked_up.num_ids, axis=1), copies.wire
        counts = [(torch.int64, num_ids)]
        if copies.is_pooled:
            counts.append((torch.int32, total(num_bags, axis=1)))
        if copies.is_weighted:
            counts.append((torch.float32, num_ids))
        return [*counts, (torch.uint8, num_bags @ copies.dims // wire.width * wire.row_bytes)]

    def gather(self, pieces: Sequence[Tensor]) -> Sequence[Tensor]:  # noqa: D102
        copies = self.copies
        number = 2 + copies.is_pooled + copies.is_weighted
        bags = Bags(
            ids=pieces[0],
            lengths=pieces[1] if copies.is_pooled else None,
            weights=pieces[number - 2] if copies.is_weighted else None,
            counts=self.looked_up.num_bags,
        )
        self._sources = bags, copies.wire.decoded(pieces[number - 1])
        return pieces[number:]

    def sources(self) -> Sources:  # noqa: D102
        return self._sources


class RowsForm(UpdateForm):
    """The form that gathers the rows that each rank touched, and their gradients.

    A piece has room for as many rows as the rank's ids can touch, because other ranks know only the number of ids.
    """

    # Two ranks on an AMD EPYC, 8 tables of 50k x 32, batch 2048, 1 id: 17.5 ms so, 8.4 ms by as many bytes of batches.
    effort: ClassVar[float] = 2.0

    @property
    def gathered_bytes(self) -> int:
        """The same as of the pieces, by as few calls for many blocks as for one."""
        rooms = self._rooms
        return int((rooms * _ID_BYTES + padded(rooms * self.copies.block_dims * FLOAT_BYTES)).sum())

    @property
    def _rooms(self) -> Ints:
        """Rows that there is room for, of each rank and block: at most as many as ids, and at most all. ``[W, K]``."""
        num_ids = np.add.reduceat(self.batch.looked_up.num_ids, self.copies.first_slot, axis=1)
        return np.minimum(num_ids, self.copies.num_rows)

    def pieces(self) -> list[Tensor]:  # noqa: D102
        pieces: list[Tensor] = []
        rooms = self._rooms[self.batch.rank].tolist()
        for room, (rows, gradients) in zip(rooms, self.batch.touched_rows(), strict=True):
            missing = room - rows.numel()
            pieces.append(torch.cat([rows, rows.new_full((missing,), -1)]))
            pieces.append(
                torch.cat([gradients.reshape(-1), gradients.new_zeros(missing * gradients.shape[1])])
            )
        return pieces

    def piece_counts(self) -> list[tuple[torch.dtype, Ints]]:  # noqa: D102
        pairs = zip(self._rooms.T, self.copies.block_dims, strict=True)
        return [own for room, dim in pairs for own in ((torch.int64, room), (torch.float32, room * dim))]

    def gather(self, pieces: Sequence[Tensor]) -> Sequence[Tensor]:  # noqa: D102
        self._rows: list[tuple[Tensor, Tensor]] = []
        dims = self.copies.block_dims.tolist()
        for rows, gradients, dim in zip(pieces[::2], pieces[1::2], dims, strict=False):
            used = rows >= 0
            self._rows.append((rows[used], gradients.view(len(rows), dim)[used]))
        return pieces[2 * len(dims) :]

    def sources(self) -> Sources:  # noqa: D102
        return self._from_rows(self._rows)


class DenseForm(UpdateForm):
    """The form that sums the gradient of all rows of the blocks, and a mark of each row that is positive if touched."""

    _is_of_kernel = False

    @property
    def _shapes(self) -> list[tuple[int, int]]:
        """Number of rows and of gradient columns of each block."""
        return list(zip(self.copies.num_rows.tolist(), self.copies.block_dims.tolist(), strict=True))

    @property
    def num_values(self) -> int:  # noqa: D102
        return sum(rows * (dim + 1) for rows, dim in self._shapes)

    def write(self, out: Tensor) -> None:  # noqa: D102
        batch = self.batch
        self._is_of_kernel = self.copies.lookup.row_sums(batch.bags, batch.slot_gradients, out)
        if self._is_of_kernel:
            return
        views = self._views(out.zero_())
        for (dense, marks), (rows, gradients) in zip(views, batch.touched_rows(), strict=True):
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

    def sources(self) -> Sources:  # noqa: D102
        summed = self._terms[0] if len(self._terms) == 1 else torch.stack(list(self._terms)).sum(0)
        rows_of = []
        for dense, marks in self._views(summed):
            rows = marks.nonzero().squeeze(1)
            rows_of.append((rows, dense[rows]))
        return self._from_rows(rows_of)

    def update(self) -> Sequence[Tensor | None]:
        """Have the kernel update the rows, from the terms that it wrote on each rank if it did."""
        if not self._is_of_kernel:
            return super().update()
        self.copies.lookup.update_rows(self._terms, self.batch.scale)
        return ()


FORMS: Sequence[type[UpdateForm]] = (BatchForm, RowsForm, DenseForm)
