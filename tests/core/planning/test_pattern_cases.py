"""The prices of patterns: bounds that hold, and prove what other multipliers do not."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tests.core.planning.conftest import Plain, make_host
from tests.core.planning.test_proof import best_value, space_of

from shardwright.planning.bound import Case
from shardwright.planning.constraints import Constraints, ParameterConstraints
from shardwright.planning.inputs import Request
from shardwright.planning.parts import Choice
from shardwright.planning.pattern_cases import PatternCases
from shardwright.planning.pattern_prices import Limits, PatternPrices, Priced
from shardwright.planning.preparation import prepare
from shardwright.planning.proof import why_unproven
from shardwright.planning.solver import most_worth
from shardwright.planning.tables import TableSpec
from shardwright.planning.topology import Topology
from shardwright.planning.watch import Watch
from shardwright.plugins import use_host


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(2, 12), st.sampled_from([2, 4, 6])), min_size=1, max_size=4),
    part=st.sampled_from([0.55, 0.7, 1.0]),
    only=st.sampled_from([None, ["whole"], ["whole", "slices"]]),
    most_kinds=st.sampled_from([1, 2, 120]),
)
def test_pattern_cases_raise_the_bound_to_no_more_than_the_best_plan(sizes, part, only, most_kinds):
    space = space_of(sizes, int(sum(rows * dim * 4 for rows, dim in sizes) * part), only)
    best = best_value(space)
    assume(np.isfinite(best))
    before = space.prover.bound_ms
    PatternCases(space.prover, 2 * best, Limits(kinds=most_kinds)).sharpen()
    assert before <= space.prover.bound_ms <= best * (1 + 1e-6)
    assert why_unproven(space, space.prover.bound_ms, space.prover.certificate.to_data()) == ""


def test_pattern_cases_prove_that_three_equal_tables_leave_a_rank_with_two():
    space = space_of([(10, 6), (10, 6), (10, 6)], only=["whole"])
    best = best_value(space)
    assert space.bound.certificate.z_ms <= 0.76 * best
    PatternCases(space.prover, best).sharpen()
    assert space.prover.bound_ms >= 0.99 * best


def test_pattern_cases_of_shards_of_about_one_size_prove_about_as_much():
    rows = [100, 101, 102]
    space = space_of([(count, 6) for count in rows], only=["whole"])
    best = best_value(space)
    PatternCases(space.prover, best, Limits(kinds=1)).sharpen()
    assert 0.95 * best <= space.prover.bound_ms <= best


def test_pattern_cases_end_where_the_gap_is_enough_or_time_is_over():
    space = space_of([(10, 6), (10, 6), (10, 6)], only=["whole"])
    best = best_value(space)
    PatternCases(space.prover, best).sharpen(enough=0.2)
    assert best / 1.2 <= space.prover.bound_ms <= 0.95 * best
    late = attrs.evolve(space_of([(10, 6), (10, 6), (10, 6)], only=["whole"]), watch=Watch(0.0))
    before = late.prover.bound_ms
    PatternCases(late.prover, best).sharpen()
    assert late.prover.bound_ms == before


def test_pattern_prices_where_a_tier_has_nothing_are_those_of_the_others():
    topology = Topology(2, "cuda", hbm_cap=10**9, ddr_cap=0)
    tables = [TableSpec(f"t{i}", 10, 6, ["f"]) for i in range(3)]
    with use_host(make_host(compute_kernels=[Plain])):
        rules = Constraints({"*": ParameterConstraints(sharding_types=["whole"])})
        space = prepare(tables, Request(topology, rules, 100, None), Choice().resolve())
    PatternCases(space.prover, space.most_ms).sharpen()
    assert space.prover.bound_ms >= 0.65 * space.most_ms


def test_pattern_prices_of_a_time_that_is_possible_prove_nothing():
    space = space_of([(10, 6), (9, 6), (8, 6)])
    case = Case(np.ones(space.options.num_options, dtype=bool))
    found = PatternPrices(space.bound.problem, space.most_ms).refute(case, 1.001 * best_value(space))
    assert not isinstance(found, Priced)


@pytest.mark.parametrize("seed", range(8))
def test_most_worth_is_that_of_the_best_of_all_sets_that_fit(seed):
    random = np.random.default_rng(seed)
    size, prices = random.uniform(0.2, 0.7, size=(4, 2)), random.uniform(0, 2, size=4)
    numbers = np.indices((5, 5, 5, 5)).reshape(4, -1).T
    fits = (numbers @ size <= 1).all(axis=1)
    worth, found = most_worth(size, prices)
    assert worth == pytest.approx(float((numbers[fits] @ prices).max()), rel=1e-5)
    assert (found @ size <= 1 + 1e-6).all()


def test_pattern_cases_raise_the_bound_once_and_look_at_no_more_cases_than_they_may():
    space = space_of([(10, 6), (10, 6), (10, 6)], only=["whole"])
    best, before = best_value(space), space.prover.bound_ms
    PatternCases(space.prover, best).raise_once(0)
    assert space.prover.bound_ms == before
    PatternCases(space.prover, best).raise_once(50)
    assert before + 0.34 * (best - before) <= space.prover.bound_ms <= best * (1 + 1e-6)


def test_pattern_cases_raise_the_bound_by_some_steps_on_and_back():
    space = space_of([(10, 6), (10, 6), (10, 6)], only=["whole"])
    best, before = best_value(space), space.prover.bound_ms
    PatternCases.quick(space.prover, best).raise_some()
    assert space.prover.bound_ms == pytest.approx(before + (0.25 + 0.125 + 0.0625) * (best - before))
    assert why_unproven(space, space.prover.bound_ms, space.prover.certificate.to_data()) == ""
    # From here on more than half of the way is out of reach: the first step is back.
    before = space.prover.bound_ms
    PatternCases.quick(space.prover, 6 * best).raise_some()
    assert before <= space.prover.bound_ms <= best * (1 + 1e-6)


def test_pattern_cases_without_work_left_prove_nothing():
    space = space_of([(10, 6), (10, 6), (10, 6)], only=["whole"])
    before = space.prover.bound_ms
    PatternCases(space.prover, best_value(space), Limits(work=0)).raise_some()
    assert space.prover.bound_ms == before
