"""proving: the search that knows how far from the best it can be at most."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import numpy as np
from attrs import define, field

from shardwright.contracts.proposer import Proposals, Proposer
from shardwright.planning.bound import Relaxation
from shardwright.planning.cases import CaseSearch
from shardwright.planning.options import Floats, Ints
from shardwright.planning.placement import Placed
from shardwright.planning.space import SearchSpace
from shardwright_plugins.packing.assignment import Assignment, Catalogue

# Times are tried at these parts above the bound until one is possible.
_LADDER = (0.01, 0.03, 0.08, 0.2, 0.5, 1.0, 3.0, 10.0, 100.0, 1e4)
# The part of memory left free when options are chosen: shards of some size fill no rank to the brim.
_MARGINS = (0.0, 0.02, 0.06, 0.15)
# A plan this near to its bound is not improved any further.
_CLOSE = 1e-3
_NEAR_FAILURE = 2e-3
# So many cases are looked at for a choice of options that none of them refutes.
_CASES = 40
# Tables that are taken out and put back in one attempt, in all: the work of an attempt.
_TABLES_A_ROUND = 6


class Proving(Proposer):
    """Looks for a plan as fast as the bound allows, and for less and less if there is none.

    For a time that no rank should exceed, each table takes the option that is cheapest at the multipliers of the
    bound's proof; shards are placed longest first, and what is over a limit is repaired by moves, swaps, sharing two
    ranks' shards out anew, and other options. The time is bisected between the bound and the best plan.
    """

    name: ClassVar[str] = "proving"
    preference: ClassVar[int] = 30

    def proposals(self, space: SearchSpace) -> Proposals:
        """Plans of falling time, with ranks; under rules on ranks, choices of options alone."""
        bound = space.bound
        if not np.isfinite(bound.possible_ms):
            return
        if space.rules is not None:
            yield from _choices(space)
            return
        search = _Bisection(space)
        yield from search.plans()


def _choices(space: SearchSpace) -> Iterator[Ints]:
    """The options that are cheapest at the multipliers of several times, more and more of memory left free."""
    problem = space.bound.problem
    for part in _LADDER:
        for margin in _MARGINS:
            dual = problem.maximise(space.bound.possible_ms * (1 + part), margin=margin)
            for choice in (dual.lean, dual.best):
                if choice is not None:
                    yield choice.option[space.options.alike]


@define(eq=False)
class _Bisection:
    """The times tried so far."""

    space: SearchSpace
    catalogue: Catalogue = field(init=False)
    problem: Relaxation = field(init=False)
    low_ms: float = field(init=False)
    best: Assignment | None = None
    refuted_ms: float = 0.0

    def __attrs_post_init__(self) -> None:
        self.catalogue, self.problem = Catalogue(self.space), self.space.bound.problem
        self.low_ms = self.space.bound.certificate.z_ms

    def plans(self) -> Proposals:
        """Each plan that is better than those before."""
        for part in _LADDER:
            trial = self.space.bound.possible_ms * (1 + part)
            found = self._attempt(trial)
            if found is not None:
                break
            self.low_ms = trial
            if self.space.watch.is_over:
                return
        else:
            return
        yield self._keep(found)
        while not self._is_done():
            middle = self.low_ms + (self.best.value_ms - self.low_ms) * 0.4
            found = self._improve(middle) or self._attempt(middle)
            if found is None:
                self.low_ms = middle
            else:
                yield self._keep(found)

    def _is_done(self) -> bool:
        assert self.best is not None
        value, proven = self.best.value_ms, max(self.refuted_ms, self.space.bound.certificate.z_ms)
        near = value <= self.low_ms * (1 + _NEAR_FAILURE) or value <= proven * (1 + _CLOSE)
        return near or self.space.watch.is_over

    def _keep(self, found: Assignment) -> Placed:
        self.best = found
        return Placed(found.proposal.copy(), found.ranks)

    @property
    def _rounds(self) -> int:
        """How many rounds of taking tables out and putting them back an attempt may take."""
        work = len(self.space.options.all_tables) * len(self.space.capacity_bytes)
        return int(np.clip(60_000 / max(work, 1), 4, 40))

    def _attempt(self, limit_ms: float) -> Assignment | None:
        """A plan within a time, from the choices at its multipliers."""
        nearest: tuple[float, Assignment, Floats] | None = None
        for choice, price in self._choices(limit_ms):
            trial = Assignment(self.catalogue, choice[self.space.options.alike], limit_ms)
            trial.fill()
            if trial.repair(200, changes=30):
                return trial
            over = float(trial.bins.over().sum())
            if nearest is None or over < nearest[0]:
                nearest = over, trial, price
            if self.space.watch.is_over:
                return None
        if nearest is None:
            return None
        _, trial, price = nearest
        return trial if trial.rebuild(self._rounds, price) else None

    def _choices(self, limit_ms: float) -> Iterator[tuple[Ints, Floats]]:
        seen: set[bytes] = set()
        cases = CaseSearch(self.problem, limit_ms, _CASES)
        if cases.proof() is not None:
            self.refuted_ms = max(self.refuted_ms, limit_ms)
            return
        if cases.possible is not None and cases.price is not None:
            seen.add(cases.possible.option.tobytes())
            yield cases.possible.option, cases.price
        for margin in _MARGINS:
            dual = self.problem.maximise(limit_ms, margin=margin)
            choice = dual.lean or dual.best
            if choice is None or dual.best is None or choice.option.tobytes() in seen:
                continue
            seen.add(choice.option.tobytes())
            yield choice.option, self.problem.cost + self.problem.share @ dual.best.multipliers

    def _improve(self, limit_ms: float) -> Assignment | None:
        """The best plan, repaired to keep within a lesser time."""
        assert self.best is not None
        trial = self.best.copy()
        trial.limit_ms = limit_ms
        return trial if trial.repair(200, changes=30) else None
