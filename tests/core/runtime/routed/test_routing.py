"""Slots as they are planned, what a router sorts, and where results and gradients are made."""

from __future__ import annotations

import pytest
from tests.core.runtime.plans import Cut, Cuts, paths_here

from shardwright import (
    Collection,
    EmbeddingBagCollectionSharder,
    PlanError,
    RowsModulo,
    RowsRange,
    UnsupportedError,
)
from shardwright.runtime.routed import routing
from shardwright.runtime.routed.plan import plan_routing
from shardwright.runtime.routed.routing import routers_of
from shardwright_testing import run_simulated


def test_plan_routing_features_of_tables_with_one_row_map_share_their_buckets():
    rows = RowsModulo(6, parts=2)
    plan = Cuts(
        [Cut(6, 2, ("a",), row_map=rows, ranks=(0, 1)), Cut(6, 2, ("a",), row_map=rows, ranks=(1, 0))], 2
    ).plan()
    assert len(plan.readings) == 1
    assert plan.slots.per_rank.tolist() == [2, 2]


def test_plan_routing_has_objects_for_the_blocks_of_its_own_rank_only():
    case = Cuts([Cut(12, 2, ("a",), row_map=RowsRange(12, parts=4), ranks=(0, 1, 2, 3))], 4)
    for rank in range(4):
        plan = case.plan(rank)
        assert [spec.block.rank for group in plan.groups for spec in group.blocks] == [rank]
        assert len(plan.slots.piece) == 4


def test_engine_rank_that_does_not_exist_raises_naming_table_and_rank():
    case = Cuts([Cut(4, 3, ("a",), ranks=(5,))], 2)
    with pytest.raises(PlanError, match=r"table 't0' \(cut\): .*rank 5 of 2 ranks"):
        run_simulated(lambda env: case.shard(env, case.module()), 2)


def test_plan_routing_kernel_that_refuses_raises_with_its_reason_and_what_to_do():
    case = Cuts([Cut(4, 3, ("a",))], 1)
    sharder = EmbeddingBagCollectionSharder({"optimizer": "adam"})
    collection = Collection.of(sharder.tables(case.module()))
    with pytest.raises(
        UnsupportedError,
        match=r"table 't0' \(4 x 3 FP32\).*kernel 'loop'.*on cpu: it runs sgd only\. Name another",
    ):
        plan_routing(
            collection,
            [0],
            case.shardings(),
            rank=0,
            world_size=1,
            device_type="cpu",
            path_of=paths_here(is_pooled=True),
        )


def test_router_sorts_ids_by_rank_alone_where_slots_stand_in_the_order_of_their_features(monkeypatch):
    num_keys = []
    original = routing.order_of
    monkeypatch.setattr(
        routing, "order_of", lambda keys, count: num_keys.append(count) or original(keys, count)
    )
    names = ("a", "b", "c", "d", "e")
    tables = [Cut(12, 2, (name,), row_map=RowsModulo(12, parts=3), ranks=(0, 1, 2)) for name in names]
    case = Cuts(tables, 3)
    (router,) = routers_of(case.plan())
    router.route(case.read(case.batch(4)))
    assert num_keys == [3]
