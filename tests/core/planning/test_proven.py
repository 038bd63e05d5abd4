"""What proposers prove: believed once core has checked the certificate, refused by name otherwise."""

from __future__ import annotations

import json

import pytest
from tests.core.planning.conftest import EachAlone, WithBound

from shardwright import (
    EmbeddingShardingPlanner,
    PlanningError,
    Proposer,
    Proven,
    ShardingPlan,
    TableSpec,
    Topology,
    Watch,
    check_plan,
)

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


def test_proven_bound_with_a_certificate_is_in_the_plan_and_checked_again():
    plan, report = planned(WithBound())
    objective = plan.document["objective"]
    assert 0 < objective["lower_bound_ms"] <= objective["value_ms"]
    assert report.result.refused == ()
    checked = check_plan(ShardingPlan.from_json(plan.to_json()))
    assert checked.problems == []
    assert checked.lower_bound_ms == objective["lower_bound_ms"]


def test_proven_false_bound_is_refused_and_named_in_the_summary():
    plan, report = planned(WithBound(times=1.5))
    assert plan.document["objective"]["lower_bound_ms"] == 0
    assert plan.document["objective"]["certificate"] == {}
    (told,) = report.result.refused
    assert told in report.summary
    assert told.startswith("proposer 'with_bound' claims that no plan takes less than")
    assert "which its certificate does not prove: tables need" in told


def test_proven_certificate_of_a_lesser_time_does_not_prove_the_claim():
    _, report = planned(Claims(1.0, {"z_ms": 0.5, "multipliers": {}}))
    assert "the certificate is for z_ms = 0.5" in report.result.refused[0]


def test_proven_certificate_that_nothing_here_checks_is_refused():
    _, report = planned(Claims(1.0, {"z_ms": 1.0, "spread_ms": 0.5}))
    assert "no proof 'spread_ms'. Known: multipliers" in report.result.refused[0]


def test_proven_certificate_in_no_language_of_proofs_raises_with_the_proposer():
    with pytest.raises(PlanningError, match=r"proposer 'claims' broke its contract: the certificate is malf"):
        planned(Claims(1.0, {"z_ms": 1.0, "multipliers": 0.5}))


def test_proven_lesser_bound_is_passed_over_unchecked():
    class Both(WithBound):
        def proposals(self, space, watch):
            yield from super().proposals(space, watch)
            yield Proven(1e-12, {"nonsense": []})

    plan, report = planned(Both())
    assert plan.document["objective"]["lower_bound_ms"] > 1e-9
    assert report.result.refused == ()


def test_proposer_of_one_argument_and_of_two_are_asked_alike():
    class WithWatch(EachAlone):
        def proposals(self, space, watch):
            assert isinstance(watch, Watch)
            yield from super().proposals(space)

    plans = [json.loads(planned(proposer)[0].to_json())["modules"] for proposer in (EachAlone(), WithWatch())]
    assert plans[0] == plans[1]


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
