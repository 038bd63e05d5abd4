"""Gradients of rows that are kept until ``optimizer.step()`` applies them: ``update="in_step"``.

A kernel that runs its optimizer in the backward pass updates rows as soon as gradients arrive. Wrapped in
:class:`KeptGradients` it does not: a backward pass adds up the gradient of each row that was looked up, the next
passes add to it, and the step hands the sums to the kernel as bags of one id each. Between the two they are scaled,
clipped or dropped, as the gradients of dense parameters are.

Legend: W sources, S slots, K blocks, U rows of a block that have a gradient, D columns of a block, C columns of its
gradient (D, or those of the whole table where the kernel needs whole rows), N ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.contracts.lookup import Bags, Lookup
from shardwright.errors import UnsupportedError
from shardwright.planning.plan.sharding import ParameterSharding
from shardwright.planning.tables.spec import TableSpec
from shardwright.runtime.step.backward.row_gradients import BlockBags, row_gradients, rows_as_bags
from shardwright.runtime.step.kernel_groups import KernelGroup, is_updated_in_backward


def is_updated_in_step(table: TableSpec, sharding: ParameterSharding) -> bool:
    """Tell if the kernel of a table runs its optimizer in ``optimizer.step()``."""
    return table.update == "in_step" and is_updated_in_backward(table, sharding)


def is_kept(group: KernelGroup) -> bool:
    """Tell if a kernel group's gradients are to be kept for the optimizer's step."""
    table = group.blocks[0].table
    return table.update == "in_step" and table.optimizer is not None and group.kernel.fuses_optimizer


def prefetches(lookup: Lookup) -> bool:
    """Tell if a lookup brings the rows of coming bags near; others inherit that nothing happens."""
    own = lookup._lookup if isinstance(lookup, KeptGradients) else lookup
    return type(own).prefetch is not Lookup.prefetch


def keeping_gradients(lookups: Sequence[Lookup], groups: Sequence[KernelGroup]) -> list[Lookup]:
    """The lookups of kernel groups, wrapped where their tables are updated in the step."""
    return [
        # Resharding keeps blocks that do not move.
        KeptGradients(lookup, group) if is_kept(group) and not isinstance(lookup, KeptGradients) else lookup
        for lookup, group in zip(lookups, groups, strict=True)
    ]


class KeptGradients(Lookup):
    """A lookup whose backward passes keep the gradient of each row, and which updates when asked to.

    Args:
        lookup: lookup that the kernel built.
        group: its kernel group.
    """

    def __init__(self, lookup: Lookup, group: KernelGroup) -> None:
        self._lookup, self._kernel = lookup, group.kernel
        self.blocks, self.states_per_row = lookup.blocks, lookup.states_per_row
        self._order = BlockBags(self.blocks, group.kernel)
        self._kept: list[tuple[Tensor, Tensor] | None] = [None] * len(self.blocks)

    @property
    def room(self) -> Callable[[int], Tensor]:
        """Maker of the memory for results."""
        return self._lookup.room

    @room.setter
    def room(self, maker: Callable[[int], Tensor]) -> None:
        self._lookup.room = maker

    def forward(self, bags: Bags, *, training: bool) -> tuple[Tensor, Any]:
        """Sum the rows of each bag; the kernel is to keep nothing for a backward pass."""
        return self._lookup.forward(bags, training=False)[0], bags if training else None

    def prefetch(self, bags: Bags) -> None:
        """Have the kernel bring the rows of a coming lookup near."""
        self._lookup.prefetch(bags)

    def prepare(self, bags: Bags) -> Any:
        """The bags are all that :meth:`backward` needs."""
        return bags

    def backward(self, saved: Any, gradient: Tensor) -> Sequence[Tensor | None]:
        """Add the gradients of rows to those that are kept."""
        return self.backward_scaled(saved, gradient, 1.0)

    def backward_scaled(self, saved: Any, gradient: Tensor, scale: float) -> Sequence[Tensor | None]:
        """The same with ``scale`` times the gradient."""
        for block, (bags, own) in enumerate(self._order.of(saved, gradient)):
            rows, values = row_gradients(bags, own)
            self._add(block, rows, values if scale == 1 else values.mul_(scale))
        return ()

    def _add(self, block: int, rows: Tensor, values: Tensor) -> None:
        """Add the gradients of distinct rows, in rising order, to those that a block has."""
        kept = self._kept[block]
        if kept is not None:
            rows, places = torch.unique(torch.cat([kept[0], rows]), return_inverse=True)
            # Summed in the order of the passes, so that copies on several ranks stay equal bit for bit.
            values = values.new_zeros(len(rows), values.shape[1]).index_add_(
                0, places, torch.cat([kept[1], values])
            )
        self._kept[block] = rows, values

    def apply(self) -> None:
        """Update rows by what is kept, which stays; nothing where no backward pass was made since it was dropped."""
        if self.has_gradients:
            bags, gradient = self._as_bags()
            self._lookup.backward(self._lookup.prepare(bags), gradient)

    def _as_bags(self) -> tuple[Bags, Tensor]:
        """Kept gradients as the batch of one source: a bag of one id for each row, in each block's first slot."""
        # That of what is kept: a kernel may have its weights in other memory than its device's.
        device = next(own[0].device for own in self._kept if own is not None)
        request = self.blocks[0].request
        is_ragged = request.is_pooled and self._kernel.takes_ragged_bags
        return rows_as_bags(
            [self._kept_or_none(block, device) for block in range(len(self.blocks))],
            self._order.slot_dims,
            self._order.first_slots,
            is_pooled=request.is_pooled,
            is_weighted=request.is_weighted,
            is_matrix=self._kernel.batch_major and request.is_pooled and not is_ragged,
            is_ragged=is_ragged,
        )

    def _kept_or_none(self, block: int, device: torch.device) -> tuple[Tensor, Tensor]:
        kept = self._kept[block]
        if kept is not None:
            return kept
        no_rows = torch.empty(0, dtype=torch.int64, device=device)
        return no_rows, torch.empty(0, self._order.dims[block], dtype=torch.float32, device=device)

    def drop(self, block: int) -> None:
        """Forget what is kept of a block."""
        self._kept[block] = None

    def empty(self, block: int) -> None:
        """Forget the rows that have a gradient: that of the block is 0."""
        kept = self._kept[block]
        self._kept[block] = None if kept is None else (kept[0][:0], kept[1][:0])

    @property
    def has_gradients(self) -> bool:
        """True if a backward pass was made since they were dropped."""
        return any(kept is not None for kept in self._kept)

    def gradient(self, block: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """The gradient that is kept of a block, shared storage; ``None`` before a backward pass.

        Returns:
            The rows that have a gradient, ``[U]``, rising; their gradients, ``[U, C]``; of these the block's own
            columns, ``[U, D]``.
        """
        kept, columns = self._kept[block], self.blocks[block].block.columns
        if kept is None:
            return None
        is_whole = kept[1].shape[1] > columns.stop - columns.start
        return *kept, kept[1][:, columns.start : columns.stop] if is_whole else kept[1]

    def weight(self, block: int) -> Tensor:
        """The weights of a block."""
        return self._lookup.weight(block)

    def optimizer_state(self, block: int) -> Mapping[str, Tensor]:
        """The optimizer state of a block."""
        return self._lookup.optimizer_state(block)

    def load_step(self, step: float) -> None:
        """Set the number of updates done."""
        self._lookup.load_step(step)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Use another learning rate from now on."""
        self._lookup.set_learning_rate(learning_rate)


def have_gradients(lookups: Sequence[KeptGradients]) -> bool:
    """Tell if a backward pass ran since the last drop, even one without ids."""
    return any(lookup.has_gradients for lookup in lookups)


def lookups_that_keep(lookups: Sequence[Lookup], groups: Sequence[KernelGroup]) -> list[KeptGradients]:
    """The lookups that keep gradients for the optimizer's step.

    Raises:
        UnsupportedError: one is to, but does not.
    """
    for lookup, group in zip(lookups, groups, strict=True):
        table = group.blocks[0].table
        if is_kept(group) and not isinstance(lookup, KeptGradients):
            raise UnsupportedError(
                f"table {table.describe()} is to be updated in_step, but the executor of its dataflow updates it in "
                "the backward pass. Shard it with update='in_backward'"
            )
    return [lookup for lookup in lookups if isinstance(lookup, KeptGradients)]
