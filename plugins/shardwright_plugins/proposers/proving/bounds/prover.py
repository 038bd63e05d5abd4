"""The best bound proven so far: by bisection of the time that the relaxation refutes.

For a time, the options that are fast enough are priced with the multipliers that raise the Lagrangian most; where it
reaches ``W z``, no plan is faster than ``z``. The certificate is ``{"z_ms": z, "multipliers": {tier: ms per byte}}``,
with ``"weights": [weight of each class]`` where ranks are of several classes of speed, which
:mod:`shardwright.planning.proofs` checks.
"""

from __future__ import annotations

import numpy as np
from attrs import define, field

from shardwright.planning.arrays import Floats, Ints
from shardwright.planning.search.placement import Proven
from shardwright.planning.watch import Watch
from shardwright_plugins.proposers.proving.bounds.multipliers import Dual
from shardwright_plugins.proposers.proving.bounds.relaxation import TOLERANCE, Relaxation

# The precision of the bound, relative; and a time as good as none, where shards cost nothing.
_PRECISION, _NOTHING_MS = 1e-4, 1e-12
# Microseconds of one evaluation of the Lagrangian: a call, and each option (measured).
_CALL_US, _OPTION_US = 25.0, 0.02


@define(eq=False)
class Prover:
    """The best bound proven so far.

    Args:
        relaxation: the relaxed problem.
        watch: counts the work.
    """

    relaxation: Relaxation
    watch: Watch
    proven: Proven = field(factory=Proven)
    """The best bound with its certificate."""
    possible_ms: float = np.inf
    """A time that the relaxation cannot refute; infinite if no choice fits in memory."""
    multipliers: Floats = field(factory=lambda: np.zeros(0))
    """Of the relaxation's bound, ms for all ranks' memory of each tier: ``[M]``."""

    @property
    def bound_ms(self) -> float:
        """Proven lower bound of all plans, ms."""
        return self.proven.bound_ms

    def accept(self, proven: Proven) -> None:
        """Keep a bound, if it is the best."""
        if proven.bound_ms > self.bound_ms:
            self.proven = proven

    def maximise(
        self, z_ms: float, start: Floats | None = None, *, margin: float = 0.0, part: float = 1.0
    ) -> Dual:
        """The best multipliers for a time, as far as needed to tell whether they prove it.

        Args:
            z_ms: the time.
            start: multipliers to start from: ``[M]``.
            margin: the part of memory to leave free; with one, nothing is proven.
            part: the part of a rank's memory that a shard takes at most; with less than all, nothing is proven.
        """
        problem = self.relaxation
        allowed = problem.allowed(z_ms) & problem.takes_at_most(part)
        dual = Dual(problem, z_ms, allowed, problem.share / (1 - margin), start)
        self.watch.spend(dual.num_evaluated * (_CALL_US + _OPTION_US * len(problem.cost)))
        return dual

    def choice(self, z_ms: float, margin: float = 0.0) -> Ints | None:
        """The options of all tables that look possible at a time ``[A]``; ``None`` where it is refuted."""
        dual = self.maximise(z_ms, self.multipliers, margin=margin)
        if margin == 0 and self._is_refuted(dual, z_ms):
            self._note(z_ms, dual)
            return None
        return dual.proposal()

    def _is_refuted(self, dual: Dual, z_ms: float) -> bool:
        return dual.is_empty or dual.value_ms >= self.relaxation.world_size * z_ms * (1 + TOLERANCE)

    def _note(self, z_ms: float, dual: Dual | None) -> None:
        """Keep the proof that no plan is faster than a time."""
        problem = self.relaxation
        no_prices = np.zeros(problem.share.shape[1])
        multipliers = no_prices if dual is None or dual.best is None else dual.best.multipliers
        per_byte = (multipliers / np.maximum(problem.capacity, 1)).tolist()
        prices = dict(zip(problem.space.tiers, per_byte, strict=True))
        weights = problem.weights.tolist()
        classes = {"weights": weights} if len(weights) > 1 else {}
        self.accept(Proven(z_ms, {"z_ms": z_ms, "multipliers": prices, **classes}))

    def begin(self) -> None:
        """Find the bound of the relaxation, by bisection of the time."""
        problem = self.relaxation
        if not np.isfinite(problem.least_ms):
            return
        self._note(problem.least_ms, None)
        dual = self.maximise(np.inf)
        if dual.best is not None:
            self._note(dual.value_ms / problem.world_size, dual)
        high, self.multipliers = self._irrefutable(self.bound_ms), np.zeros(problem.share.shape[1])
        while high > max(self.bound_ms * (1 + _PRECISION), _NOTHING_MS) and np.isfinite(high):
            middle = (self.bound_ms * high) ** 0.5 if self.bound_ms > 0 else high / 2
            trial = self.maximise(middle, self.multipliers)
            if self._is_refuted(trial, middle):
                self._note(middle, trial)
                self.multipliers = self.multipliers if trial.best is None else trial.best.multipliers
            else:
                high = middle
        self.possible_ms = high

    def _irrefutable(self, low: float) -> float:
        """A time that the relaxation cannot refute; infinite if no choice fits in memory."""
        high = max(low, _NOTHING_MS)
        for _ in range(200):
            if not self._is_refuted(self.maximise(high * (1 + 1e-6)), high):
                return high
            high *= 1.5
        return np.inf
