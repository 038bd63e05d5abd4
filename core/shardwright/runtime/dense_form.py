"""Copies synchronised by the gradient of all rows: each rank sums a slice of the rows and sends it to all.

Legend: W ranks, R rows of a block, D gradient columns.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwright.runtime.buffers import joined
from shardwright.runtime.copies import FLOAT_BYTES, Ints, Sizes
from shardwright.runtime.environment import ShardingEnv
from shardwright.runtime.update_forms import Sources, UpdateForm, rows_as_sources


class DenseForm(UpdateForm):
    """The gradient of all rows of the blocks.

    Attributes:
        is_of_kernel: the kernel adds the gradients up, and updates by their sums.
    """

    is_of_kernel = False

    @classmethod
    def bytes_moved(cls, sizes: Sizes) -> Ints:  # noqa: D102 - described in the base class
        # Twice (W - 1) / W of it from each of W ranks, with a mark of each row for whether it was touched.
        moved: Ints = 2 * (sizes.world_size - 1) * sizes.num_rows * (sizes.dims + 1) * FLOAT_BYTES
        return moved

    def pieces(self) -> list[Tensor]:  # noqa: D102
        return []

    def num_bytes(self, rank: int) -> int:  # noqa: D102
        return 0

    def unpack(self, rank: int, buffer: Tensor) -> list[Tensor]:  # noqa: D102
        return []

    def receive(self, arrived: Sequence[Sequence[Tensor]]) -> None:
        """Nothing: :class:`DenseSum` brings what all such groups need, together."""

    @property
    def num_values(self) -> int:
        """How many :meth:`write` writes."""
        return sum(rows * (dim + 1) for rows, dim in self.chosen.shapes)

    def write(self, out: Tensor) -> None:
        """Write this rank's gradient of all rows, block after block, then a mark of each: 1 if it was touched."""
        lookup, blocks = self.chosen.lookup, self.chosen.blocks
        self.is_of_kernel = lookup.row_sums(self.bags, self.gradients, blocks, out)
        if not self.is_of_kernel:
            self._write(out.zero_())

    def _write(self, out: Tensor) -> None:
        for (dense, marks), (rows, gradients) in zip(self._views(out), self.touched(), strict=True):
            dense[rows] = gradients
            marks[rows] = 1

    def _views(self, values: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Each block's gradient ``[R, D]`` and marks ``[R]``."""
        shapes = self.chosen.shapes
        pieces = values.split([rows * dim for rows, dim in shapes] + [rows for rows, _ in shapes])
        dense = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=False)]
        return list(zip(dense, pieces[len(shapes) :], strict=True))

    def take(self, terms: Sequence[Tensor]) -> None:
        """Take what makes the sum of what all ranks wrote: the same terms on every rank, in one order."""
        self._terms = terms

    def sources(self) -> Sources:  # noqa: D102
        rows_of = []
        summed = self._terms[0] if len(self._terms) == 1 else torch.stack(list(self._terms)).sum(0)
        for dense, marks in self._views(summed):
            rows = marks.nonzero().squeeze(1)
            rows_of.append((rows, dense[rows]))
        return rows_as_sources(self.group, rows_of, self.scale)

    def update_rows(self) -> None:
        """Have the kernel update the rows, which it also added up."""
        self.chosen.lookup.update_rows(self._terms, self.chosen.blocks, self.scale)


class DenseSum:
    """The sums of all dense forms.

    Each rank sums a slice, and then all exchange the slices' sums. Two ranks that read each other's memory each take
    all that the other has instead, which are as many bytes, and add up the two terms in the update itself.
    """

    def __init__(self, env: ShardingEnv, forms: Sequence[DenseForm], device: torch.device) -> None:
        self._env, self._forms = env, forms
        self._sizes = [form.num_values for form in forms]
        self._whole = env.communicator.room(sum(self._sizes), device)
        for form, own in zip(forms, self._whole.split(self._sizes), strict=True):
            form.write(own)
        self._is_pair = env.world_size == _PAIR and env.communicator.reads_in_place(self._whole.numel())
        if env.world_size == 1:
            return
        self._slices = self._cut()
        others = self._others(self._slices)
        mine = self._slices[env.rank].numel()
        # Nothing is sent to oneself.
        self._out = [0 if rank == env.rank else own.numel() for rank, own in enumerate(self._slices)]
        self._back = [0 if rank == env.rank else mine for rank in range(env.world_size)]
        self._arrivals = env.communicator.exchange(
            joined(others), self._back, self._out, label="dense gradients"
        )

    def _cut(self) -> list[Tensor]:
        """What each rank sums: all of it, or a slice."""
        world_size = self._env.world_size
        if self._is_pair:
            return [self._whole] * _PAIR
        first, rest = divmod(self._whole.numel(), world_size)
        return list(self._whole.split([first + (rank < rest) for rank in range(world_size)]))

    def _others(self, by_rank: Sequence[Tensor]) -> list[Tensor]:
        return [piece for rank, piece in enumerate(by_rank) if rank != self._env.rank]

    def finish(self) -> None:
        """Wait, and give each form its terms."""
        terms = [self._whole]
        if self._env.world_size > 1:
            by_rank = list(self._arrivals.wait())
            if self._is_pair:
                by_rank[self._env.rank] = self._whole
                terms = by_rank
            else:
                self._add(self._others(by_rank))
        pieces = zip(*(term.split(self._sizes) for term in terms), strict=True)
        for form, own in zip(self._forms, pieces, strict=True):
            form.take(own)

    def release(self) -> None:
        """Say that the terms are not read any more."""
        if self._is_pair:
            self._arrivals.release()

    def _add(self, partial: Sequence[Tensor]) -> None:
        """Sum this rank's slice, whose bits it alone decides, and exchange the slices."""
        mine, others = self._slices[self._env.rank], self._others(self._slices)
        for other in partial:
            mine += other
        self._arrivals.release()
        sums = self._env.communicator.exchange(
            joined([mine] * len(others)), self._out, self._back, label="dense sums"
        )
        for piece, values in zip(others, self._others(sums.wait()), strict=True):
            piece.copy_(values)
        sums.release()


_PAIR = 2  # ranks
