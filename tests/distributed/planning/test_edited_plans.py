"""Training from plans that were saved, and edited by hand; planning that others wait for."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.distributed.planning import edited_plan_workers
from tests.distributed.test_training import assert_same_state, unsharded_after

from shardwright_testing.ranks import RankPool

pytestmark = pytest.mark.distributed


def saved(pool: RankPool, types: list[str]) -> dict[str, Any]:
    return json.loads(pool.run(edited_plan_workers.planned, 2, types)[0])


def tables(document: dict[str, Any]) -> dict[str, Any]:
    return document["modules"]["sparse.bags"]


def moved(document: dict[str, Any]) -> None:
    for table in tables(document).values():
        (shard,) = table["shards"]
        shard["rank"] = 1 - shard["rank"]


def cut_elsewhere(document: dict[str, Any]) -> None:
    user = tables(document)["user"]
    assert [shard["rows"] for shard in user["shards"]] == [[0, 25], [25, 50]]
    user["shards"][0]["rows"], user["shards"][1]["rows"] = [0, 7], [7, 50]


def of_another_type(document: dict[str, Any]) -> None:
    tables(document)["item"].update(
        sharding_type="row_wise",
        shards=[
            {"rank": 0, "rows": [0, 16], "columns": [0, 16]},
            {"rank": 1, "rows": [16, 31], "columns": [0, 16]},
        ],
    )


def of_a_type_that_would_not_cut_so(document: dict[str, Any]) -> None:
    tables(document)["user"]["sharding_type"] = "table_wise"


@pytest.mark.parametrize(
    ("types", "edit"),
    [
        (["row_wise", "table_wise"], lambda document: None),
        (["table_wise"], moved),
        (["row_wise"], cut_elsewhere),
        (["table_wise"], of_another_type),
        (["row_wise"], of_a_type_that_would_not_cut_so),
    ],
)
def test_training_from_a_saved_plan_that_was_edited_follows_its_shards(
    pool: RankPool, types: list[str], edit: Callable[[dict[str, Any]], None]
) -> None:
    document = saved(pool, types)
    edit(document)
    states = pool.run(edited_plan_workers.train_from, 2, json.dumps(document), 3)
    expected = unsharded_after(range(3), 2)[0].state_dict()
    for state in states:
        assert_same_state(state, expected)


def test_training_from_a_plan_whose_host_sums_are_spread_over_hosts(pool: RankPool) -> None:
    """The dataflow adds sums inside each host that has row parts; nothing says that it is one host."""
    document = saved(pool, ["table_wise"])
    document["topology"].update(world_size=4, local_world_size=2)
    tables(document)["user"].update(
        sharding_type="table_row_wise",
        dataflow={"name": "hierarchical"},
        shards=[
            {"rank": 1, "rows": [0, 20], "columns": [0, 8]},
            {"rank": 2, "rows": [20, 50], "columns": [0, 8]},
        ],
    )
    for state in pool.run(edited_plan_workers.train_on_hosts, 4, json.dumps(document), 3, 2):
        assert_same_state(state, unsharded_after(range(3), 4)[0].state_dict())


@pytest.mark.slow
def test_collective_plan_that_takes_longer_than_the_time_out_is_waited_for(pool: RankPool) -> None:
    seconds = 1.2 * edited_plan_workers.SHORT_S
    documents = pool.run(edited_plan_workers.plan_slowly, 2, seconds=seconds)
    assert documents[0] == documents[1]
    assert json.loads(documents[0])["inputs"]["seconds_limit"]["value"] == seconds


def test_collective_plan_interrupted_on_rank_0_is_the_best_so_far_everywhere(pool: RankPool) -> None:
    documents = pool.run(edited_plan_workers.plan_slowly, 2, is_interrupted=True)
    assert documents[0] == documents[1]
    assert json.loads(documents[0])["modules"]


def test_collective_plan_that_breaks_late_is_an_error_everywhere(pool: RankPool) -> None:
    own, other = pool.run(edited_plan_workers.plan_slowly, 2, is_broken=True)
    assert own == "PlanningError: proposer 'slow' failed: ZeroDivisionError: slow broke"
    assert other == f"PlanningError: rank 1: planning failed: rank 0 raised {own}"
