from __future__ import annotations

import json
import math

import pytest
from tests.core.planning.conftest import Cells, Weights, WithBound

from shardwright import (
    EmbeddingShardingPlanner,
    ParameterConstraints,
    PlanError,
    ShardingPlan,
    TableSpec,
    Topology,
    UnknownNameError,
    check_plan,
)
from shardwright_plugins.plan_differences.check import restate
from shardwright_plugins.plan_differences.compare import compare_plans
from shardwright_plugins.plan_differences.explain import explain_table, explanation_lines

TABLES = [
    TableSpec("a", 10, 8, ["f"]),
    TableSpec("b", 100, 8, ["g"], module="tower"),
    TableSpec("c", 3, 8, ["h"]),
]


def planned(cap=100_000, proposer=None, speed=None, **rules):
    constraints = {name: ParameterConstraints(**rule) for name, rule in rules.items()}
    topology = Topology(2, "cpu", ddr_cap=cap, speed=speed)
    planner = EmbeddingShardingPlanner(topology, 64, constraints=constraints, proposer=proposer)
    return ShardingPlan.from_json(planner.plan_tables(TABLES).to_json())


def value_with(explained, **rules):
    """The value of a plan in which table b has one option, wherever its shards may go; all others have theirs."""
    taken = planned()
    fixed = {
        path: {
            "sharding_types": [sharding.sharding_type],
            "compute_kernels": [sharding.compute_kernel],
            "ranks": sorted(set(sharding.ranks)),
        }
        for module, tables in taken.plan.items()
        for path, sharding in tables.items()
        if path != "b"
    }
    rule = {"sharding_types": [explained.sharding_type], "compute_kernels": [explained.compute_kernel]}
    return planned(**fixed, b=rule).document["objective"]["value_ms"]


def test_explain_values_are_those_of_plans_with_that_option():
    explanation = explain_table(planned(), "tower.b")
    options = {
        (o.sharding_type, o.compute_kernel): o for o in explanation.others if o.sharding_type == "whole"
    }
    assert options
    for option in options.values():
        assert value_with(option) == pytest.approx(option.value_ms)


@pytest.mark.parametrize(
    ("asked", "rank_of_a"), [({"ranks": [1]}, 0), ({"together": "x"}, 1), ({"apart": "x"}, 0)]
)
def test_explain_keeps_the_rules_on_ranks(asked, rank_of_a):
    """Without rules the partitioner takes the first rank with room."""
    others = {
        name: {"sharding_types": ["whole"], "compute_kernels": ["plain"], "ranks": [0]} for name in "ac"
    }
    others["a"] |= {"ranks": [rank_of_a], **({} if "ranks" in asked else asked)}
    explanation = explain_table(planned(**others, b=asked), "b")
    found = [own for own in explanation.others if math.isfinite(own.value_ms)]
    assert found
    for own in [*found, explanation.chosen]:
        rule = {"sharding_types": [own.sharding_type], "compute_kernels": [own.compute_kernel], **asked}
        again = planned(**others, b=rule).document["objective"]["value_ms"]
        assert own.value_ms == pytest.approx(again), own.name


def test_explain_options_without_room_say_what_is_short():
    # b takes 3200 bytes whole, 1600 on each rank cut; "thorough" takes twice that.
    explanation = explain_table(planned(cap=3000), "b")
    whole = [option for option in explanation.others if option.name == "whole / plain"]
    assert [math.isinf(option.value_ms) for option in whole] == [True]
    assert whole[0].reason == "does not fit: a shard needs 3.1 KiB of ddr, no rank has more than 2.5 KiB"


def test_explain_refusals_and_constraints_are_told():
    lines = explanation_lines(explain_table(planned(b={"sharding_types": ["slices"], "ranks": [0, 1]}), "b"))
    assert lines[0].startswith("'tower.b' (100 x 8 FP32): slices")
    assert ", 2 shards, " in lines[0]
    assert ", 1 shard, " in explanation_lines(explain_table(planned(b={"sharding_types": ["whole"]}), "b"))[0]
    assert "not an option: compute kernel 'visible': applies no optimizer" in "\n".join(lines)


def test_check_of_a_bound_above_the_value_says_so_whatever_its_proof(monkeypatch):
    monkeypatch.setattr(
        "shardwright_plugins.plan_differences.check.why_unproven",
        lambda space, bound, certificate, registry: "",
    )
    document = json.loads(planned().to_json())
    document["objective"].update(lower_bound_ms=2 * document["objective"]["value_ms"], gap=0.0)
    (problem,) = check_plan(ShardingPlan.from_json(json.dumps(document))).problems
    assert "is above the plan's own value" in problem


def test_explain_name_of_several_tables_raises_with_their_paths():
    tables = [TableSpec("a", 10, 8, ["f"], module=module) for module in ("x", "y")]
    made = EmbeddingShardingPlanner(Topology(2, "cpu", ddr_cap=100_000), 64).plan_tables(tables)
    plan = ShardingPlan.from_json(made.to_json())
    with pytest.raises(UnknownNameError, match=r"2 tables of the plan are named 'a': 'x\.a', 'y\.a'"):
        explain_table(plan, "a")
    assert explain_table(plan, "y.a").table.module == "y"


DAMAGES = [
    lambda inputs: inputs["tables"].update(value=None),
    lambda inputs: inputs["tables"].update(value=3),
    lambda inputs: inputs["batch_size"].update(value="64"),
    lambda inputs: inputs.update(estimator=[]),
    lambda inputs: inputs.update(constraints=3),
]


@pytest.mark.parametrize("damage", DAMAGES)
def test_check_and_explain_of_damaged_inputs_raise_saying_so(damage):
    """What is edited in a document is found where it is read, what is made in Python where it is asked."""
    document = json.loads(planned().to_json())
    damage(document["inputs"])
    with pytest.raises(PlanError, match=r"the plan document: inputs\."):
        ShardingPlan.from_json(json.dumps(document))
    plan = ShardingPlan(planned().plan, document)
    for ask in (check_plan, lambda plan: explain_table(plan, "a")):
        with pytest.raises(PlanError, match=r"the plan document's inputs"):
            ask(plan)


def test_compare_of_damaged_inputs_raises_saying_so():
    document = json.loads(planned().to_json())
    document["inputs"]["tables"] = 3
    with pytest.raises(PlanError, match="inputs are not as a planner writes them"):
        compare_plans(planned(), ShardingPlan(planned().plan, document))


def test_restate_drops_a_bound_that_is_not_proven():
    document = json.loads(planned().to_json())
    document["objective"]["lower_bound_ms"] *= 1.5
    plan = ShardingPlan.from_json(json.dumps(document))
    again = restate(plan, check_plan(plan))
    assert check_plan(again).problems == []
    objective = again.document["objective"]
    assert (objective["lower_bound_ms"], objective["gap"]) == (0.0, None)
    assert "certificate" not in objective


def test_check_of_a_gap_that_is_not_that_of_value_and_bound_says_so():
    document = json.loads(planned(proposer=WithBound()).to_json())
    document["objective"]["gap"] += 0.25
    (problem,) = check_plan(ShardingPlan.from_json(json.dumps(document))).problems
    assert problem.startswith("the document says gap = 0.")


def test_explain_and_check_of_a_document_without_inputs_raise():
    plan = planned()
    bare = ShardingPlan(plan.plan, {key: value for key, value in plan.document.items() if key != "inputs"})
    for ask in (check_plan, lambda plan: explain_table(plan, "a")):
        with pytest.raises(PlanError, match=r"has no inputs\.tables"):
            ask(bare)


def test_check_of_a_plan_with_other_tables_than_its_inputs_raises():
    plan = planned()
    del plan.plan[""]["a"]
    with pytest.raises(PlanError, match=r"tables in inputs\.tables that are not in modules: 'a'"):
        check_plan(plan)


class AtSpeed(Cells):
    """Cells looked up at the ranks' speed."""

    name = "at_speed"

    def estimate(self, options, topology):
        return {"forward": super().estimate(options, topology)["forward"] / topology.speed}


def test_explain_times_are_those_of_shards_on_their_ranks_where_ranks_are_of_unlike_speed(host_with):
    topology = Topology(2, "cpu", ddr_cap=100_000, speed=[0.25, 1.0])
    rules = {"b": ParameterConstraints(sharding_types=["whole"], compute_kernels=["plain"], ranks=[0])}
    with host_with(estimators=[AtSpeed, Weights]):
        planner = EmbeddingShardingPlanner(topology, 64, constraints=rules)
        plan = ShardingPlan.from_json(planner.plan_tables(TABLES).to_json())
        chosen, others = explain_table(plan, "b").chosen, explain_table(plan, "c").others
    # 64 samples, 100 rows of 8 columns, on the rank of a quarter of the speed.
    assert (chosen.total_ms, chosen.largest_ms) == pytest.approx((64 * 800 / 1000 / 0.25,) * 2)
    # Two rows of 8 columns there, and one on the other rank.
    cut = next(option for option in others if option.name.startswith("slices") and "plain" in option.name)
    assert (cut.total_ms, cut.largest_ms) == pytest.approx(
        (64 * 8 * (2 / 0.25 + 1) / 1000, 64 * 16 / 1000 / 0.25)
    )
