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
from shardwright.runtime.rows_as_bags import slots_of
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
    def _shapes(self) -> list[tuple[int, int]]:
        """Rows and gradient columns of each block."""
        firsts = [slots[0] for slots in slots_of(self.group.blocks)]
        return [
            (spec.block.num_rows, self.group.slots[slot].gradient_dim)
            for spec, slot in zip(self.group.blocks, firsts, strict=True)
        ]

    @property
    def num_values(self) -> int:
        """How many :meth:`write` writes."""
        return sum(rows * (dim + 1) for rows, dim in self._shapes)

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
        shapes = self._shapes
        pieces = values.split([rows * dim for rows, dim in shapes] + [rows for rows, _ in shapes])
        dense = [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=False)]
        return list(zip(dense, pieces[len(shapes) :], strict=True))

    def take(self, summed: Tensor) -> None:
        """Take the sum of what all ranks wrote."""
        self._summed = summed

    def sources(self) -> Sources:  # noqa: D102
        rows_of = []
        for dense, marks in self._views(self._summed):
            rows = marks.nonzero().squeeze(1)
            rows_of.append((rows, dense[rows]))
        return rows_as_sources(self.group, rows_of, self.scale)

    def update_rows(self) -> None:
        """Have the kernel update the rows, which it also added up."""
        self.chosen.lookup.update_rows(self._summed, self.chosen.blocks, self.scale)


class DenseSum:
    """The sums of all dense forms: each rank sums a slice, and then all exchange the slices' sums."""

    def __init__(self, env: ShardingEnv, forms: Sequence[DenseForm], device: torch.device) -> None:
        self._env, self._forms = env, forms
        self._sizes = [form.num_values for form in forms]
        self._whole = env.communicator.room(sum(self._sizes), device)
        for form, own in zip(forms, self._whole.split(self._sizes), strict=True):
            form.write(own)
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
        others, sent = self._others(), [self._mine] * (self._env.world_size - 1)
        is_one = len(others) == 1  # its sums arrive where they belong
        received = others[0] if is_one else self._whole.new_empty(sum(self._out))
        self._env.communicator.all_to_all(
            received, joined(sent), self._out, self._back, label="dense sums"
        ).wait()
        if not is_one:
            for piece, values in zip(
                others, received.split([piece.numel() for piece in others]), strict=True
            ):
                piece.copy_(values)
