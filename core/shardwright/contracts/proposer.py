"""The contract of a proposer: a search over the choice of one option per table."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from shardwright.contracts.names import OpenNames

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from shardwright.planning.options.search_space import SearchSpace
    from shardwright.planning.search.loaded import Feedback
    from shardwright.planning.search.placement import Placed, Proven
    from shardwright.planning.watch import Watch

Proposals: TypeAlias = "Generator[npt.NDArray[np.int64] | Placed | Proven, Feedback, None]"
"""Yields option indices ``[A]``, alone or with ranks, and is sent what became of them; or yields proofs of bounds."""


class Proposer(ABC, metaclass=OpenNames):
    """Proposes which option each table takes, and receives feedback on each proposal.

    The planner calls, on the one rank that plans:

    1. ``proposals(space, watch)``, once for a plan: a generator;
    2. ``next(generator)``: the first proposal;
    3. the partitioner places it, unless it is a :class:`~shardwright.planning.search.placement.Placed` that brings its
       ranks; ``generator.send(feedback)`` tells how that went and asks for the next one;
    4. and so on until the generator returns, or the planner has had enough and closes it. A generator that works long
       between proposals looks at ``watch.is_over`` and counts its work with ``watch.spend``.

    The best proposal of all proposers becomes the plan. A proposer may also yield a
    :class:`~shardwright.planning.search.placement.Proven`: a time below which there is no plan, with a certificate. The
    planner checks it before it believes it; a false one is an error. A proposer holds no state outside its generator,
    and must not depend on hash order or on chance without a fixed seed: the same space gives the same proposals.
    """

    name: ClassVar[str]
    api: ClassVar[int] = 1
    aliases: ClassVar[tuple[str, ...]] = ()
    preference: ClassVar[int] = 0
    """Above 0: is run when no proposer was asked for; the highest first."""

    @abstractmethod
    def proposals(self, space: SearchSpace, watch: Watch) -> Proposals:
        """Yield proposals; receive a :class:`~shardwright.planning.search.loaded.Feedback` for each.

        Args:
            space: options, their costs and the ranks' capacities.
            watch: says when to end; a proposer that never works long may leave this argument out.

        Yields:
            Option indices ``[A]``, one for each of all tables in order: where ``t = space.options.distinct_table[a]``,
            ``first_option[t] <= proposal[a] < first_option[t + 1]``. Or such indices with ranks for their shards; or a
            proof, which is answered with an empty feedback.
        """
