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

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from shardwright.contracts.lookup import Bags, Lookup
from shardwright.error_reports import reporting_errors
from shardwright.errors import UnsupportedError
from shardwright.planning.layouts.blocks import Ints
from shardwright.planning.plan.sharding import ParameterSharding
from shardwright.planning.tables.spec import TableSpec
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.step.backward.block_bags import BlockBags
from shardwright.runtime.step.backward.row_gradients import row_gradients
from shardwright.runtime.step.kernel_groups import KernelGroup, is_updated_in_backward
from shardwright.runtime.step.segments import starts_of

_WHOLE_ROWS = (
    "the gradient of table {table} was changed in place, but this rank keeps that of whole rows, of which it shows its "
    "own columns: scale the loss, or clip by shardwright.clip_grad_norm_(model.parameters(), max_norm)"
)
"""An error of blocks of cut columns whose optimizer has a state a row."""


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
        self._shown: list[Tensor | None] = [None] * len(self.blocks)
        self._versions = [0] * len(self.blocks)  # torch's counts of changes in place, of what was shown

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
        kept, self._shown[block] = self._now(block), None
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
        blocks = range(len(self.blocks))
        device = next(own[0].device for own in map(self._now, blocks) if own is not None)
        request = self.blocks[0].request
        kept = [self._kept_or_none(block, device) for block in blocks]
        used = np.zeros(len(self._order.slot_dims), dtype=np.int64)
        used[self._order.first_slots] = [len(rows) for rows, _ in kept]
        is_ragged = request.is_pooled and self._kernel.takes_ragged_bags
        # Pooled lookups want as many bags in every slot, unless they take ragged ones.
        counts = np.full_like(used, used.max()) if request.is_pooled and not is_ragged else used
        ids = torch.cat([rows for rows, _ in kept])
        lengths = None
        if request.is_pooled:
            lengths = torch.zeros(int(counts.sum()), dtype=torch.int32, device=device)
            for start, count in zip(starts_of(counts).tolist(), used.tolist(), strict=True):
                lengths[start : start + count] = 1
        # The weights of ids are in the rows' gradients already.
        weights = torch.ones(len(ids), dtype=torch.float32, device=device) if request.is_weighted else None
        bags = Bags(ids, lengths, weights, counts[None], is_ragged)
        return bags, self._flat_gradient([values for _, values in kept], counts, is_ragged=is_ragged)

    def _kept_or_none(self, block: int, device: torch.device) -> tuple[Tensor, Tensor]:
        kept = self._now(block)
        if kept is not None:
            return kept
        no_rows = torch.empty(0, dtype=torch.int64, device=device)
        return no_rows, torch.empty(0, self._order.dims[block], dtype=torch.float32, device=device)

    def _flat_gradient(self, values: Sequence[Tensor], counts: Ints, *, is_ragged: bool) -> Tensor:
        """The gradients of each block's rows in the order in which the kernel takes them, zeros for other bags."""
        sizes = counts * self._order.slot_dims
        flat = values[0].new_zeros(int(sizes.sum()))
        is_matrix = self._kernel.batch_major and self.blocks[0].request.is_pooled and not is_ragged
        starts = starts_of(self._order.slot_dims if is_matrix else sizes)[self._order.first_slots].tolist()
        for own, start in zip(values, starts, strict=True):
            if is_matrix:
                flat.view(-1, int(self._order.slot_dims.sum()))[: len(own), start : start + own.shape[1]] = (
                    own
                )
            else:
                flat[start : start + own.numel()] = own.reshape(-1)
        return flat

    def scale(self, block: int, factor: float) -> None:
        """Multiply the gradients that a block has."""
        kept = self._now(block)
        if kept is not None:
            kept[1].mul_(factor)

    def clamp(self, block: int, most: float) -> None:
        """Clip each element of the gradients that a block has."""
        kept = self._now(block)
        if kept is not None:
            kept[1].clamp_(-most, most)

    def drop(self, block: int | None = None) -> None:
        """Forget what is kept, of one block or of all."""
        for index in range(len(self.blocks)) if block is None else (block,):
            self._kept[index] = self._shown[index] = None

    @property
    def has_gradients(self) -> bool:
        """True if a backward pass was made since they were dropped."""
        return any(kept is not None for kept in self._kept)

    @property
    def sums(self) -> list[Tensor]:
        """All that is kept, ``[U, C]`` each; storage is shared."""
        return [kept[1] for kept in map(self._now, range(len(self.blocks))) if kept is not None]

    def rows(self, block: int) -> tuple[Tensor, Tensor] | None:
        """A block's rows that have a gradient, ``[U]``, and the gradients of its own columns, ``[U, D]``, shared."""
        kept = self._now(block)
        return None if kept is None else (kept[0], self._own_columns(block, kept[1]))

    def _own_columns(self, block: int, values: Tensor) -> Tensor:
        columns = self.blocks[block].block.columns
        is_whole = values.shape[1] > columns.stop - columns.start
        return values[:, columns.start : columns.stop] if is_whole else values

    def shown(self, block: int) -> Tensor | None:
        """A block's gradient, sparse ``[rows, D]``, in shared storage; what is done to it in place is taken over."""
        kept = self.rows(block)
        if kept is not None and self._shown[block] is None:
            rows, values = kept
            shape = self.weight(block).shape
            self._shown[block] = torch.sparse_coo_tensor(
                rows[None], values, shape, is_coalesced=True, check_invariants=False
            )
            self._versions[block] = self._shown[block]._version  # type: ignore[union-attr]
        return self._shown[block]

    def shows(self, block: int, gradient: Tensor) -> bool:
        """Tell if a tensor is what :meth:`shown` gave for a block."""
        return self._shown[block] is gradient

    def _now(self, block: int) -> tuple[Tensor, Tensor] | None:
        """The rows and gradients of a block; ``mul_`` and others give the sparse tensor that was shown other memory."""
        kept, shown = self._kept[block], self._shown[block]
        if kept is None or shown is None:
            return kept
        own = self._own_columns(block, kept[1])
        if own is not kept[1] and shown._version != self._versions[block]:
            if shown._nnz():
                with reporting_errors():
                    raise UnsupportedError(_WHOLE_ROWS.format(table=self.blocks[block].table.describe()))
            kept = self._kept[block] = kept[0][:0], kept[1][:0]  # set to zero, as zero_grad does
            self._shown[block] = None
            return kept
        if shown._values().data_ptr() != own.data_ptr():
            if not torch.equal(shown._indices()[0], kept[0]):  # rows were added or dropped
                shown, self._shown[block] = shown.coalesce(), None
            self._kept[block] = shown._indices()[0], shown._values()
        return self._kept[block]

    def weight(self, block: int) -> Tensor:
        """The weights of a block."""
        return self._lookup.weight(block)

    def optimizer_state(self, block: int) -> Mapping[str, Tensor]:
        """The optimizer state of a block."""
        return self._lookup.optimizer_state(block)

    def row_state(self, block: int) -> Mapping[str, Tensor]:
        """Further state of a block's rows."""
        return self._lookup.row_state(block)

    def load_rows(self, block: int, state: Mapping[str, Tensor]) -> Tensor | None:
        """Take over further state of rows."""
        return self._lookup.load_rows(block, state)

    def loaded_rows(self, block: int) -> Tensor | None:
        """The rows that were loaded."""
        return self._lookup.loaded_rows(block)

    def load_step(self, step: float) -> None:
        """Set the number of updates done."""
        self._lookup.load_step(step)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Use another learning rate from now on."""
        self._lookup.set_learning_rate(learning_rate)


@frozen(eq=False)
class KeptBlock:
    """The kept gradients of one local block.

    Args:
        lookup: lookup that keeps them.
        index: number of the block there.
        num_copies: ranks that have the same gradients of the block.
    """

    lookup: KeptGradients
    index: int
    num_copies: int

    def gradient(self) -> Tensor | None:
        """The block's gradient, sparse ``[rows, D]``; what is done to it in place is done to what is kept."""
        return self.lookup.shown(self.index)

    def shows(self, gradient: Tensor) -> bool:
        """Tell if a tensor is the one that :meth:`gradient` gave."""
        return self.lookup.shows(self.index, gradient)

    @property
    def values(self) -> Tensor | None:
        """The gradients of its own columns, ``[U, D]``; storage is shared."""
        kept = self.lookup.rows(self.index)
        return None if kept is None else kept[1]

    def scale(self, factor: float) -> None:
        """Multiply what is kept, in columns beside the block's own as well."""
        self.lookup.scale(self.index, factor)

    def clamp(self, most: float) -> None:
        """Clip each element of what is kept, in columns beside the block's own as well."""
        self.lookup.clamp(self.index, most)

    def drop(self) -> None:
        """Forget what is kept."""
        self.lookup.drop(self.index)


class KeptUpdates:
    """All gradients that a collection keeps on this rank, for its optimizer and for gradient scalers.

    Args:
        lookups: lookups that keep some; none on a rank that has no block of a table that is updated in the step.
        env: the ranks.
    """

    def __init__(self, lookups: Sequence[KeptGradients], env: ShardingEnv) -> None:
        self._lookups, self.env = list(lookups), env

    def apply(self) -> None:
        """Update all rows that have a gradient."""
        with torch.no_grad():
            for lookup in self._lookups:
                lookup.apply()

    @property
    def is_there(self) -> bool:
        """True if there are gradients, be they of no row."""
        return any(lookup.has_gradients for lookup in self._lookups)

    def drop(self) -> None:
        """Forget all gradients."""
        for lookup in self._lookups:
            lookup.drop()

    def unscale(self, inverse_scale: Tensor) -> bool:
        """Multiply all gradients; returns whether one of this rank is infinite or no number."""
        values = [own for lookup in self._lookups for own in lookup.sums if own.numel()]
        if not values:
            return False
        found = torch.zeros((), dtype=torch.float32, device=values[0].device)
        torch._amp_foreach_non_finite_check_and_unscale_(values, found, inverse_scale.to(found.device))
        return bool(found)
