"""The bookkeeping of a set-associative cache of rows: which slot holds which row, and which row leaves.

A row may be in any slot of one set, and rows that follow one another are in sets that do. Each table has sets of its
own, so that a table's hits do not depend on others. In one call the rows that are there already are found first, and
stay; then, set by set, the others get the slots that are empty or whose rows leave:

- LRU: the row that was used longest ago leaves.
- LFU: the row that was used in the fewest calls leaves, of several the one that was used longest ago. A row that was
  used less often than the one that would leave for it does not come in. Uses of all rows are counted, as FBGEMM does.

A row for which its set has no slot is served from where it is kept. Everything is array operations of torch, so that
the same code runs on any device.

Legend: R rows of all tables, K tables, A slots of a set, S slots, U distinct rows of a call, M of them that miss.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from shardwright_plugins.compute_kernels.row_cache.sizes import SLOTS_OF_A_SET

NONE = -1
"""A slot without a row, or a row without a slot."""
_STAYS = torch.iinfo(torch.int64).max


@frozen(eq=False)
class Changes:
    """Rows that come into the cache, and their slots' former rows.

    Args:
        slots: slots that change, ``[C]``.
        come: rows that get them, ``[C]``.
        leave: rows that had them, or :data:`NONE`, ``[C]``.
        num_missed: rows of the call that were not in the cache.
    """

    slots: Tensor
    come: Tensor
    leave: Tensor
    num_missed: int


class CacheSets:
    """The rows in each slot, and when and how often rows were used.

    Args:
        num_rows: rows of each table, ``[K]``; rows are counted through all tables.
        num_sets: sets of each table, ``[K]``.
        counts_uses: LFU, else LRU.
        device: device of the bookkeeping.
    """

    def __init__(
        self, num_rows: Sequence[int], num_sets: Sequence[int], *, counts_uses: bool, device: torch.device
    ) -> None:
        def numbers(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int64, device=device)

        self._last_rows = numbers(num_rows).cumsum(0)
        self._first_rows = self._last_rows - numbers(num_rows)
        self._num_sets = numbers(num_sets)
        self._first_sets = self._num_sets.cumsum(0) - self._num_sets
        shape = (sum(num_sets), SLOTS_OF_A_SET)
        self.rows = torch.full(shape, NONE, dtype=torch.int64, device=device)
        self._last_use = torch.zeros(shape, dtype=torch.int64, device=device)
        uses = sum(num_rows) if counts_uses else 0
        self._uses = torch.zeros(uses, dtype=torch.int32, device=device)
        self._time = 0

    @property
    def num_slots(self) -> int:
        """``S``."""
        return self.rows.numel()

    def find(self, rows: Tensor) -> Tensor:
        """The slot of each row, or :data:`NONE`: ``[U]``."""
        sets = self._sets_of(rows)
        is_here = self.rows[sets] == rows[:, None]
        slots = sets * SLOTS_OF_A_SET + is_here.to(torch.uint8).argmax(1)
        return slots.where(is_here.any(1), NONE)

    def use(self, rows: Tensor) -> tuple[Tensor, Changes]:
        """Use some rows, which come into the cache.

        Args:
            rows: distinct rows in rising order, ``[U]``.

        Returns:
            The slot that each row has now, or :data:`NONE`; and the changes.
        """
        self._time += 1
        if len(self._uses):
            self._uses[rows] += 1
        slots = self.find(rows)
        self._last_use.view(-1)[slots[slots != NONE]] = self._time
        missed = (slots == NONE).nonzero().squeeze(1)
        places, changes = self._let_in(rows[missed])
        slots[missed[places]] = changes.slots
        return slots, changes

    def occupied(self) -> tuple[Tensor, Tensor]:
        """The slots that hold a row, and the rows."""
        rows = self.rows.view(-1)
        slots = (rows != NONE).nonzero().squeeze(1)
        return slots, rows[slots]

    def _sets_of(self, rows: Tensor) -> Tensor:
        table = torch.searchsorted(self._last_rows, rows, right=True)
        return self._first_sets[table] + (rows - self._first_rows[table]) % self._num_sets[table]

    def _let_in(self, missed: Tensor) -> tuple[Tensor, Changes]:
        """Give slots to rows that missed, as far as their sets have some; which of them come in, and the changes."""
        line, sets, places = self._in_line(missed)
        rows = missed[line]
        # Only sets in which a row missed are sorted: slots in the order in which their rows leave.
        distinct, own = torch.unique_consecutive(sets, return_inverse=True)
        ranks = self._ranks(distinct)
        order = ranks.argsort(dim=1, stable=True)
        ways = order[own, places.clamp(max=SLOTS_OF_A_SET - 1)]
        may_enter = (places < SLOTS_OF_A_SET) & (ranks[own, ways] != _STAYS)
        if len(self._uses):
            may_enter &= self._rank_of_uses(rows) >= (ranks[own, ways] & ~_TIME_MASK)
        slots = (sets * SLOTS_OF_A_SET + ways)[may_enter]
        come, leave = rows[may_enter], self.rows.view(-1)[slots]
        self.rows.view(-1)[slots] = come
        self._last_use.view(-1)[slots] = self._time
        return line[may_enter], Changes(slots, come, leave, len(missed))

    def _in_line(self, missed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Order of rows that missed, set by set, the most used first; their sets; and places in their sets' lines."""
        if len(self._uses):
            line = self._uses[missed].argsort(stable=True, descending=True)
        else:
            line = torch.arange(len(missed), device=missed.device)
        sets, order = self._sets_of(missed[line]).sort(stable=True)
        _, counts = torch.unique_consecutive(sets, return_counts=True)
        starts = (counts.cumsum(0) - counts).repeat_interleave(counts, output_size=len(sets))
        return line[order], sets, torch.arange(len(sets), device=sets.device) - starts

    def _ranks(self, sets: Tensor) -> Tensor:
        """Numbers by which rows leave, the least first: ``[sets, A]``."""
        rows, last_use = self.rows[sets], self._last_use[sets]
        ranks = last_use.clone()
        if len(self._uses):
            ranks |= self._rank_of_uses(rows.clamp(min=0))
        ranks.masked_fill_(rows == NONE, NONE)
        return ranks.masked_fill_((last_use == self._time) & (rows != NONE), _STAYS)

    def _rank_of_uses(self, rows: Tensor) -> Tensor:
        """The uses of rows in the high bits of a rank, above the time of the last use."""
        return self._uses[rows].long() << _TIME_BITS


_TIME_BITS = 32  # calls that a cache lives through: at 1 000 a second, 49 days; uses have the other 31
_TIME_MASK = (1 << _TIME_BITS) - 1
