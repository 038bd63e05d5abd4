"""The proof of a bound, gone through again from its certificate: arithmetic on the options' costs, and no search.

Suppose a plan whose slowest rank takes less than ``z``. Each of its shards takes less than ``z``, all together less
than ``W * z``, and they fit. Priced with multipliers of each tier's memory, no choice of options is cheaper than the
sum of each table's cheapest (Lagrangian relaxation; Everett 1963): if that is ``W * z`` or more, there is no such plan.
Where ranks are of ``C`` classes of speed, times on the ranks of a class are multiplied by a weight above 0 of the
class. All together are then less than ``z`` times the sum of all ranks' weights, and each is no less than the least of
what its shard takes on the ranks of any class where it may go, so multiplied.
Options with a shard on every rank leave less of each rank to shards that are free to go anywhere: an option whose
largest free shard needs more than what is left is in no such plan.
All this holds, too, of some of the ranks and those tables that may use no others, by the rules on ranks. Tables that
are kept together take less than ``z`` together.

A certificate is ``{"z_ms": z, "multipliers": {tier: ms per byte}}``, which is checked here, with ``"weights": [weight
of each class]`` where there are several classes, and ``"ranks": [rank, ...]`` where it is about some of them. Or it is
``{"z_ms": z, WORD: data}``, which an extension ``proof:WORD`` checks: it is called with the options, z, the data and
the watch, and returns why it is no proof, or an empty text.

Legend: A tables, O options, S runs of equal shards, M memory tiers, W ranks, C classes of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from shardwright.errors import PlanError, UnknownPluginError
from shardwright.host.extensions import load_at
from shardwright.planning.arrays import FREE, Bools, Floats, Ints
from shardwright.planning.options.search_space import SearchSpace
from shardwright.planning.watch import Watch

if TYPE_CHECKING:
    from shardwright.contracts.extension import Extension
    from shardwright.host.registry import Registry

# Sums of the same numbers in another order differ by rounding.
TOLERANCE, _ROUNDING = 1e-9, 1e-12  # parts of a bound, and of a sum: float64 rounds a term by 1e-16 of it
_POINT, _MULTIPLIERS, _WEIGHTS, RANKS = "proof", "multipliers", "weights", "ranks"
_NO_WORDS = {"z_ms", _WEIGHTS, RANKS}


def why_unproven(
    space: SearchSpace,
    bound_ms: float,
    certificate: Mapping[str, Any],
    registry: Registry[Extension],
    watch: Watch | None = None,
) -> str:
    """Explain why a certificate does not prove that no plan is better; empty if it does.

    Args:
        space: options and costs.
        bound_ms: the claim.
        certificate: its proof.
        registry: the installed extensions, of which one may check it.
        watch: ends the check, which then has not succeeded, and counts its work; no limit by default.

    Raises:
        PlanError: the certificate is malformed.
    """
    z = certificate.get("z_ms")
    if not isinstance(z, int | float) or not bound_ms / (1 + TOLERANCE) <= z:
        return f"the certificate is for z_ms = {z}"
    try:
        z = float(z)
        (word,) = certificate.keys() - _NO_WORDS
        if word != _MULTIPLIERS:
            check = load_at(_POINT, word, registry, besides=[_MULTIPLIERS])
            return str(check(space, z, certificate[word], watch or Watch()))
        prices, weights = _prices(space, certificate[word], certificate.get(_WEIGHTS, 1.0))
        some = np.arange(len(space.capacity_bytes))[certificate.get(RANKS, slice(None))]
    except UnknownPluginError as error:
        return str(error)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise PlanError(f"the certificate is malformed: {type(error).__name__}: {error}") from error
    if some.ndim != 1 or not len(some):
        return f"the certificate is about the ranks {certificate[RANKS]}, which are none"
    with np.errstate(over="ignore", invalid="ignore"):  # absurd numbers prove nothing
        return _gap(space, z * (1 - TOLERANCE), prices, weights, some)


def checked_by(certificate: Mapping[str, Any]) -> str:
    """Words for what goes through a certificate: arithmetic that shares nothing with a search, or an extension."""
    words = certificate.keys() - {*_NO_WORDS, _MULTIPLIERS}
    return f"checked by the extension {_POINT}:{min(words)}" if words else "checked by arithmetic alone"


def _prices(space: SearchSpace, multipliers: Mapping[str, Any], given: Any) -> tuple[Floats, Floats]:
    """Read the price of a byte of each tier, ms, ``[M]``, and the weight of each class of ranks, or of all: ``[C]``."""
    prices, weights = np.zeros(len(space.tiers)), np.empty(len(space.topology.classes))
    weights[:] = given
    # Sums of larger ones overflow, and infinite times would prove anything.
    if not ((weights > 1e-100) & (weights < 1e100)).all():
        raise ValueError(f"weights are {given}; they must be above 1e-100 and below 1e100")
    for tier, price in multipliers.items():
        if not 0 <= float(price) < np.inf:
            raise ValueError(f"a multiplier is {price}; it must be finite and not negative")
        prices[space.tiers.index(tier)] = price
    return prices, weights


def _gap(space: SearchSpace, z_ms: float, prices: Floats, weights: Floats, some: Ints) -> str:
    """Explain why plans faster than ``z_ms`` are not ruled out by prices and weights on some ranks; empty if so."""
    options, rank_class, capacity = space.options, space.topology.rank_class, space.capacity_bytes[some]
    counted = _kept_to(space, some)
    first, is_free = options.first_shard[:-1], options.rank == FREE
    phases = [phase.reshape(len(is_free), -1) for phase in space.phases.values()]
    by_class: Floats = sum(phases, np.zeros((len(is_free), len(weights))))
    # A shard with a rank takes what it takes there; others what they take on the class of ranks where it is least.
    elsewhere = rank_class[options.rank][:, None] != np.arange(len(weights))
    by_class[~is_free[:, None] & elsewhere] = np.inf
    cost, weighed = by_class.min(axis=1), (by_class * weights).min(axis=1)
    # Of each shard its time and its bytes of each tier, [S, 1 + M]; and what one rank has of each.
    needs: Floats = np.column_stack([cost, space.memory_bytes])
    rank_has: Floats = np.array([z_ms, *capacity.max(axis=0)])
    fits = np.logical_and.reduceat((cost < z_ms) & (needs <= rank_has).all(axis=1), first)
    alone = np.add.reduceat(cost * options.count, first)
    for group in dict.fromkeys(space.rules.together.values() if space.rules else ()):
        if _cheapest(space, alone, fits, counted & np.isin(np.arange(len(counted)), group)) >= z_ms:
            return ""
    # Whatever is chosen, each rank has at least the least shard of every option that covers all ranks.
    least = np.where(_covers_ranks(space)[:, None], np.minimum.reduceat(needs, first), 0.0)
    room = rank_has - np.array([_cheapest(space, column, fits, counted) for column in least.T])
    if room.min() < 0 or room[0] == 0:
        return ""
    largest_free = np.maximum.reduceat(np.where(is_free[:, None], needs, 0.0), first)
    # An option costs its time, and its bytes at the tiers' prices. All memory at these prices is given back, since no
    # plan uses more.
    priced = np.add.reduceat((weighed + space.memory_bytes @ prices) * options.count, first)
    # Both sums are rounded: where prices are far above times, by more than all times.
    given = float((capacity.sum(axis=0) * prices).sum()) * (1 + _ROUNDING)
    needed = _cheapest(space, priced, fits & (largest_free <= room).all(axis=1), counted) - given
    wanted = float(weights[rank_class[some]].sum()) * z_ms
    return "" if needed >= wanted else f"tables need {needed} ms at its prices; there are {wanted} ms"


def _covers_ranks(space: SearchSpace) -> Bools:
    """True for options with a shard on every rank, so that each rank has at least the smallest one: ``[O]``."""
    first, count = space.options.first_shard, space.options.count
    # An option covers the ranks where each run begins on the rank after the shards before it: 0, 1, ... W - 1.
    before = np.cumsum(count) - count
    before = before - np.repeat(before[first[:-1]], np.diff(first))
    total = np.add.reduceat(count, first[:-1])
    covers = np.logical_and.reduceat(space.options.rank == before, first[:-1])
    result: Bools = covers & (total == len(space.capacity_bytes))
    return result


def _kept_to(space: SearchSpace, some: Ints) -> Bools:
    """True for tables that may use no ranks but some: ``[A]``."""
    kept = np.full(len(space.options.all_tables), len(np.delete(space.topology.rank_class, some)) == 0)
    for table, mask in space.rules.masks.items() if space.rules else ():
        kept[table] |= not np.delete(mask, some).any()
    return kept


def _cheapest(space: SearchSpace, column: Floats, allowed: Bools, counted: Bools) -> float:
    """The sum over tables of their least allowed value; infinite if one has none.

    Args:
        space: options.
        column: ``[O]``.
        allowed: ``[O]``.
        counted: true for the tables that count, of all: ``[A]``.
    """
    least = np.minimum.reduceat(np.where(allowed, column, np.inf), space.options.first_option[:-1])
    return float(least[space.options.distinct_table[counted]].sum())
