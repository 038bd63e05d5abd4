"""Ragged bags for kernels that want the same number of bags in every slot.

Of cut rows only bags with ids travel, so each slot has its own number of bags. For a kernel that does not take ragged
bags each slot of each source is filled up with empty bags to the number of the longest. The ids stay as they are.

Legend: W sources, S slots, K bags, n bags of the longest slot of a source.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from attrs import evolve
from torch import Tensor

from shardwright.contracts.lookup import Bags, Lookup
from shardwright.runtime.step.kernel_groups import KernelGroup
from shardwright.runtime.step.segments import filled_up, index_of, repeated


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
            The filled bags; the row of each ragged bag in the kernel's result, seen as rows of one width, ``[K]``; and
            the number of the result's rows, ``W * S * n``.
        """
        assert bags.lengths is not None  # only pooled lookups are ragged
        counts, device = bags.table.reshape(-1), bags.ids.device
        sizes = np.full_like(counts, counts.max(initial=0))
        cells = np.arange(len(counts)).reshape(bags.table.shape)
        first, step = cells.reshape(-1) * sizes, 1
        if self._batch_major:  # within a source [n, S]
            first, step = (cells[:, :1] * sizes[:1] + cells[:1]).reshape(-1), bags.num_slots
        row = index_of(np.zeros_like(counts), counts, device).mul_(step).add_(repeated(first, counts, device))
        lengths = filled_up(bags.lengths, counts, sizes)
        table = sizes.reshape(bags.table.shape)
        return evolve(bags, lengths=lengths, counts=table, is_ragged=False), row, len(lengths)


def taking_ragged(lookup: Lookup, group: KernelGroup) -> Lookup | FillingLookup:
    """Return a lookup that takes ragged bags if the group has them: the given one, or one that fills them up."""
    if not group.kind.is_ragged or group.kernel.takes_ragged_bags:
        return lookup
    return FillingLookup(lookup, group)
