"""Proofs, before any search, that there is no plan: memory that the least needy options exceed.

Legend: A tables, M memory tiers, O options.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

import numpy as np
from attrs import frozen

from shardwright.planning.arrays import Ints
from shardwright.planning.options.options import Options
from shardwright.planning.options.rank_rules import some
from shardwright.planning.options.search_space import SearchSpace
from shardwright.planning.text import bytes_text

MORE = (
    " More ranks or memory, a smaller data type or storage_reservation, or a sharding type or kernel that needs "
    "less of it on one rank would help."
)


@frozen
class TooLarge:
    """A table of which no option fits, even alone.

    Args:
        table: index among all tables.
        text: sentence with the need of the table and the capacity there is.
    """

    table: int
    text: str


@frozen
class Needed:
    """Least memory that all tables need of some tiers together.

    Args:
        tiers: indices of the tiers.
        least_bytes: bytes that the least needy options take.
        usable_bytes: bytes that the ranks have, without what is reserved.
        total_bytes: bytes that the ranks have.
    """

    tiers: tuple[int, ...]
    least_bytes: int
    usable_bytes: int
    total_bytes: int

    @classmethod
    def of(cls, space: SearchSpace, tiers: Sequence[int]) -> Needed:
        """Add up the need of some tiers."""
        chosen = list(tiers)
        size = space.total_bytes[:, chosen].sum(axis=1)
        least = np.minimum.reduceat(size, space.options.first_option[:-1]) @ space.options.multiplicity
        usable, total = (
            int(capacity[:, chosen].sum())
            for capacity in (space.capacity_bytes, space.topology.capacity_bytes)
        )
        return cls(tuple(tiers), int(least), usable, total)

    @property
    def is_too_much(self) -> bool:
        """True if it is more than there is."""
        return self.least_bytes > self.usable_bytes

    def text(self, space: SearchSpace) -> str:
        """``the 26 tables need at least 21.8 TiB of hbm and ddr together, ...; the 16 ranks have 8.8 TiB``."""
        reserved = f" (of {bytes_text(self.total_bytes)}, the rest is reserved)" if self.is_reserved else ""
        return (
            f"the {len(space.options.all_tables)} tables need at least {bytes_text(self.least_bytes)} of "
            f"{names_of(space, self.tiers)} together, whatever is chosen; the {len(space.capacity_bytes)} ranks have "
            f"{bytes_text(self.usable_bytes)}{reserved}"
        )

    @property
    def is_reserved(self) -> bool:
        """True if some of the capacity is reserved."""
        return self.usable_bytes < self.total_bytes


def names_of(space: SearchSpace, tiers: Sequence[int]) -> str:
    """``hbm and ddr``."""
    return " and ".join(space.tiers[tier] for tier in tiers)


def table_too_large(space: SearchSpace) -> TooLarge | None:
    """The first of all tables of which no option fits, even alone."""
    options = space.options
    fits = np.logical_or.reduceat(space.fits_alone, options.first_option[:-1])
    if fits.all():
        return None
    distinct = int(np.argmin(fits))
    table = int(np.argmax(options.distinct_table == distinct))
    mine = np.array(options.of_table(distinct))
    most = space.capacity_bytes.max(axis=0)
    share = (space.largest_bytes[mine] / np.maximum(most, 1)).max(axis=1)
    option = int(mine[np.argmin(share)])
    tier = int(np.argmax(space.largest_bytes[option] / np.maximum(most, 1)))
    rank = int(np.argmax(space.capacity_bytes[:, tier]))
    text = (
        f"no plan: table {options.all_tables[table].describe()} needs "
        f"{bytes_text(space.largest_bytes[option, tier])} of {space.tiers[tier]} on one rank, as "
        f"{options.type_of(option).name!r} with kernel {options.kernel_of(option).name!r} "
        f"({blocks_text(options, option)}); the emptiest rank ({rank}) has "
        f"{bytes_text(space.capacity_bytes[rank, tier])}{of_total(space, rank, tier)}."
    )
    return TooLarge(table, text + _spread_text(space, distinct, tier))


def _spread_text(space: SearchSpace, distinct: int, tier: int) -> str:
    """Name the number of ranks that could hold a table in equal parts, if there are too few; else nothing."""
    least = int(space.total_bytes[np.array(space.options.of_table(distinct)), tier].min())
    most = int(space.capacity_bytes[:, tier].max())
    enough = -(-least // most) if most else 0
    if enough <= len(space.capacity_bytes):
        return ""
    return f" All of it takes at least {bytes_text(least)}, the {space.tiers[tier]} of {enough} such ranks."


def too_much(space: SearchSpace) -> str:
    """Tell a need of all tables, or of those that rules keep to some ranks, above what there is; empty if none is."""
    return _too_much_together(space) or _too_much_for_rules(space)


def _too_much_together(space: SearchSpace) -> str:
    """Tell a need of all tables for one or several tiers that is above what there is; empty if none is."""
    needed = next((needed for needed in _each_needed(space) if needed.is_too_much), None)
    if needed is None:
        return ""
    return f"no plan: {needed.text(space)}. I{enough_text(space, needed)[1:]}"


def scarcest(space: SearchSpace) -> Needed | None:
    """Find the tier, or tiers, with the highest need relative to supply; ``None`` where nothing is needed."""
    each = [needed for needed in _each_needed(space) if needed.usable_bytes and needed.least_bytes]
    return max(each, key=lambda needed: needed.least_bytes / needed.usable_bytes, default=None)


def _each_needed(space: SearchSpace) -> Iterator[Needed]:
    """Yield the need of each tier, of each two, and so on; tiers that nothing uses are left out."""
    tiers = [tier for tier in range(len(space.tiers)) if space.total_bytes[:, tier].any()]
    for count in range(1, len(tiers) + 1):
        for chosen in combinations(tiers, count):
            yield Needed.of(space, chosen)


def enough_text(space: SearchSpace, needed: Needed, spare: float = 0.0) -> str:
    """Name the least number of ranks, or memory of each, that would be enough.

    Args:
        space: options and capacities.
        needed: need of some tiers.
        spare: the part of what is needed that is to be left over.
    """
    world_size, tier = len(space.capacity_bytes), needed.tiers[0]
    least = int(needed.least_bytes * (1 + spare))
    usable, total = (
        int(space.capacity_bytes[:, tier].sum()),
        int(space.topology.capacity_bytes[:, tier].sum()),
    )
    more = max(0.0, (least - needed.usable_bytes) * (total / usable if usable else 1) / world_size)
    ways = [f"{bytes_text(more)} more of {space.tiers[tier]} on each"]
    if needed.usable_bytes:
        ways.insert(0, f"{-(-least * world_size // needed.usable_bytes)} such ranks")
    what = f"to have {spare:.0%} to spare, it takes" if spare else "it takes at least"
    smaller = (
        "data type, batch size or storage_reservation" if needed.is_reserved else "data type or batch size"
    )
    others = "" if len(needed.tiers) == len(space.tiers) else ", or kernels that use another memory"
    return f"{what} {' or '.join(ways)}; or a smaller {smaller}{others}."


def _too_much_for_rules(space: SearchSpace) -> str:
    """Tell a need of tables that rules keep to some ranks above what these have; empty if none is."""
    rules, least = space.rules, _least_bytes(space)
    if rules is None:
        return ""
    for table in sorted(rules.concerned):
        text = _lonely_text(space, table, sorted(rules.allowed(table)))
        if text:
            return text
    for group in dict.fromkeys(rules.together.values()):
        have = space.capacity_bytes[sorted(rules.allowed(group[0]))].max(axis=0)
        text = _crowded_text(space, group, "are kept together on one rank", least, have)
        if text:
            return text
    for ranks in dict.fromkeys(rules.allowed(table) for table in sorted(rules.ranks)):
        tables = tuple(table for table in sorted(rules.concerned) if rules.allowed(table) <= ranks)
        have = space.capacity_bytes[sorted(ranks)].sum(axis=0)
        text = _crowded_text(space, tables, f"may use no ranks but {some(sorted(ranks))}", least, have)
        if text:
            return text
    return ""


def _lonely_text(space: SearchSpace, table: int, ranks: Sequence[int]) -> str:
    """Tell that no option of a table goes into its ranks, were they empty; empty if one does."""
    mine = np.array(space.options.of_table(int(space.options.distinct_table[table])))
    there = space.capacity_bytes[list(ranks)]
    over = np.maximum(
        (space.total_bytes[mine] - there.sum(axis=0)).max(axis=1),
        (space.largest_bytes[mine] - there.max(axis=0)).max(axis=1),
    )
    nearest = int(np.argmin(over))
    if over[nearest] <= 0:
        return ""
    option = int(mine[nearest])
    needs, has = (
        ", ".join(
            f"{bytes_text(size)} of {tier}" for tier, size in zip(space.tiers, sizes.tolist(), strict=True)
        )
        for sizes in (space.total_bytes[option], there.sum(axis=0))
    )
    return (
        f"no plan: table {space.options.all_tables[table].describe()} may use no ranks but {some(ranks)}, which have "
        f"{has}; of its options none fits there. That which comes nearest, "
        f"{space.options.type_of(option).name!r} with kernel {space.options.kernel_of(option).name!r} "
        f"({blocks_text(space.options, option)}), needs {needs}. Loosen its constraint 'ranks'; or more memory, a "
        "smaller data type, batch size or storage_reservation."
    )


def _least_bytes(space: SearchSpace) -> Ints:
    """Compute the least bytes that each of all tables needs of each tier: ``[A, M]``."""
    least: Ints = np.minimum.reduceat(space.total_bytes, space.options.first_option[:-1], axis=0)
    return least[space.options.distinct_table]


def _crowded_text(space: SearchSpace, tables: Sequence[int], where: str, least: Ints, have: Ints) -> str:
    """Tell that some tables need more than there is where they are kept; empty if they do not."""
    need = least[list(tables)].sum(axis=0)
    tier = int(np.argmax(need - have))
    if need[tier] <= have[tier]:
        return ""
    names = some([space.options.all_tables[table].path for table in tables])
    return (
        f"no plan: {len(tables)} of the tables ({names}) {where}, and need at least {bytes_text(need[tier])} of "
        f"{space.tiers[tier]} there, whatever is chosen; there is {bytes_text(have[tier])}. Loosen 'ranks' or "
        "'together' of their constraints; or more memory, a smaller data type, batch size or storage_reservation."
    )


def of_total(space: SearchSpace, rank: int, tier: int) -> str:
    """Tell that a rank's capacity is in part reserved; empty if it is not."""
    total = int(space.topology.capacity_bytes[rank, tier])
    usable = int(space.capacity_bytes[rank, tier])
    return f" (of {bytes_text(total)}, the rest is reserved)" if usable < total else ""


def blocks_text(options: Options, option: int) -> str:
    """``3 blocks``."""
    count = int(options.shards_per_option[option])
    return f"{count} block{'s' if count > 1 else ''}"
