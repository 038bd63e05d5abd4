"""Sizes of a cache of rows, without torch: planners ask for them."""

from __future__ import annotations

import math

SLOTS_OF_A_SET = 32
"""Slots of a set. Fewer are searched faster, and lose more hits to sets that have more hot rows than slots: FBGEMM has
as many (``DEFAULT_ASSOC``)."""

# A slot's row and the time of its last use (int64), and a mark that it was changed (bool); a row's uses (int32).
_SLOT_BYTES, _USES_BYTES = 8 + 8 + 1, 4


def num_sets(num_rows: int, held: float) -> int:
    """Number of sets for a part of a table's rows: whole ones, at least one."""
    return max(1, math.ceil(int(num_rows * held) / SLOTS_OF_A_SET))


def num_slots(num_rows: int, held: float) -> int:
    """Rows that a cache has room for."""
    return num_sets(num_rows, held) * SLOTS_OF_A_SET


def bookkeeping_bytes(num_rows: int, held: float, *, counts_uses: bool) -> int:
    """Bytes of what says which rows are in a cache, and when they were used."""
    return num_slots(num_rows, held) * _SLOT_BYTES + (num_rows * _USES_BYTES if counts_uses else 0)
