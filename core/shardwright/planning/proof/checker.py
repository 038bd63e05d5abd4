"""The proof of a bound, gone through again from its certificate: arithmetic on the options' costs, and no search.

Suppose a plan whose slowest rank takes less than ``z``. Each of its shards takes less than ``z``, all together less
than ``W * z``, and they fit. Priced with multipliers of what is scarce, no choice of options is cheaper than the sum of
each table's cheapest (Lagrangian relaxation; Everett 1963): if that is ``W * z`` or more, there is no such plan.

What counts as scarce in a *case* of the proof (``low <= L <= high``, each option allowed):

- the memory of a tier;
- ``L``, the time that every rank spends on options that have a shard on each of them: no free shard takes more than
  ``z - L``, and free shards have that much of a rank; of memory, what such options leave of it;
- prices: no free shards that fit into what is left of a rank together are worth more than that rank, by prices that
  each shard has (Gilmore and Gomory 1961), which a solver makes sure of;
- places: of free shards ``i`` on one rank that take the parts ``x_i`` of it, at most 1 together, the sum of
  ``floor((k + 1) * x_i) / k`` is at most 1 (a dual feasible function; Fekete and Schepers 2001).

A certificate is a case that its numbers settle, or it splits a case in two: by ``L``, by what such options take of all
ranks' memory, or by the option of one table. Or it says that a solver found it, by a mixed-integer program that is the
problem itself; that no plan is better is then stated anew and solved (:mod:`shardwright.planning.proof.program`).
Nothing of the search is here but that solver.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from attrs import evolve, frozen

from shardwright.errors import PlanError
from shardwright.planning.arrays import FREE, Bools, Floats
from shardwright.planning.options.options import Options
from shardwright.planning.options.search_space import SearchSpace
from shardwright.planning.proof.prices import most_worth, prices_of
from shardwright.planning.proof.program import why_not_empty
from shardwright.planning.watch import Watch

# Sums of the same numbers in another order differ by rounding.
TOLERANCE = 1e-9
_SOLVED = 2e-5  # the same, of what a solver's tolerances of 1e-6 leave open


@frozen(eq=False)
class _ProofCase:
    """Some of all plans: of allowed options, ``[O]``, and with ``L`` and such memory within limits, ``[1 + M]``."""

    allowed: Bools
    low: Floats
    high: Floats

    def halves(self, dimension: int, limit: float) -> tuple[_ProofCase, _ProofCase]:
        """The plans of no more than a limit, and those of no less."""
        here = np.arange(len(self.low)) == dimension
        below = evolve(self, high=np.where(here, np.minimum(self.high, limit), self.high))
        return below, evolve(self, low=np.where(here, np.maximum(self.low, limit), self.low))


def why_unproven(
    space: SearchSpace, bound_ms: float, certificate: Mapping[str, Any], *, watch: Watch | None = None
) -> str:
    """Explain why a certificate, ``{"z_ms": z, **case}``, does not prove that no plan is better; empty if it does.

    Args:
        space: options and costs.
        bound_ms: the claim.
        certificate: its proof.
        watch: ends the check, which then has not succeeded, and counts its work; no limit by default.
    """
    z = certificate.get("z_ms")
    if not isinstance(z, int | float) or bound_ms > z * (1 + TOLERANCE):
        return f"the certificate is for z_ms = {z}"
    proof = _Proof(space, z * (1 - TOLERANCE))
    try:
        if "program" in certificate:
            return why_not_empty(space, z * (1 - _SOLVED), certificate["program"], watch or Watch())
        dims = 1 + len(space.tiers)
        everything = np.ones(space.options.num_options, dtype=bool)
        with np.errstate(over="ignore", invalid="ignore"):  # absurd numbers prove nothing
            return proof.gap_in(certificate, _ProofCase(everything, np.zeros(dims), np.full(dims, np.inf)))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise PlanError(f"the certificate is malformed: {type(error).__name__}: {error}") from error


class _Proof:
    """The columns that a proof is about, summed up over the shards of each option."""

    def __init__(self, space: SearchSpace, z_ms: float) -> None:
        self.space, self.options, self.z_ms = space, space.options, z_ms
        starts, count = space.options.first_shard[:-1], space.options.count
        self.cost: Floats = sum(space.phases.values(), np.zeros(space.options.num_shards))
        self.total: Floats = np.add.reduceat(self.cost * count, starts)
        self.bytes = np.add.reduceat(space.memory_bytes * count[:, None], starts)
        is_free = space.options.rank == FREE
        self.free = np.where(is_free, count, 0)
        # Of each shard: its time, and its bytes of each tier, [S, 1 + M]; there is that much of a rank.
        self.needs: Floats = np.column_stack([self.cost, space.memory_bytes])
        self.rank_has: Floats = np.array([z_ms, *space.capacity_bytes.max(axis=0)])
        self.movable: Floats = np.maximum.reduceat(np.where(is_free[:, None], self.needs, 0.0), starts)
        fits = (self.cost < z_ms) & (self.needs <= self.rank_has).all(axis=1)
        self.fits = np.logical_and.reduceat(fits, starts)
        covers = self._covers_ranks()
        self.spread: Floats = np.where(covers[:, None], np.minimum.reduceat(self.needs, starts), 0.0)

    def _covers_ranks(self) -> Bools:
        """True for options with a shard on every rank, so that each rank has at least the smallest one: ``[O]``."""
        first, count = self.options.first_shard, self.options.count
        # An option covers the ranks where each run begins on the rank after the shards before it: 0, 1, ... W - 1.
        before = np.cumsum(count) - count
        before = before - np.repeat(before[first[:-1]], np.diff(first))
        total = np.add.reduceat(count, first[:-1])
        covers = np.logical_and.reduceat(self.options.rank == before, first[:-1])
        result: Bools = covers & (total == len(self.space.capacity_bytes))
        return result

    def gap_in(self, node: Mapping[str, Any], case: _ProofCase) -> str:
        """Explain why a case is not settled; empty if it is."""
        if "spread_ms" in node or "spread_bytes" in node:
            of, limit = ("time", node["spread_ms"]) if "spread_ms" in node else node["spread_bytes"]
            below, above = case.halves(("time", *self.space.tiers).index(of), float(limit))
            return self.gap_in(node["below"], below) or self.gap_in(node["above"], above)
        if "table" in node:
            among, others = _split(self.options, node["table"], node["options"])
            return self.gap_in(node["among"], evolve(case, allowed=case.allowed & among)) or self.gap_in(
                node["others"], evolve(case, allowed=case.allowed & others)
            )
        return self._leaf(node, case)

    def _leaf(self, node: Mapping[str, Any], case: _ProofCase) -> str:
        allowed = case.allowed & self.fits
        # Spread load: whatever is chosen, each rank has at least the least shard of every option that covers all.
        taken = np.array([self._cheapest(column, allowed) for column in self.spread.T])
        if (case.high < taken).any():
            return ""  # no plan is in this case; nor where nothing is left of a rank, below
        taken = np.maximum(case.low, taken)
        # Free shards have what the spread load leaves of a rank.
        room = self.rank_has - taken
        if room.min() < 0 or room[0] == 0:
            return ""
        # Lagrangian bound: an option costs its time, and its bytes at the tiers' prices. All memory at these prices is
        # given back, since no plan uses more.
        prices, priced = np.zeros(len(self.space.tiers)), self.total.copy()
        for tier, price in node.get("multipliers", {}).items():
            prices[self.space.tiers.index(tier)] = _positive(price)
        priced += self.bytes @ prices
        given = float((self.space.capacity_bytes.sum(axis=0) * prices).sum())
        # Likewise for the spread load, of which plans in this case have `high` at most.
        spread_prices = {"time": node.get("spread_multiplier", 0.0), **node.get("spread_multipliers", {})}
        for of, price in spread_prices.items():
            column = ("time", *self.space.tiers).index(of)
            if _positive(price) > 0:
                priced += price * self.spread[:, column]
                given += price * case.high[column]
        # Likewise for free shards at prices of their own: no rank holds shards that are worth more than `most_worth`.
        if "prices" in node:
            worth = prices_of(self.options, node["prices"])
            priced += np.add.reduceat(worth * self.free, self.options.first_shard[:-1])
            given += len(self.space.capacity_bytes) * most_worth(
                self.needs[self.free > 0], worth[self.free > 0], room
            )
        # Likewise for places: with every size x rounded to floor((k + 1) x) / k, a rank still holds 1 at most
        # (Fekete and Schepers 2001).
        for rounding in node.get("roundings", ()):
            price = _positive(rounding["multiplier"])
            priced += price / len(self.space.capacity_bytes) * self._places(rounding, room)
            given += price
        # The case is empty if all tables together need more than W ranks have in z_ms.
        needed = self._cheapest(priced, allowed & (self.movable <= room).all(axis=1)) - given
        wanted = len(self.space.capacity_bytes) * self.z_ms
        return "" if needed >= wanted else f"tables need {needed} ms at its prices; there are {wanted} ms"

    def _cheapest(self, column: Floats, allowed: Bools) -> float:
        """The sum over all tables of their least allowed value; infinite if one has none."""
        least = np.minimum.reduceat(np.where(allowed, column, np.inf), self.options.first_option[:-1])
        return float(least[self.options.distinct_table].sum())

    def _places(self, rounding: Mapping[str, Any], room: Floats) -> Floats:
        """Count the places that the free shards of each option take, of ``W`` in all: ``[O]``."""
        parts, column = int(rounding["parts"]), ("time", *self.space.tiers).index(rounding["of"])
        if parts < 1:
            raise ValueError(f"{parts} parts")
        part = self.needs[:, column] / max(room[column], 1e-300) * (1 - TOLERANCE)
        return np.add.reduceat(
            self.free * np.floor((parts + 1) * part) / parts, self.options.first_shard[:-1]
        )


def _positive(price: Any) -> float:
    if not 0 <= float(price) < np.inf:
        raise ValueError(f"a multiplier is {price}; it must be finite and not negative")
    return float(price)


def _split(options: Options, path: str, positions: list[int]) -> tuple[Bools, Bools]:
    """The options left where one table's is among some, and where it is one of its others: ``[O]`` each."""
    table = int(options.distinct_table[[table.path for table in options.all_tables].index(path)])
    if options.multiplicity[table] != 1:
        raise ValueError(f"table {path!r} is one of {options.multiplicity[table]} alike")
    mine = options.table == table
    chosen = np.isin(np.arange(len(mine)), [options.of_table(table)[position] for position in positions])
    return ~mine | chosen, ~chosen
