"""The search loop: proposers propose and prove, the partitioner places, proofs are checked, the best placement wins."""

from __future__ import annotations

import inspect
import math
from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from attrs import define, evolve, field, frozen

from shardwright.contracts.partitioner import Partitioner
from shardwright.contracts.proposer import Proposals, Proposer
from shardwright.errors import PlanError, PlanningError
from shardwright.planning.arrays import FREE, NO_GANG, Ints
from shardwright.planning.options.search_space import SearchSpace
from shardwright.planning.plugin_calls import calling, check_answer, whole_numbers
from shardwright.planning.proofs import why_unproven
from shardwright.planning.search.loaded import Feedback, LoadedPlan
from shardwright.planning.search.placement import (
    Misfit,
    Placed,
    ProposedShards,
    Proven,
    fixed_misfit,
    propose,
)
from shardwright.planning.search.ruled_placement import broken_rule, place_within
from shardwright.planning.watch import Watch

if TYPE_CHECKING:
    from shardwright.contracts.extension import Extension
    from shardwright.host.registry import Registry

MAX_PROPOSALS = 2000
"""Largest number of different proposals of each proposer that are tried."""

# So many plans and proofs of a proposer are heard after the search's time is over.
_MAX_LATE_PROPOSALS = 8


@frozen(eq=False)
class SearchResult:
    """The best plan found.

    Args:
        plan: the plan; ``None`` if none fitted.
        proposer: the name of the proposer that found it.
        num_proposals: number of different proposals that were tried.
        num_placed: number of proposals that fitted.
        misfit: the misfit of the proposal that came nearest to fitting, where none did.
        proven: proven bound of all plans.
        refused: claims of bounds that their certificates do not prove, a sentence each.
        is_cut_short: the search ended with its time or work, so that more may find a better plan or bound.
    """

    plan: LoadedPlan | None
    proposer: str
    num_proposals: int
    num_placed: int
    misfit: Misfit | None
    proven: Proven = field(factory=Proven)
    refused: tuple[str, ...] = ()
    is_cut_short: bool = False

    @property
    def value_ms(self) -> float:
        """The objective; infinite if no plan was found."""
        return math.inf if self.plan is None else self.plan.value_ms

    @property
    def lower_bound_ms(self) -> float:
        """Value that no plan can be better than, ms; 0 where nothing is proven."""
        return self.proven.bound_ms


@define
class _Search:
    """State of a search."""

    space: SearchSpace
    partitioner: Partitioner
    watch: Watch
    extensions: Registry[Extension]
    proven: Proven = field(factory=Proven)
    refused: list[str] = field(factory=list)
    tried: dict[bytes, Feedback] = field(factory=dict)
    best: Feedback = field(factory=Feedback)
    proposer: str = ""
    nearest: Misfit | None = None

    def answer(self, proposed: Ints | Placed | Proven, proposer: str) -> Feedback:
        """Check a proof, or place a proposal."""
        if isinstance(proposed, Proven):
            self.believe(proposed, proposer)
            return Feedback()
        return self.rate(proposed, proposer)

    def believe(self, claim: Proven, proposer: str) -> None:
        """Keep a bound that is better than what is known, if its certificate proves it; else name who claimed it.

        Raises:
            PlanningError: the certificate is not in the language of proofs.
        """
        if not claim.bound_ms > self.proven.bound_ms:
            return
        try:
            reason = why_unproven(self.space, claim.bound_ms, claim.certificate, self.extensions, self.watch)
        except PlanError as error:
            raise PlanningError(f"proposer {proposer!r} broke its contract: {error}") from error
        if not reason:
            self.proven = claim
            self.watch.tell(lower_bound_ms=claim.bound_ms)
        elif not self.watch.is_over:  # there was time to check it
            self.refused.append(
                f"proposer {proposer!r} claims that no plan takes less than {claim.bound_ms:.6g} ms, which its "
                f"certificate does not prove: {reason}"
            )

    def rate(self, proposed: Ints | Placed, proposer: str) -> Feedback:
        """Place a proposal, unless that has been done, and keep it if it is the best."""
        proposal, ranks = _numbers(proposed, f"proposer {proposer!r}")
        key = proposal.tobytes() + (b"" if ranks is None else b"|" + ranks.tobytes())
        if key not in self.tried:
            self.tried[key] = self._place(proposal.copy(), ranks, proposer)
        feedback = self.tried[key]
        if feedback.value_ms < self.best.value_ms:
            self.best, self.proposer = feedback, proposer
            self.watch.tell(value_ms=feedback.value_ms)
        if feedback.misfit is not None and _shortage(feedback.misfit) < _shortage(self.nearest):
            self.nearest = feedback.misfit
        return feedback

    def _place(self, proposal: Ints, given: Ints | None, proposer: str) -> Feedback:
        _check_proposal(self.space, proposal, f"proposer {proposer!r}")
        shards = propose(self.space, proposal)
        misfit = fixed_misfit(self.space, proposal, shards)
        if misfit is not None:
            return Feedback(misfit=misfit)
        ranks = place_within(self.space.rules, self.partitioner, shards) if given is None else given
        if isinstance(ranks, Misfit):
            return Feedback(misfit=ranks)
        whose = f"partitioner {self.partitioner.name!r}" if given is None else f"proposer {proposer!r}"
        return Feedback(_loaded(self.space, proposal, shards, ranks, whose))


def search(
    space: SearchSpace,
    proposers: Sequence[Proposer],
    partitioner: Partitioner,
    extensions: Registry[Extension],
    *,
    max_proposals: int = MAX_PROPOSALS,
    watch: Watch | None = None,
) -> SearchResult:
    """Run the proposers one after the other, and keep the best of all they propose and prove.

    Args:
        space: options, costs, capacities.
        proposers: proposers in the order they run; of equal plans the first found is kept.
        partitioner: places each proposal.
        extensions: the installed extensions, of which some check proofs.
        max_proposals: largest number of proposals of each proposer, proposals tried before not counted.
        watch: told of progress, and asked whether to end; no limit by default.

    Raises:
        PlanningError: a proposer or the partitioner broke its contract.
    """
    state = _Search(space, partitioner, watch or Watch(), extensions)
    for proposer in proposers:
        _run(state, proposer, max_proposals)
    return SearchResult(
        plan=state.best.plan,
        proposer=state.proposer,
        num_proposals=len(state.tried),
        num_placed=sum(feedback.misfit is None for feedback in state.tried.values()),
        misfit=state.nearest if state.best.plan is None else None,
        proven=evolve(state.proven, bound_ms=min(state.proven.bound_ms, state.best.value_ms)),
        refused=tuple(state.refused),
        is_cut_short=state.watch.is_over,
    )


def with_plan(space: SearchSpace, result: SearchResult, placed: Placed, who: str) -> SearchResult:
    """The result of a search with another plan, which is checked and rated.

    Args:
        space: options, costs, capacities.
        result: the result.
        placed: the plan.
        who: the origin of the plan, for errors: ``"stage 'acme'"``.

    Raises:
        PlanningError: it is no plan of these options, or does not fit.
    """
    proposal, ranks = _numbers(placed, who)
    _check_proposal(space, proposal, who)
    assert ranks is not None  # of a plan that is placed
    plan = _loaded(space, proposal, propose(space, proposal), ranks, who)
    proven = evolve(result.proven, bound_ms=min(result.proven.bound_ms, plan.value_ms))
    return evolve(result, plan=plan, proven=proven, misfit=None)


def _numbers(proposed: Ints | Placed, who: str) -> tuple[Ints, Ints | None]:
    """A proposal, and the ranks of its shards if it has some."""
    ranks, chosen = None, proposed
    if isinstance(proposed, Placed):
        ranks, chosen = whole_numbers(who, "the ranks of its shards", proposed.ranks), proposed.proposal
    return whole_numbers(who, "one option of each table", chosen), ranks


def _loaded(space: SearchSpace, proposal: Ints, shards: ProposedShards, ranks: Ints, who: str) -> LoadedPlan:
    """A placement, which is checked, with its loads."""
    _check_placement(space, shards, ranks, f"{who} broke its contract:")
    return LoadedPlan(space, proposal, ranks, shards)


def _run(state: _Search, proposer: Proposer, max_proposals: int) -> None:
    who = f"proposer {proposer.name!r}"
    with calling(who):
        proposals = begun(proposer, state.space, state.watch)
    check_answer(who, "proposals", proposals, Generator)
    limit, num_late = len(state.tried) + max_proposals, 0
    feedback: Any = None
    # A proposer that repeats itself must come to an end as well.
    for _ in range(4 * max_proposals):
        try:
            with calling(who):
                proposed = proposals.send(feedback)
        except StopIteration:
            break
        if state.watch.is_over and bool(state.tried):
            # What was found in time is heard; nothing more is placed.
            num_late += 1
            if num_late > _MAX_LATE_PROPOSALS or not isinstance(proposed, Placed | Proven):
                break
        if len(state.tried) >= limit:
            break
        feedback = state.answer(proposed, proposer.name)
    proposals.close()


def begun(proposer: Proposer, space: SearchSpace, watch: Watch) -> Proposals:
    """The generator of a proposer; one that never works long between proposals need not take a watch."""
    if len(inspect.signature(proposer.proposals).parameters) > 1:
        return proposer.proposals(space, watch)
    return proposer.proposals(space)  # type: ignore[call-arg]


def _shortage(misfit: Misfit | None) -> float:
    return math.inf if misfit is None else misfit.short_bytes


def _check_proposal(space: SearchSpace, proposal: Ints, who: str) -> None:
    first, alike = space.options.first_option, space.options.distinct_table
    valid = proposal.shape == alike.shape
    if not valid or ((proposal < first[alike]) | (proposal >= first[alike + 1])).any():
        raise PlanningError(
            f"{who} broke its contract: it must give one option of each of the {len(alike)} tables in their order, and "
            f"gave an array of shape {proposal.shape}"
            + ("" if not valid else " with an option of another table")
        )


def _check_placement(space: SearchSpace, shards: ProposedShards, ranks: Ints, broke: str) -> None:
    if ranks.shape != (len(shards),) or ((ranks < 0) | (ranks >= shards.world_size)).any():
        raise PlanningError(
            f"{broke} it must give each of {len(shards)} shards a rank from 0 to {shards.world_size - 1}"
        )
    moved = np.flatnonzero(shards.is_fixed & (ranks != shards.rank))
    if len(moved):
        shard = int(moved[0])
        raise PlanningError(
            f"{broke} shard {shard} must live on rank {shards.rank[shard]}, and was placed on {ranks[shard]}"
        )
    _check_gangs(shards, ranks, broke)
    rule = broken_rule(space.rules, shards, ranks)
    if rule:
        raise PlanningError(f"{broke} {rule}")
    over = np.argwhere(shards.used_bytes(ranks) > shards.capacity_bytes)
    if len(over):
        rank, tier = over[0]
        raise PlanningError(
            f"{broke} rank {rank} was given {shards.used_bytes(ranks)[rank, tier]} bytes of "
            f"{shards.tiers[tier]}, it has {shards.capacity_bytes[rank, tier]}"
        )


def _check_gangs(shards: ProposedShards, ranks: Ints, broke: str) -> None:
    hosts, local = ranks // shards.local_world_size, ranks % shards.local_world_size
    moved = np.flatnonzero((shards.local_rank != FREE) & (local != shards.local_rank))
    if len(moved):
        shard = int(moved[0])
        raise PlanningError(
            f"{broke} shard {shard} must have rank {shards.local_rank[shard]} of the {shards.local_world_size} of its "
            f"host, and was placed on rank {ranks[shard]}, which is {local[shard]} of host {hosts[shard]}"
        )
    member = np.flatnonzero(shards.gang != NO_GANG)
    _, first, gang = np.unique(shards.gang[member], return_index=True, return_inverse=True)
    leader = member[first][gang]
    parted = np.flatnonzero(hosts[member] != hosts[leader])
    if len(parted):
        shard, other = int(member[parted[0]]), int(leader[parted[0]])
        raise PlanningError(
            f"{broke} shards {other} and {shard} must be on one host, and were placed on ranks {ranks[other]} and "
            f"{ranks[shard]}, of hosts {hosts[other]} and {hosts[shard]}"
        )
