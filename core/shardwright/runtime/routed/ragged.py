"""Ragged bags for kernels that want the same number of bags in every slot.

Of cut rows only bags with ids travel, so each slot has its own number of bags. A kernel that does not take ragged bags
gets them as bags of one source: each slot is filled up with empty bags to the number of the longest.

Legend: W sources, S slots, K bags, n bags of the longest slot, N ids, D columns of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from shardwright.contracts.lookup import Bags, Lookup
from shardwright.runtime.step.kernel_groups import KernelGroup
from shardwright.runtime.step.segments import index_of, numbered, order_of, repeated


class FillingLookup:
    """A lookup of ragged bags by another that takes none.

    Args:
        lookup: lookup that does not take ragged bags.
        group: kernel group of that lookup; its slots have one width.
    """

    def __init__(self, lookup: Lookup, group: KernelGroup) -> None:
        assert group.kind.widths is not None  # the planner of groups puts ragged slots of one width together
        self._lookup, self._widths = lookup, group.kind.widths
        self._batch_major = group.kernel.batch_major

    def forward(self, bags: Bags, *, training: bool) -> tuple[Tensor, Any]:
        """Look up as :meth:`Lookup.forward` does; results are rows in the order of the ragged bags."""
        filled, row, num_rows = self._filled(bags)
        result, saved = self._lookup.forward(filled, training=training)
        rows = result.reshape(num_rows, self._widths[0]).index_select(0, row)
        return rows.view(-1), (row, num_rows, saved)

    def prefetch(self, bags: Bags) -> None:
        """Bring rows near as :meth:`Lookup.prefetch` does."""
        self._lookup.prefetch(self._filled(bags)[0])

    def anticipate(self, saved: Any) -> None:
        """Prepare the backward pass as :meth:`Lookup.anticipate` does."""
        self._lookup.anticipate(saved[-1])

    def backward_scaled(self, saved: Any, gradient: Tensor, scale: float) -> Sequence[Tensor | None]:
        """Update as :meth:`Lookup.backward_scaled` does."""
        row, num_rows, inner = saved
        rows = gradient.new_zeros(num_rows, self._widths[1])
        rows[row] = gradient.view(len(row), self._widths[1])
        return self._lookup.backward_scaled(inner, rows.view(-1), scale)

    def _filled(self, bags: Bags) -> tuple[Bags, Tensor, int]:
        """Fill up bags.

        Returns:
            The filled bags, of one source; the row of each ragged bag in the kernel's result, seen as rows of one
            width, ``[K]``; and the number of the result's rows, ``S * n``.
        """
        assert bags.lengths is not None  # only pooled lookups are ragged
        counts, device = bags.table, bags.ids.device
        # Ragged bags stand source by source, then slot by slot. Filled bags stand slot by slot, [S, n], and within a
        # slot source after source: bag k of (source, slot) gets place (bags of sources before) + k in its slot.
        before = np.cumsum(counts, axis=0) - counts
        most = int(counts.sum(0).max(initial=0))
        slots = np.tile(np.arange(bags.num_slots), bags.num_sources)
        place = index_of(before.reshape(-1), counts.reshape(-1), device)  # place of each bag in its slot
        slot = repeated(slots, counts.reshape(-1), device)
        target = slot * most + place
        lengths = bags.lengths.new_zeros(bags.num_slots * most)
        lengths[target] = bags.lengths
        # The ids move with their bags: stably sorted by target bag, which keeps the order within a bag.
        order = order_of(target.index_select(0, numbered(bags.lengths, bags.ids.numel())), len(lengths))
        filled = Bags(
            ids=bags.ids.index_select(0, order),
            lengths=lengths,
            weights=None if bags.weights is None else bags.weights.index_select(0, order),
            counts=((most,) * bags.num_slots,),
            columns={name: column.index_select(0, order) for name, column in bags.columns.items()},
        )
        row = place * bags.num_slots + slot if self._batch_major else target
        return filled, row, len(lengths)


def taking_ragged(lookup: Lookup, group: KernelGroup) -> Lookup | FillingLookup:
    """Return a lookup that takes ragged bags if the group has them: the given one, or one that fills them up."""
    if not group.kind.is_ragged or group.kernel.takes_ragged_bags:
        return lookup
    return FillingLookup(lookup, group)
