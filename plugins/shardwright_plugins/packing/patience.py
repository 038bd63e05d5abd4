"""Packing what hardly fits: other options and other ranks in turn, as long as it takes."""

from __future__ import annotations

from collections.abc import Callable

from shardwright.planning.options import Floats
from shardwright_plugins.packing.assignment import Assignment
from shardwright_plugins.packing.sharing import share_out

# Of one turn: tables taken out and put back, and ranks shared out anew.
_REBUILDS, _SHARINGS = 40, 200


def pack(assignment: Assignment, price: Floats, turns: int, is_over: Callable[[], bool]) -> bool:
    """Change options and ranks as long as something is over a limit; whether nothing is any more.

    Either alone gets stuck where little room is left: the options that need least do not go together, or the ranks
    that were chosen leave room in many places where it is needed in one.

    Args:
        assignment: every shard has a rank.
        price: of each option, to choose among ways that leave equally much over: ``[O]``.
        turns: at most.
        is_over: whether to end.
    """
    for seed in range(turns):
        if assignment.rebuild(_REBUILDS, price, seed=seed) or share_out(
            assignment.bins, _SHARINGS, seed=seed
        ):
            return True
        if is_over():
            return False
    return False
