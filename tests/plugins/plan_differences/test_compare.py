"""Differences of plans, what explains a plan's choices, and what a check finds."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.planning.conftest import Cells, Weights, WithBound
from tests.core.runtime.plans import RowsMirrored

from shardwright import (
    Block,
    ComputeKernel,
    EmbeddingModuleShardingPlan,
    EmbeddingShardingPlanner,
    Layout,
    ParameterConstraints,
    ParameterSharding,
    PlanError,
    RowsModulo,
    RowsRange,
    RowsSplit,
    ShardingPlan,
    TableSpec,
    Topology,
    UnknownNameError,
    check_plan,
)
from shardwright_plugins.dataflows import Replicate
from shardwright_plugins.plan_differences import compare
from shardwright_plugins.plan_differences.check import restate
from shardwright_plugins.plan_differences.compare import compare_plans
from shardwright_plugins.plan_differences.explain import explain_table, explanation_lines

RANKS = 3


def plan_of(layout, kind="any", **document):
    return ShardingPlan(
        {"": EmbeddingModuleShardingPlan(t=ParameterSharding(kind, "plain", layout))}, document
    )


def held(layout, rows, dim):
    """Which elements each rank has: [W, rows, dim]."""
    mask = np.zeros((RANKS, rows, dim), dtype=bool)
    for block in layout.blocks:
        here = np.zeros((rows, dim), dtype=bool)
        here[block.rows.rows, block.columns.start : block.columns.stop] = True
        mask[block.rank] |= here
    return mask


@st.composite
def layouts(draw, rows, dim):
    if draw(st.integers(0, 4)) == 0:
        table = TableSpec("t", rows, dim)
        return Layout(
            [Block(table.all_rows, table.all_columns, rank) for rank in range(RANKS)], dataflow=Replicate()
        )
    cuts = sorted(draw(st.lists(st.integers(0, rows), max_size=3)))
    maps = [RowsSplit((0, *cuts, rows)), RowsRange(rows, parts=3), RowsMirrored(rows, 2)]
    maps += [RowsModulo(rows, parts=parts) for parts in (2, 3, 4, 6)]
    row_map = draw(st.sampled_from(maps))
    columns = sorted(draw(st.sets(st.integers(1, dim - 1), max_size=2)))
    table = TableSpec("t", rows, dim)
    spans = [table.columns(a, b) for a, b in zip([0, *columns], [*columns, dim], strict=True)]
    rank = st.integers(0, RANKS - 1)
    return Layout([Block(part, span, draw(rank)) for part in row_map for span in spans])


@given(st.data(), st.integers(1, 12), st.integers(2, 6))
def test_compare_counts_what_ranks_do_not_hold_yet(data, rows, dim):
    first, second = data.draw(layouts(rows, dim)), data.draw(layouts(rows, dim))
    found = compare_plans(plan_of(first, "a"), plan_of(second, "b"))
    missing = held(second, rows, dim) & ~held(first, rows, dim)
    assert found.moved_bytes == 4 * missing.sum()
    assert {rank: got for rank, (_, got) in found.moves.by_rank.items() if got} == {
        rank: 4 * count for rank, count in enumerate(missing.sum(axis=(1, 2)).tolist()) if count
    }
    assert found.changes[0].total_bytes == 4 * held(second, rows, dim).sum()


def whole(rank, rows=10, dim=8):
    table = TableSpec("t", rows, dim)
    return Layout([Block(table.all_rows, table.all_columns, rank)])


def test_compare_another_kernel_moves_nothing_and_is_a_change():
    other = ShardingPlan({"": EmbeddingModuleShardingPlan(t=ParameterSharding("any", "thorough", whole(1)))})
    (change,) = compare_plans(plan_of(whole(1)), other).changes
    assert (change.before, change.after, change.moved_bytes) == (("any", "plain"), ("any", "thorough"), 0)


def test_compare_counts_bytes_of_the_tables_data_type():
    sizes = {"num_embeddings": 10, "embedding_dim": 8}
    inputs = {"tables": {"value": [{"name": "t", "data_type": "FP16", **sizes}]}}
    found = compare_plans(plan_of(whole(0)), plan_of(whole(1), inputs=inputs))
    assert found.moved_bytes == 10 * 8 * 2


def test_compare_new_and_dropped_tables_are_changes():
    empty = ShardingPlan({"": EmbeddingModuleShardingPlan()})
    (new,) = compare_plans(empty, plan_of(whole(1))).changes
    (gone,) = compare_plans(plan_of(whole(1)), empty).changes
    assert (new.before, new.moved_bytes) == (None, 320)
    assert (gone.after, gone.moved_bytes) == (None, 0)


def test_compare_tables_of_another_size_raises():
    with pytest.raises(PlanError, match=r"table 't' has 10 x 8 elements in the first plan and 9 x 8"):
        compare_plans(plan_of(whole(0)), plan_of(whole(0, rows=9)))


def moved_between_hosts(**document):
    """A table of 10 x 8 elements on ranks 0 and 1, that goes to ranks 1 and 2, of two on a host."""
    table = TableSpec("t", 10, 8)

    def on(first):
        parts = RowsRange(10, parts=2)
        return Layout([Block(part, table.all_columns, first + n) for n, part in enumerate(parts)])

    topology = Topology(4, "cpu", local_world_size=2, ddr_mem_bw=1000, intra_host_bw=100, inter_host_bw=10)
    return compare_plans(plan_of(on(0), **document), plan_of(on(1), topology=topology.to_data())).moves


def test_moves_are_told_by_link_and_rank():
    moves = moved_between_hosts()
    assert moves.by_link == {"same_rank": 0, "intra_host": 160, "inter_host": 160}
    assert moves.by_rank == {0: (160, 0), 1: (160, 160), 2: (0, 160)}
    assert not moves.counts_states  # the document does not say what the table's optimizer is


def test_moves_take_the_time_of_the_slowest_rank():
    # Rank 1 gets 160 B inside the host and sends 160 B to the other; all of it goes through its memory twice.
    assert moved_between_hosts().ms == pytest.approx(160 / 10 + 2 * 320 / 1000)


@pytest.mark.parametrize(
    ("optimizer", "state_bytes"), [("sgd", 0), ("adam", 2 * 320), ("row_wise_adagrad", 4 * 10)]
)
def test_moves_count_the_optimizer_states_that_a_kernel_declares(optimizer, state_bytes, monkeypatch):
    class Plain(ComputeKernel):
        name = "plain"
        supports = build = None

        def memory_bytes(self, request, num_rows):
            values = {"sgd": 0, "adam": 2 * request.num_columns, "row_wise_adagrad": 1}[
                request.optimizer.name
            ]
            return {"device": 4 * num_rows * (request.num_columns + values)}

    kernels = SimpleNamespace(create={"plain": Plain()}.get)
    monkeypatch.setattr(compare, "host", lambda: SimpleNamespace(compute_kernels=kernels))
    sizes = {"num_embeddings": 10, "embedding_dim": 8, "optimizer": {"name": optimizer}}
    inputs = {"tables": {"value": [{"name": "t", **sizes}]}}
    moves = compare_plans(plan_of(whole(0), inputs=inputs), plan_of(whole(1), "b")).moves
    assert moves.by_rank == {0: (320 + state_bytes, 0), 1: (0, 320 + state_bytes)}
    assert moves.counts_states


def test_difference_is_json_data():
    moves = moved_between_hosts().to_data()
    assert moves["bytes"]["inter_host"] == 160
    data = compare_plans(plan_of(whole(0)), plan_of(whole(1))).to_data()
    assert json.loads(json.dumps(data))["reshard"]["ranks"]["1"] == {"sent_bytes": 0, "received_bytes": 320}


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


def edited(plan, change):
    """A plan after the objective in its document was changed by hand."""
    document = json.loads(plan.to_json())
    change(document["objective"])
    return ShardingPlan.from_json(json.dumps(document))


def test_check_of_a_bound_above_the_value_says_so_whatever_its_proof(monkeypatch):
    monkeypatch.setattr(
        "shardwright_plugins.plan_differences.check.why_unproven",
        lambda space, bound, certificate, registry: "",
    )
    plan = edited(planned(), lambda of: of.update(lower_bound_ms=2 * of["value_ms"], gap=0.0))
    (problem,) = check_plan(plan).problems
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
    plan = edited(planned(), lambda of: of.update(lower_bound_ms=1.5 * of["lower_bound_ms"]))
    again = restate(plan, check_plan(plan))
    assert check_plan(again).problems == []
    objective = again.document["objective"]
    assert (objective["lower_bound_ms"], objective["gap"]) == (0.0, None)
    assert "certificate" not in objective


def test_check_of_a_gap_that_is_not_that_of_value_and_bound_says_so():
    plan = edited(planned(proposer=WithBound()), lambda of: of.update(gap=of["gap"] + 0.25))
    (problem,) = check_plan(plan).problems
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
