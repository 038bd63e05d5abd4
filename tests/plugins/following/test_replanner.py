"""A plan that follows its data, in one process: what is counted, sought and refused."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from tests.plugins.following import models
from tests.programs import printed_by

import shardwright as sw
from shardwright.planning.plan.inputs import InputTables
from shardwright_plugins.following import Look, Replanner
from shardwright_plugins.following.search import plan_near
from shardwright_plugins.following.statistics import IdCounts, ids_per_bag

HEAVY, LIGHT = 40.0, 1.0


def drifted(made: sw.ShardingPlan) -> dict[str, list[float]]:
    """Ids per bag of data in which rank 0's tables have nearly all ids."""
    return {name: [HEAVY if own.ranks == [0] else LIGHT] for name, own in made.plan[""].items()}


@pytest.fixture(scope="module")
def made() -> sw.ShardingPlan:
    return models.planner(2, "fused_torch").plan(models.bags(), models.SHARDERS)


def value(plan: sw.ShardingPlan, name: str) -> Any:
    return plan.document["inputs"][name]["value"]


def test_plan_near_evens_out_what_has_drifted(made: sw.ShardingPlan) -> None:
    found = plan_near(made, drifted(made), move_cost=0.0)
    tables = InputTables.of(found.document)
    asked = {spec.name: tables.constraints.of(spec).pooling_factors for spec in tables.tables.values()}
    assert asked == {name: tuple(ids) for name, ids in drifted(made).items()}
    ranks = {name: own.ranks[0] for name, own in found.plan[""].items()}
    heavy = [ranks[name] for name, ids in drifted(made).items() if ids == [HEAVY]]
    assert abs(heavy.count(0) - heavy.count(1)) == 1  # of three
    assert found.document["objective"]["value_ms"] < value(found, "kept_ms")
    assert value(found, "moved_bytes") > 0


def test_plan_near_stays_where_moves_cost_more_than_they_save(made: sw.ShardingPlan) -> None:
    found = plan_near(made, drifted(made), move_cost=1e12)
    assert found.plan == made.plan
    assert value(found, "moved_bytes") == 0
    assert found.document["objective"]["value_ms"] == pytest.approx(value(found, "kept_ms"))


def test_cost_of_moves_is_measured_in_real_milliseconds(made: sw.ShardingPlan) -> None:
    """Where steps take five times what is predicted, a move is worth it five times as soon."""
    first = plan_near(made, {}, move_cost=10.0)
    predicted = first.document["objective"]["value_ms"]
    found = plan_near(made, {}, move_cost=10.0, measured_ms=5 * predicted)
    assert value(found, "factor") == pytest.approx(5, rel=1e-3)
    assert value(found, "move_cost_ms_per_gib") == pytest.approx(
        value(first, "move_cost_ms_per_gib") / 5, rel=1e-3
    )


def test_ids_per_bag_are_those_of_all_ranks() -> None:
    tables = [sw.TableSpec("t", 10, 8, ["a", "b"], module="m"), sw.TableSpec("u", 10, 8, ["c"], module="m")]
    counts = [{("m", "a"): (6, 2), ("m", "b"): (1, 2)}, {("m", "a"): (0, 1), ("m", "b"): (8, 1)}]
    assert ids_per_bag(counts, tables) == {"m.t": [2.0, 3.0]}


def test_counts_are_those_of_the_batches() -> None:
    model = models.alone()
    counting = IdCounts({"": model.module})
    models.train(model, models.batch(0, range(1, 7)))
    counting.is_counting = False
    models.train(model, models.batch(1))
    counting.is_counting = True
    model(features=models.batch(2, range(1, 7)))
    with torch.no_grad():  # an evaluation
        model(models.batch(4)).values()
    with pytest.raises(sw.InvalidInputError):  # the collection's own words, on all ranks
        model({"f0": [[1]]})
    counting.close()
    models.train(model, models.batch(3))
    expected = {
        ("", f"f{n}"): (2 * (n + 1) * models.BATCH, 2 * models.BATCH) for n in range(models.NUM_TABLES)
    }
    assert counting.counts == expected


def test_failed_search_is_told_and_training_goes_on() -> None:
    model = models.alone()
    inputs = {**model.plan.document["inputs"], "estimator": {"value": "gone", "provenance": "given"}}
    model.plan = attrs.evolve(model.plan, document={**model.plan.document, "inputs": inputs})
    with Replanner(model, every=2, in_background=False) as replanner:
        looks = []
        for seed in range(3):
            models.train(model, models.batch(seed))
            looks.append(replanner.step() if seed == 0 else None)
            if seed == 1:
                with pytest.warns(UserWarning, match="found no plan"):
                    looks[1] = replanner.step()
    assert [look is None for look in looks] == [True, False, True]
    assert "'gone'" in looks[1].problem
    assert not looks[1].is_taken


def test_search_is_killed_when_the_replanner_is_closed() -> None:
    model = models.alone()
    replanner = Replanner(model, every=1)
    models.train(model, models.batch(0))
    assert replanner.step() is None
    process = replanner._search._process
    replanner.close()
    assert process.returncode is not None


def heard(replanner: Replanner, model: sw.DistributedModelParallel) -> Look:
    """Train until a search has ended."""
    while True:
        models.train(model, models.batch(1))
        if (look := replanner.step()) is not None:
            return look


def test_answer_for_a_plan_that_was_left_meanwhile_is_dropped() -> None:
    model = models.alone()
    with Replanner(model, every=1, move_cost=0.0) as replanner:
        models.train(model, models.batch(0))
        assert replanner.step() is None
        by_hand = sw.ShardingPlan.from_json(model.plan.to_json())
        model.reshard(by_hand)
        with pytest.warns(UserWarning, match="resharded while"):
            look = heard(replanner, model)
    assert not look.is_taken
    assert look.kept_ms is None
    assert model.plan is by_hand


def test_search_asks_what_the_planner_was_asked(made: sw.ShardingPlan) -> None:
    asked = {"proposer": "greedy", "partitioner": "greedy_perf"}
    planner = sw.EmbeddingShardingPlanner(sw.Topology(2, "cpu"), models.BATCH, seconds=5, **asked)
    found = plan_near(planner.plan(models.bags(), models.SHARDERS), {}, move_cost=0.0)
    assert {name: value(found, name) for name in asked} == asked
    assert value(found, "seconds_limit") == 5


def test_what_plugins_print_is_no_part_of_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('hello')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    model = models.alone()
    with Replanner(model, every=1, in_background=False) as replanner:
        models.train(model, models.batch(0))
        look = replanner.step()
    assert look is not None
    assert look.problem == ""


def test_loop_with_a_batch_in_progress_is_refused_in_its_first_step() -> None:
    model = models.alone()
    with Replanner(model, every=1000) as replanner:
        output = model(models.batch(0))
        with pytest.raises(sw.UnsupportedError):
            replanner.step()
    output.values().sum().backward()


def test_closed_replanner_makes_no_more_steps() -> None:
    model = models.alone()
    replanner = Replanner(model)
    replanner.close()
    with pytest.raises(sw.InvalidInputError):
        replanner.step()


def test_refused_replanner_leaves_the_model_as_it_was() -> None:
    model = models.alone()
    with Replanner(model):
        before = [len(module._forward_hooks) for module in model.modules()]
        with pytest.raises(sw.InvalidInputError):
            Replanner(model)
        assert [len(module._forward_hooks) for module in model.modules()] == before


@pytest.mark.parametrize("other", [models.bags(), None])
def test_model_that_is_not_sharded_is_refused(other: Any) -> None:
    with pytest.raises(sw.InvalidInputError):
        Replanner(other)


@pytest.mark.parametrize(
    "arguments",
    [
        {"every": 0},
        {"every": 1.5},
        {"move_cost": -1},
        {"move_cost": float("nan")},
        {"move_cost": "1"},
        {"dry_run": "no"},
    ],
)
def test_wrong_numbers_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(sw.InvalidInputError):
        Replanner(models.alone(), **arguments)


def test_plan_of_unknown_origin_is_refused() -> None:
    model = models.alone()
    model.plan = attrs.evolve(model.plan, document={})
    with pytest.raises(sw.InvalidInputError):
        Replanner(model)


def test_search_imports_no_torch() -> None:
    source = "import sys, shardwright_plugins.following.search; sys.exit('torch' in sys.modules)"
    printed_by("-c", source)
