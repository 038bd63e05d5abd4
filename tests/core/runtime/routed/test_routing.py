"""Slots as they are planned, and the routers against loops over single ids."""

from __future__ import annotations

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from tests.core.runtime.buckets import EXAMPLES, assert_bags, bags_of, slot_bags
from tests.core.runtime.plans import Cut, Cuts, cuts, host_with_loops, paths_here

from shardwright.errors import PlanError, UnsupportedError
from shardwright.host import use_host
from shardwright.planning.layouts.layout import Exchange
from shardwright.planning.layouts.row_maps import RowsModulo, RowsRange
from shardwright.runtime.routed import routing
from shardwright.runtime.routed.plan import plan_routing
from shardwright.runtime.routed.routing import routers_of
from shardwright.runtime.sharded.collections.sharders import EmbeddingBagCollectionSharder
from shardwright.runtime.step.collection import Collection
from shardwright_plugins.dataflows import Hierarchical
from shardwright_testing.simulated import run_simulated


def slots_of(plan, router):
    """The slots of a router, among those of all, in order."""
    bucketing = plan.bucketing_of_piece[plan.slots.piece]
    return [slot for slot in range(len(bucketing)) if bucketing[slot] == router.bucketing]


def pieces(values, sizes):
    return values.split(sizes.tolist())


@pytest.mark.parametrize("dataflow", [Exchange(), Hierarchical()], ids=lambda flow: flow.name)
@EXAMPLES
@given(cuts(is_pooled=None), st.integers(0, 4), st.integers(0, 3), st.booleans())
def test_router_slots_get_the_ids_of_their_rows_in_the_bags_order(
    dataflow, case, batch_size, seed, has_columns
):
    tables = [evolve(table, dataflow=dataflow) for table in case.tables]
    case = evolve(case, tables=tables, has_columns=has_columns)
    with use_host(host_with_loops()):
        plan = case.plan()
    batch = case.batch(batch_size, seed)
    read = case.read(batch)
    for router in routers_of(plan):
        routed, slots = router.route(read), slots_of(plan, router)
        expected = [slot_bags(case, plan, slot, batch) for slot in slots]
        assert routed.num_bags.tolist() == [len(own) for own in expected]
        assert routed.num_ids.tolist() == [sum(len(bag) for _, bag in own) for own in expected]
        assert routed.columns.keys() == case.columns.keys()
        assert_bags(
            routed.lengths,
            routed.ids,
            routed.columns,
            [bag for own in expected for _, bag in own],
        )
        for own, place in zip(expected, placed(case, plan, slots, routed, read), strict=True):
            if place is None:
                assert not case.is_pooled or [sample for sample, _ in own] == list(range(batch_size))
            elif case.is_pooled:
                assert place.tolist() == [sample for sample, _ in own]


def placed(case, plan, slots, routed, read):
    """The places of each slot's bags; of sequences, checked by the ids that stand there."""
    if routed.places is None:
        return [None] * len(slots)
    places = pieces(routed.places, routed.num_bags)
    if not case.is_pooled:
        for slot, place, ids in zip(slots, places, pieces(routed.ids, routed.num_ids), strict=True):
            reading = plan.readings[plan.pieces.reading[plan.slots.piece[slot]]]
            there = read.ids[reading.feature]
            held = (reading.row_map.part_of(there) == int(plan.slots.part[slot])).nonzero().squeeze(1)
            assert place.tolist() == held.tolist()
            assert reading.row_map.local_row_of(there[place]).tolist() == ids.tolist()
    return places


def test_batch_reader_hands_features_out_in_the_collections_order():
    case = Cuts([Cut(4, 3, ("a", "b")), Cut(5, 2, ("b",))], 1, is_weighted=True)
    batch = case.batch(3)
    assert batch.keys() == ["b", "a"]
    read = case.read(batch)
    assert (case.collection().features, read.batch_size) == (("a", "b"), 3)
    weights = pieces(read.columns["weights"], read.num_ids)
    for index, feature in enumerate("ab"):
        pairs = [pair for bag in bags_of(batch, feature) for pair in bag]
        assert read.lengths[index].tolist() == batch[feature].lengths().tolist()
        assert list(zip(read.ids[index].tolist(), weights[index].tolist(), strict=True)) == pairs


def test_collection_outputs_have_the_modules_names_and_columns():
    case = Cuts([Cut(4, 3, ("a", "b")), Cut(5, 2, ("b",), ranks=(1,))], 2)
    collection = case.collection()
    assert [output.name for output in collection.outputs] == case.module().embedding_names()
    assert [(output.start, output.stop) for output in collection.outputs] == [(0, 3), (3, 6), (6, 8)]
    assert (collection.width, case.plan().slots.per_rank.tolist()) == (8, [2, 1])


def test_plan_routing_features_of_tables_with_one_row_map_share_their_buckets():
    rows = RowsModulo(6, parts=2)
    plan = Cuts(
        [Cut(6, 2, ("a",), row_map=rows, ranks=(0, 1)), Cut(6, 2, ("a",), row_map=rows, ranks=(1, 0))], 2
    ).plan()
    assert len(plan.readings) == 1
    assert plan.slots.per_rank.tolist() == [2, 2]


def test_plan_routing_block_without_rows_has_no_slot():
    plan = Cuts([Cut(2, 2, ("a",), row_map=RowsRange(2, parts=3), ranks=(0, 1, 2))], 3).plan()
    assert plan.slots.per_rank.tolist() == [1, 1, 0]


def test_plan_routing_groups_of_a_way_home_stand_together():
    flows = [Exchange(), Hierarchical(), Exchange()]
    tables = [
        Cut(4, 2, ("a",), kernel=kernel, dataflow=flow)
        for kernel, flow in zip(("loop", "loop", "loop_by_sample"), flows, strict=True)
    ]
    groups = Cuts(tables, 1).plan().groups
    assert [(group.kind.path.__name__, group.kernel_name) for group in groups] == [
        ("DirectReturn", "loop"),
        ("DirectReturn", "loop_by_sample"),
        ("HostReturn", "loop"),
    ]


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
