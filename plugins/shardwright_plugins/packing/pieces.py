"""What placing the options of a table takes. Legend: K shards, W ranks, J options, D dimensions (time, then tiers)."""

from __future__ import annotations

from attrs import frozen

from shardwright.planning.options import Floats, Ints


@frozen(eq=False)
class Pieces:
    """The shards of an option.

    Args:
        fixed: what those take that have a rank by their layout: ``[W, D]``; ``None`` if there are none.
        size: of each of the others, ``[K, D]``.
        gang: ``[K]``, numbered within the option.
        local: the rank inside the host that it must have: ``[K]``.
        kind: the run of equal shards that it is of: ``[K]``.
    """

    fixed: Floats | None
    size: Floats
    gang: Ints
    local: Ints
    kind: Ints


@frozen(eq=False)
class Menu:
    """The options of a table that are worth a look, by what placing them takes.

    Args:
        singles: those of one shard that may go anywhere: ``[K]``.
        single_size: ``[K, D]``.
        spread: those of which all shards have a rank by their layout: ``[J]``.
        spread_size: what they take, ``[J, W, D]``.
        others: the rest.
    """

    singles: Ints
    single_size: Floats
    spread: Ints
    spread_size: Floats
    others: tuple[int, ...]
