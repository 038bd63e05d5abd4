"""Refinements of a search: asked in their order, checked, and told of in plan and report."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import pytest
from tests.core.planning.conftest import Whole, make_host

import shardwright as sw
from shardwright.errors import PlanningError
from shardwright.host import use_host
from shardwright.planning.machines.topology import InputValue
from shardwright.planning.search.placement import Placed

TABLES = [sw.TableSpec(name, 10, 8, [name]) for name in "ab"]
TOPOLOGY = sw.Topology(2, "cpu", ddr_cap=1000)


@pytest.fixture(autouse=True)
def only_whole_tables() -> Iterator[None]:
    """One option a table and kernel, of one shard."""
    with use_host(make_host(sharding_types=[Whole])):
        yield


def planned(*refinements: Any) -> tuple[Any, Any]:
    planner = sw.EmbeddingShardingPlanner(TOPOLOGY, storage_reservation=0.0, refinements=refinements)
    return planner.plan_tables(TABLES), planner.report


def marked(mark: str, said: list[str]) -> Any:
    """A refinement that says when it begins and ends."""

    def mark_it(search: Any, request: Any, watch: Any) -> Any:
        said.append(f"{mark} asks")
        found = search(request, watch)
        said.append(f"{mark} has it")
        notes, inputs = (*found.notes, f"{mark} was there"), {**found.inputs, mark: InputValue(1, "given")}
        return attrs.evolve(found, notes=notes, inputs=inputs)

    mark_it.__name__ = mark
    return mark_it


def placed_on(*ranks: int, option: int = 0) -> Any:
    """A refinement that puts the first options of all tables, each of one shard, elsewhere."""

    def elsewhere(search: Any, request: Any, watch: Any) -> Any:
        found = search(request, watch)
        first = found.space.options.first_option[found.space.options.distinct_table] + option
        return found.with_plan(Placed(first, np.array(ranks)))

    return elsewhere


def test_refinements_are_around_each_other_and_tell_plan_and_report() -> None:
    said: list[str] = []
    plan, report = planned(marked("inner", said), marked("outer", said))
    assert said == ["outer asks", "inner asks", "inner has it", "outer has it"]
    assert report.summary[-2:] == ["inner was there", "outer was there"]
    assert plan.document["inputs"]["outer"] == {"value": 1, "provenance": "given"}


@pytest.mark.parametrize(
    ("refinement", "text"),
    [
        (
            lambda search, request, watch: None,
            "refinement '<lambda>' broke its contract: .*Outcome, got None",
        ),
        (lambda search, request, watch: 1 / 0, "refinement '<lambda>' failed: ZeroDivisionError"),
        (placed_on(1, 2), "a refinement broke its contract: it must give each of 2 shards a rank"),
        (
            placed_on(1, 1, option=99),
            "a refinement broke its contract: it must give one option of each of the 2",
        ),
    ],
)
def test_refinement_that_breaks_its_contract_is_named(refinement: Any, text: str) -> None:
    with pytest.raises(PlanningError, match=text):
        planned(refinement)


def test_refinement_that_hides_a_plan_that_does_not_fit_is_found_out() -> None:
    def moved(search: Any, request: Any, watch: Any) -> Any:
        found = search(request, watch)
        plan = attrs.evolve(found.result.plan, ranks=np.array([0, 5]))
        return attrs.evolve(found, result=attrs.evolve(found.result, plan=plan))

    with pytest.raises(PlanningError, match="refinement 'moved' broke its contract"):
        planned(moved)
