"""Certificates of bounds: what the checker accepts, and what becomes of what proposers claim."""

from __future__ import annotations

from itertools import product
from types import MappingProxyType

import attrs
import numpy as np
import pytest
from hypothesis import assume
from hypothesis import strategies as st
from tests.core.planning.conftest import EachAlone, Plain, WithBound, make_host
from tests.drawn import drawn

from shardwright import (
    EmbeddingShardingPlanner,
    InvalidInputError,
    ParameterConstraints,
    PlanError,
    PlanningError,
    Proposer,
    Proven,
    TableSpec,
    Topology,
)
from shardwright.host import host, use_host
from shardwright.planning.options.enumeration import prepare
from shardwright.planning.options.inputs import Request
from shardwright.planning.options.planning_plugins import PluginChoice
from shardwright.planning.proofs import checked_by, why_unproven
from shardwright.planning.tables.constraints import Constraints


def space_of(sizes, capacity=10**9, only=None, ranks=MappingProxyType({})):
    """Two ranks; tables of these rows and columns, with one kernel; some may use some ranks only."""
    tables = [TableSpec(f"t{i}", rows, dim, ["f"] * 1) for i, (rows, dim) in enumerate(sizes)]
    with use_host(make_host(compute_kernels=[Plain])):
        pins = {
            name: ParameterConstraints(ranks=own, sharding_types=["whole"]) for name, own in ranks.items()
        }
        rules = Constraints({**pins, "*": ParameterConstraints(sharding_types=only)})
        request = Request(Topology(2, "cpu", ddr_cap=capacity), rules, 100, None)
        space = prepare(tables, request, PluginChoice().resolve(host()))
    return attrs.evolve(space, capacity_bytes=np.full((2, 1), capacity))


def placements(space, option):
    """Every way to place an option: what it adds to each rank, time and bytes."""
    options, runs = space.options, space.options.shards_of(option)
    cost = sum(space.phases.values())
    shards = [
        (run, options.rank[run] + place if options.rank[run] >= 0 else None)
        for run in range(runs.start, runs.stop)
        for place in range(options.count[run])
    ]
    for ranks in product(*[[fixed] if fixed is not None else range(2) for _, fixed in shards]):
        time, memory = np.zeros(2), np.zeros(2)
        for (run, _), rank in zip(shards, ranks, strict=True):
            time[rank] += cost[run]
            memory[rank] += space.memory_bytes[run, 0]
        yield time, memory


def best_value(space):
    """The least largest-rank time of all plans, by trying all of them."""
    ways = [
        [way for option in space.options.of_table(distinct) for way in placements(space, option)]
        for distinct in space.options.distinct_table.tolist()
    ]
    best = np.inf
    for chosen in product(*ways):
        time = sum(way[0] for way in chosen)
        memory = sum(way[1] for way in chosen)
        if (memory <= space.capacity_bytes[:, 0]).all():
            best = min(best, float(time.max()))
    return best


SIZES = st.lists(
    st.tuples(st.integers(2, 12), st.sampled_from([2, 4, 6])), min_size=1, max_size=3, unique=True
)
PRICE = st.sampled_from([0.0, 0.01, 0.1, 0.5, 1.0, 3.0])


@drawn(st.data(), quick=25, thorough=200)
def test_proof_accepts_no_certificate_of_a_bound_above_the_best_plan(data):
    sizes = data.draw(SIZES)
    needed = sum(rows * dim * 4 for rows, dim in sizes)
    capacity = int(needed * data.draw(st.sampled_from([0.55, 0.7, 1.0])))
    only = data.draw(st.sampled_from([None, ["whole"], ["slices"], ["whole", "slices"]]))
    space = space_of(sizes, capacity, only)
    best = best_value(space)
    assume(np.isfinite(best))
    z = best * data.draw(st.sampled_from([1.0001, 1.01, 1.1, 1.3, 2.0]))
    certificate = {"z_ms": z, "multipliers": {"ddr": data.draw(PRICE) * z / 500}}
    assert why_unproven(space, z, certificate, host().extensions) != ""


@pytest.mark.parametrize("only", [["whole"], ["slices"], ["whole", "slices"]])
@pytest.mark.parametrize("times", [1e-3, 1.0, 1e3])
def test_proof_by_high_prices_of_what_there_is_enough_of_proves_nothing(only, times):
    # Each price is paid back for what the ranks have of it; left out, it would prove anything.
    space = space_of([(4, 4), (6, 4), (9, 4)], only=only)
    z = 1.1 * best_value(space)
    node = {"multipliers": {"ddr": times * z}}
    assert "tables need" in why_unproven(space, z, {"z_ms": z, **node}, host().extensions)


def test_proof_by_memory_that_is_short_needs_its_price():
    # Two ranks hold 3/4 of each table as it is cheapest; the dearer kernel is out, so 480 bytes must fit in 2 x 200.
    space = space_of([(10, 6), (9, 6)], capacity=200)
    z = 1e6
    free = {"z_ms": z, "multipliers": {"ddr": 0.0}}
    priced = {"z_ms": z, "multipliers": {"ddr": 1e5}}
    assert why_unproven(space, z, free, host().extensions).startswith("tables need ")
    assert why_unproven(space, z, priced, host().extensions) == ""
    assert best_value(space) == np.inf


@pytest.mark.parametrize(
    ("certificate", "text"),
    [
        ({}, "for z_ms = None"),
        ({"z_ms": 1.0}, "for z_ms = 1.0"),
        ({"z_ms": "9"}, "for z_ms = 9"),
        ({"z_ms": float("nan"), "multipliers": {}}, "for z_ms = nan"),
    ],
)
def test_proof_of_another_bound_is_none(certificate, text):
    assert text in why_unproven(space_of([(4, 4)]), 2.0, certificate, host().extensions)


@pytest.mark.parametrize(
    "node",
    [
        {"multipliers": {"ddr": -1.0}},
        {"multipliers": {"ddr": float("inf")}},
        {"multipliers": {"flash": 1.0}},
        {"multipliers": {"ddr": "much"}},
        {"multipliers": [1.0]},
        {"multipliers": None},
        {"multipliers": {}, "prices": {}},
        {"multipliers": {}, "z_ms": 10**400},
    ],
)
def test_proof_by_a_malformed_certificate_raises(node):
    with pytest.raises(PlanError, match="certificate is malformed"):
        why_unproven(space_of([(4, 4)]), 1e3, {"z_ms": 1e3, **node}, host().extensions)


@pytest.mark.parametrize("ranks", [[2], ["a"], [0.5], "all"])
def test_proof_about_ranks_that_there_are_not_raises(ranks):
    certificate = {"z_ms": 1e3, "multipliers": {}, "ranks": ranks}
    with pytest.raises(PlanError, match="certificate is malformed"):
        why_unproven(space_of([(4, 4)]), 1e3, certificate, host().extensions)


@pytest.mark.parametrize("ranks", [[], 0, None, [[0, 1]]])
def test_proof_about_no_ranks_is_none(ranks):
    certificate = {"z_ms": 1e3, "multipliers": {}, "ranks": ranks}
    told = why_unproven(space_of([(4, 4)]), 1e3, certificate, host().extensions)
    assert told == f"the certificate is about the ranks {ranks}, which are none"


def test_proof_about_some_ranks_counts_the_tables_that_may_use_no_others():
    space = space_of([(40, 4), (30, 4), (20, 4)], ranks={"t0": [1], "t1": [1]})
    least = np.minimum.reduceat(space.total_cost_ms, space.options.first_option[:-1])
    z = float(least[:2].sum())
    for ranks, is_proven in (([1], True), ([0], False), ([0, 1], False), (None, False)):
        about = {} if ranks is None else {"ranks": ranks}
        told = why_unproven(space, z, {"z_ms": z, "multipliers": {}, **about}, host().extensions)
        assert (told == "") == is_proven, ranks
    assert why_unproven(
        space, 1.001 * z, {"z_ms": 1.001 * z, "multipliers": {}, "ranks": [1]}, host().extensions
    )


def test_proof_by_numbers_that_overflow_proves_nothing():
    space = space_of([(400, 4), (300, 4)])
    assert "tables need" in why_unproven(
        space, 1e3, {"z_ms": 1e3, "multipliers": {"ddr": 1e308}}, host().extensions
    )


@pytest.mark.parametrize("price", [10.0**power / 3 for power in range(15, 60, 5)])
def test_proof_by_prices_at_which_sums_round_by_more_than_all_times_proves_nothing(price):
    space = space_of([(401, 7), (307, 11), (53, 13), (29, 5)], only=["whole"])
    least = np.minimum.reduceat(space.total_bytes[:, 0], space.options.first_option[:-1])
    for spare in range(4):
        exact = attrs.evolve(space, capacity_bytes=np.array([[least.sum() + spare], [spare]]))
        z = 10 * best_value(exact)
        certificate = {"z_ms": z, "multipliers": {"ddr": price}}
        assert "tables need" in why_unproven(exact, z, certificate, host().extensions)


def test_bound_says_by_what_it_is_checked() -> None:
    assert checked_by({"z_ms": 1.0, "multipliers": {}}) == "checked by arithmetic alone"
    assert checked_by({"z_ms": 1.0, "acme": {}}) == "checked by the extension proof:acme"


TABLES = [TableSpec("a", 10, 8, ["f"]), TableSpec("b", 100, 8, ["g"]), TableSpec("c", 90, 8, ["h"])]


class Claims(EachAlone):
    """A third party's proposer with a certificate of its own."""

    name, preference = "claims", 0

    def __init__(self, bound_ms, certificate):
        self.claim = Proven(bound_ms, certificate)

    def proposals(self, space):
        yield self.claim
        yield from super().proposals(space)


def planned(proposer, **arguments):
    planner = EmbeddingShardingPlanner(
        Topology(2, "cpu", ddr_cap=100_000), 64, proposer=proposer, **arguments
    )
    return planner.plan_tables(TABLES), planner.report


def test_proven_false_bound_is_refused_and_named_in_the_summary():
    plan, report = planned(WithBound(times=1.5))
    assert plan.document["objective"]["lower_bound_ms"] == 0
    assert plan.document["objective"]["certificate"] == {}
    (told,) = report.result.refused
    assert told in report.summary
    assert told.startswith("proposer 'with_bound' claims that no plan takes less than")
    assert "which its certificate does not prove: tables need" in told


def test_proven_certificate_that_nothing_here_checks_is_refused():
    _, report = planned(Claims(1.0, {"z_ms": 1.0, "spread_ms": 0.5}))
    assert "no proof 'spread_ms'. Known: multipliers" in report.result.refused[0]


def test_proven_certificate_in_no_language_of_proofs_raises_with_the_proposer():
    with pytest.raises(PlanningError, match=r"proposer 'claims' broke its contract: the certificate is malf"):
        planned(Claims(1.0, {"z_ms": 1.0, "multipliers": 0.5}))


@pytest.mark.parametrize(("claim", "field"), [(("1", {}), "bound_ms"), ((1.0, 7), "certificate")])
def test_proven_claim_of_a_wrong_form_raises_where_it_is_made(claim, field):
    with pytest.raises(InvalidInputError, match=f"^Proven: {field} must be"):
        planned(Claims(*claim))


class Works(Proposer):
    """Proposes, and counts more work than there is."""

    name = "works"

    def proposals(self, space, watch):
        for proposal in EachAlone().proposals(space):
            yield proposal
            watch.spend(1e9)


@pytest.mark.parametrize("seconds", [None, 60.0])
def test_search_ends_with_its_budget_of_work_unless_it_has_a_limit_of_time(seconds):
    _, report = planned(Works(), seconds=seconds)
    is_cut_short = seconds is None
    assert report.result.is_cut_short == is_cut_short
    assert (report.result.num_proposals == 1) == is_cut_short
    assert any("more may narrow the gap" in line for line in report.summary) == is_cut_short
