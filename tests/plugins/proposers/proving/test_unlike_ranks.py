"""Searches and partitioners on ranks of unlike speed, beside all plans of small problems."""

from __future__ import annotations

from itertools import product

import attrs
import numpy as np
import pytest
from hypothesis import assume
from hypothesis import strategies as st
from tests.drawn import drawn
from tests.plugins.proposers.spaces import MIB, costed

from shardwright.host import host
from shardwright.planning.machines.topology import Topology
from shardwright.planning.proofs import why_unproven
from shardwright.planning.search.placement import Misfit, propose
from shardwright.planning.search.search import search
from shardwright.planning.tables.constraints import Constraints, ParameterConstraints
from shardwright.planning.tables.spec import TableSpec
from shardwright_plugins.proposers.proving import Proving
from shardwright_plugins.proposers.proving.bounds.relaxation import best_weights
from shardwright_plugins.proposers.proving.effort import Effort

ROWS = st.lists(st.integers(500, 60_000), min_size=1, max_size=4)
SPEEDS = st.lists(st.sampled_from([0.25, 0.5, 1.0, 3.0]), min_size=2, max_size=3)
TYPES = st.sampled_from([["table_wise"], ["table_wise", "row_wise"], ["column_wise", "row_wise"]])


def space_of(rows, speeds, types=("table_wise",), *, mib=64, local=None, are_links_free=False):
    tables = [TableSpec(f"t{i}", count, 32, ["f"] * (1 + i % 3)) for i, count in enumerate(rows)]
    links = dict.fromkeys(("intra_host", "inter_host"), 0.0)
    free = {"intra_host_bw": 1e15, "inter_host_bw": 1e15, "link_latencies_ms": links}
    own = free if are_links_free else {"intra_host_bw": 2e6}
    topology = Topology(len(speeds), "cpu", ddr_cap=mib * MIB, local_world_size=local, speed=speeds, **own)
    rules = Constraints({"*": ParameterConstraints(sharding_types=list(types), min_partition=16)})
    return costed(tables, topology, constraints=rules, estimators=("roofline", "weights_and_buffers"))


def added_by(space, option, ranks):
    """Time and memory that an option adds to each rank, from the estimator's columns: ``[W, 1 + M]``."""
    options, topology = space.options, space.topology
    added, span = np.zeros((topology.world_size, 1 + len(space.tiers))), options.shards_of(option)
    runs = np.repeat(np.arange(span.start, span.stop), options.count[span])
    for run, rank in zip(runs.tolist(), ranks, strict=True):
        place = (run, topology.rank_class[rank]) if len(topology.classes) > 1 else run
        added[rank, 0] += sum(phase[place] for phase in space.phases.values())
        added[rank, 1:] += space.memory_bytes[run]
    return added


def times_of(space, added):
    """Time of the slowest rank of each plan ``[P, W, 1 + M]``; infinite if memory is exceeded."""
    fits = (added[..., 1:] <= space.capacity_bytes).all(axis=(1, 2))
    return np.where(fits, added[..., 0].max(axis=1), np.inf)


def time_of(space, proposal, ranks_of_tables):
    pairs = zip(proposal, ranks_of_tables, strict=True)
    return times_of(space, sum(added_by(space, *pair) for pair in pairs)[None])[0]


def best_of_all(space):
    """The least time of all options and ranks."""
    options, world_size = space.options, space.topology.world_size
    plans = np.zeros((1, world_size, 1 + len(space.tiers)))
    for table in options.distinct_table.tolist():
        own = []
        for option in options.of_table(table):
            fixed = options.fixed_ranks(option).tolist()
            choices = product(*[range(world_size) if rank < 0 else [rank] for rank in fixed])
            own += [added_by(space, option, ranks) for ranks in choices]
        plans = (plans[:, None] + np.array(own)).reshape(-1, *plans.shape[1:])
    return times_of(space, plans).min()


def found_in(space, proposer=None):
    proposer = proposer or host().proposers.create("proving")
    return search(space, [proposer], host().partitioners.create("longest_first"), host().extensions)


@drawn(rows=ROWS, speeds=SPEEDS, types=TYPES, mib=st.sampled_from([2, 8, 64]), quick=12, thorough=120)
def test_proving_finds_the_best_plan_on_ranks_of_unlike_speed_and_no_bound_is_above_it(
    rows, speeds, types, mib
):
    space = space_of(rows, speeds, types, mib=mib)
    assume(space.fits_alone.any())
    result = found_in(space)
    assert not result.refused
    assume(result.plan is not None)
    best = best_of_all(space)
    assert result.value_ms == pytest.approx(
        time_of(space, result.plan.proposal.tolist(), result.plan.ranks_of_tables)
    )
    assert result.lower_bound_ms <= best * (1 + 1e-9)
    assert best <= result.value_ms * (1 + 1e-9)
    assert result.value_ms <= best * (1 + 2 * Effort().fine)
    claim = result.proven
    assert why_unproven(space, claim.bound_ms, claim.certificate, host().extensions) == ""


@drawn(rows=ROWS, speeds=SPEEDS, types=TYPES, quick=12, thorough=120)
def test_bound_of_the_relaxation_alone_is_never_above_the_best_plan(rows, speeds, types):
    space = space_of(rows, speeds, types)
    result = found_in(space, Proving(Effort(without=frozenset(["program"]))))
    assert not result.refused
    assert 0 < result.lower_bound_ms <= best_of_all(space) * (1 + 1e-9)


@pytest.mark.parametrize(
    ("speeds", "types", "part"),
    [([1.0, 0.5], ["table_wise"], 0.99), ([1.0, 0.8, 0.6, 0.4], ["table_wise", "column_wise"], 0.975)],
)
def test_weights_of_classes_allow_for_what_travels_at_one_speed(speeds, types, part):
    # The speeds of lookups as weights prove 0.84 and 0.81 of it.
    space = space_of([20_000 + index % 3 * 500 for index in range(12 * len(speeds))], speeds, types)
    result = found_in(space, Proving(Effort(without=frozenset(["program"]))))
    assert result.lower_bound_ms >= part * result.value_ms


def test_class_of_ranks_that_takes_no_time_has_a_weight_that_a_certificate_may_have():
    space = space_of([20_000, 9000], [1.0, 0.5])
    for times in ([1.0, 0.0], [0.0, 0.0]):
        phases = {name: column * times for name, column in space.phases.items()}
        assert (best_weights(attrs.evolve(space, phases=phases)) > 1e-100).all()


def _placed(name, space):
    proposal = space.options.first_option[:-1][space.options.distinct_table]
    shards = propose(space, proposal)
    ranks = host().partitioners.create(name).place(shards)
    assert not isinstance(ranks, Misfit)
    return proposal, shards, ranks


@pytest.mark.parametrize("name", ["greedy_perf", "longest_first"])
def test_rank_of_half_the_speed_gets_half_the_lookups(name):
    space = space_of([20_000] * 24, [1.0, 0.5], are_links_free=True)
    _, shards, ranks = _placed(name, space)
    assert np.bincount(ranks).tolist() == [16, 8]
    blind = attrs.evolve(shards, class_ms=shards.cost_ms[:, None], rank_class=np.zeros(2, dtype=np.int64))
    assert np.bincount(host().partitioners.create(name).place(blind)).tolist() == [12, 12]


@pytest.mark.parametrize("proposer", sorted(host().proposers))
def test_plan_of_any_proposer_has_its_real_time(proposer):
    space = space_of([20_000, 9000, 3000, 40_000, 12_000], [1.0, 0.5, 0.25], ["table_wise", "row_wise"])
    result = found_in(space, host().proposers.create(proposer))
    assert result.plan is not None
    value = time_of(space, result.plan.proposal.tolist(), result.plan.ranks_of_tables)
    assert result.value_ms == pytest.approx(value)
