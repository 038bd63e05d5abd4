"""Streams and slots as they are planned, and the router against loops over single ids."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.core.runtime.plans import Cut, Cuts, cuts, host_with_loops
from tests.core.runtime.streams import EXAMPLES, assert_bags, bags_of, stream_bags

from shardwright.errors import PlanError, UnsupportedError
from shardwright.planning.layouts import Exchange, Hierarchical
from shardwright.planning.row_maps import RowsModulo, RowsRange
from shardwright.plugins import use_host
from shardwright.runtime.collection import Collection
from shardwright.runtime.routing import Router
from shardwright.runtime.routing_plan import plan_routing
from shardwright.runtime.sharders import EmbeddingBagCollectionSharder
from shardwright.testing.simulated import run_simulated


@EXAMPLES
@given(cuts(), st.integers(0, 4), st.integers(0, 3))
def test_router_streams_hold_the_ids_of_their_rows_in_the_bags_order(case, batch_size, seed):
    with use_host(host_with_loops()):
        plan = case.plan()
    batch = case.batch(batch_size, seed)
    routed = Router(plan).route(case.read(batch))
    assert routed.batch_size == batch_size
    assert (routed.weights is not None) == case.is_weighted
    for index, stream in enumerate(plan.streams):
        weights = routed.weights[index] if routed.weights is not None else None
        expected = stream_bags(case, stream, batch)
        assert_bags(routed.lengths[index], routed.ids[index], weights, expected)


@EXAMPLES
@given(cuts(is_pooled=None), st.integers(0, 4), st.integers(0, 3))
def test_router_positions_are_the_places_of_the_ids_in_their_feature(case, batch_size, seed):
    with use_host(host_with_loops()):
        plan = case.plan()
    batch = case.batch(batch_size, seed)
    routed = Router(plan).route(case.read(batch))
    for index, stream in enumerate(plan.streams):
        ids = batch[case.collection().features[stream.feature]].values()
        place = routed.positions[index]
        if stream.row_map is None:
            assert place is None
            continue
        held = (stream.row_map.part_of(ids) == stream.part).nonzero().squeeze(1)
        assert torch.equal(place, held)
        assert torch.equal(stream.row_map.local_row_of(ids[place]), routed.ids[index])


def test_batch_reader_hands_features_out_in_the_collections_order():
    case = Cuts([Cut(4, 3, ("a", "b")), Cut(5, 2, ("b",))], 1, is_weighted=True)
    batch = case.batch(3)
    assert batch.keys() == ["b", "a"]
    read = case.read(batch)
    assert (case.collection().features, read.batch_size) == (("a", "b"), 3)
    for index, feature in enumerate("ab"):
        pairs = [pair for bag in bags_of(batch, feature) for pair in bag]
        assert read.lengths[index].tolist() == batch[feature].lengths().tolist()
        assert list(zip(read.ids[index].tolist(), read.weights[index].tolist(), strict=True)) == pairs


def test_collection_outputs_have_the_modules_names_and_columns():
    case = Cuts([Cut(4, 3, ("a", "b")), Cut(5, 2, ("b",), ranks=(1,))], 2)
    collection = case.collection()
    assert [output.name for output in collection.outputs] == case.module().embedding_names()
    assert [(output.start, output.stop) for output in collection.outputs] == [(0, 3), (3, 6), (6, 8)]
    assert (collection.width, case.plan().max_slots) == (8, 2)


def test_plan_routing_features_of_tables_with_one_row_map_share_their_streams():
    rows = RowsModulo(6, parts=2)
    plan = Cuts(
        [Cut(6, 2, ("a",), row_map=rows, ranks=(0, 1)), Cut(6, 2, ("a",), row_map=rows, ranks=(1, 0))], 2
    ).plan()
    assert len(plan.streams) == 2
    assert [len(plan.slots_of(rank)) for rank in range(2)] == [2, 2]


def test_plan_routing_block_without_rows_has_no_slot():
    plan = Cuts([Cut(2, 2, ("a",), row_map=RowsRange(2, parts=3), ranks=(0, 1, 2))], 3).plan()
    assert [len(plan.slots_of(rank)) for rank in range(3)] == [1, 1, 0]


def test_plan_routing_groups_of_a_way_home_stand_together():
    flows = [Exchange(), Hierarchical(), Exchange()]
    tables = [
        Cut(4, 2, ("a",), kernel=kernel, dataflow=flow)
        for kernel, flow in zip(("loop", "loop", "loop_by_sample"), flows, strict=True)
    ]
    (groups,) = Cuts(tables, 1).plan().groups
    assert [(group.way.__name__, group.kernel_name) for group in groups] == [
        ("DirectReturn", "loop"),
        ("DirectReturn", "loop_by_sample"),
        ("HostReturn", "loop"),
    ]


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
        plan_routing(collection, [0], case.shardings(), world_size=1, device_type="cpu")
