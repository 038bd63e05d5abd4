"""Router, payload and arrangement, each against loops over single ids and columns."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.runtime.plans import Cut, Cuts, cuts, host_with_loops

from shardwright.errors import PlanError, UnsupportedError
from shardwright.planning.layouts import RowsModulo, RowsRange
from shardwright.plugins import use_host
from shardwright.runtime.arrange import Arrangement
from shardwright.runtime.exchange_plan import plan_exchange
from shardwright.runtime.inputs import Problem, Status
from shardwright.runtime.payload import PayloadFormat
from shardwright.runtime.routing import Router
from shardwright.runtime.sharders import EmbeddingBagCollectionSharder

EXAMPLES = settings(max_examples=120, deadline=None)


def bags_of(batch, feature):
    """Lists of (id, weight), one a bag."""
    jagged = batch[feature]
    weights = jagged.weights_or_none()
    weights = [1.0] * len(jagged.values()) if weights is None else weights.tolist()
    pairs = list(zip(jagged.values().tolist(), weights, strict=True))
    offsets = jagged.offsets().tolist()
    return [pairs[start:stop] for start, stop in pairwise(offsets)]


def stream_bags(plan, stream, batch):
    """What a stream must hold: for each bag the ids of its row part, as rows of that part."""
    place = None
    if stream.row_map is not None:
        rows = [stream.row_map.rows_of(part) for part in range(stream.row_map.num_parts)]
        whole = range(stream.row_map.num_rows)
        held = [list(whole[part]) if isinstance(part, slice) else part.tolist() for part in rows]
        place = {row: local for local, row in enumerate(held[stream.part])}
    return [
        [(id if place is None else place[id], weight) for id, weight in bag if place is None or id in place]
        for bag in bags_of(batch, plan.features[stream.feature])
    ]


def assert_bags(lengths, ids, weights, expected):
    assert lengths.tolist() == [len(bag) for bag in expected]
    assert ids.tolist() == [id for bag in expected for id, _ in bag]
    if weights is not None:
        assert weights.tolist() == [weight for bag in expected for _, weight in bag]


@EXAMPLES
@given(cuts(), st.integers(0, 4), st.integers(0, 3))
def test_router_streams_hold_the_ids_of_their_rows_in_the_bags_order(case, batch_size, seed):
    with use_host(host_with_loops()):
        plan = case.plan()
    batch = case.batch(batch_size, seed)
    routed = Router(plan, is_weighted=case.is_weighted).route(batch)
    assert routed.batch_size == batch_size
    for index, feature in enumerate(plan.features):
        assert routed.feature_lengths[index].tolist() == batch[feature].lengths().tolist()
    assert (routed.weights is not None) == case.is_weighted
    for index, stream in enumerate(plan.streams):
        weights = routed.weights[index] if routed.weights is not None else None
        expected = stream_bags(plan, stream, batch)
        assert_bags(routed.lengths[index], routed.ids[index], weights, expected)


@EXAMPLES
@given(cuts(), st.lists(st.integers(0, 3), min_size=3, max_size=3))
def test_payload_what_the_ranks_pack_for_a_rank_is_what_it_unpacks(case, batch_sizes):
    with use_host(host_with_loops()):
        plan = case.plan()
    ranks = range(case.world_size)
    batches = [case.batch(batch_sizes[rank], seed=rank) for rank in ranks]
    formats = [
        PayloadFormat(plan, rank=rank, is_weighted=case.is_weighted, device=torch.device("cpu"))
        for rank in ranks
    ]
    routed = [Router(plan, is_weighted=case.is_weighted).route(batch) for batch in batches]
    packed = [fmt.pack(item) for fmt, item in zip(formats, routed, strict=True)]
    sent = [payload.split(splits) for payload, splits in packed]
    size = formats[0].header_size
    headers = [
        fmt.headers(item, Problem(Status.FINE)).split(size) for fmt, item in zip(formats, routed, strict=True)
    ]
    for rank in ranks:
        received = formats[rank].read_headers(torch.cat([by_peer[rank] for by_peer in headers]))
        assert [header.batch_size for header in received] == batch_sizes[: case.world_size]
        pieces = [by_peer[rank] for by_peer in sent]
        assert formats[rank].receive_splits(received) == [piece.numel() for piece in pieces]
        groups = formats[rank].unpack(torch.cat(pieces), received)
        for group, bags in zip(plan.groups[rank], groups, strict=True):
            expected = [
                bag
                for batch in batches
                for slot in group.slots
                for bag in stream_bags(plan, plan.streams[slot.stream], batch)
            ]
            assert (bags.num_slots, bags.batch_size) == (
                len(group.slots),
                sum(batch_sizes[: case.world_size]),
            )
            assert_bags(bags.lengths, bags.ids, bags.weights, expected)
            assert bags.offsets().tolist() == [
                0,
                *torch.tensor([len(b) for b in expected]).cumsum(0).tolist(),
            ]


def test_headers_carry_a_problem_and_no_ids():
    case = Cuts([Cut(4, 2, ("a",), ranks=(0,)), Cut(4, 2, ("b",), ranks=(1,))], 2)
    fmt = PayloadFormat(case.plan(), rank=1, is_weighted=False, device=torch.device("cpu"))
    problem = Problem(Status.ID_OUT_OF_RANGE, feature=1, value=-(2**62), position=2**40)
    sent = fmt.headers(None, problem)
    assert [header.problem for header in fmt.read_headers(sent)] == [problem, problem]
    assert [header.num_ids for header in fmt.read_headers(sent)] == [0, 0]


def slots_in_memory(plan, batch_size):
    """For each element sent home to a rank: its sample and its output column, in order."""
    for groups in plan.groups:
        for group in groups:
            pairs = [
                [(sample, column) for column in range(*slot.columns)]
                for slot in group.slots
                for sample in range(batch_size)
            ]
            if group.kernel.batch_major:  # sample by sample, slots side by side
                pairs = [
                    pairs[slot * batch_size + sample]
                    for sample in range(batch_size)
                    for slot in range(len(group.slots))
                ]
            yield from (pair for row in pairs for pair in row)


@EXAMPLES
@given(cuts(), st.integers(0, 3), st.integers(0, 9))
def test_arrangement_adds_slots_and_divides_means_and_packs_gradients(case, batch_size, seed):
    with use_host(host_with_loops()):
        plan = case.plan()
    batch = case.batch(batch_size, seed)
    lengths = torch.stack([batch[feature].lengths() for feature in plan.features]).int()
    divisor = torch.ones(batch_size, plan.width)
    for output in plan.outputs:
        if case.tables[output.table].pooling == "MEAN":
            divisor[:, output.start : output.stop] = lengths[output.feature].clamp(min=1)[:, None]
    arrangement = Arrangement(plan, gradient_scale=0.25)
    places = list(slots_in_memory(plan, batch_size))
    assert len(places) == batch_size * sum(arrangement.widths)

    received = torch.rand(len(places))
    expected = torch.zeros(batch_size, plan.width)
    for value, place in zip(received.tolist(), places, strict=True):
        expected[place] += value
    torch.testing.assert_close(arrangement.output(received, lengths), expected / divisor)

    gradient = torch.rand(batch_size, plan.width)
    kept = gradient.clone()
    scaled = gradient * 0.25 / divisor
    packed = arrangement.gradients(gradient, lengths)
    torch.testing.assert_close(packed, torch.tensor([float(scaled[place]) for place in places]))
    assert torch.equal(gradient, kept)


def test_plan_exchange_outputs_have_the_collections_names_and_columns():
    case = Cuts([Cut(4, 3, ("a", "b")), Cut(5, 2, ("b",), ranks=(1,))], 2)
    plan = case.plan()
    assert [output.name for output in plan.outputs] == case.module().embedding_names()
    assert [(output.start, output.stop) for output in plan.outputs] == [(0, 3), (3, 6), (6, 8)]
    assert (plan.width, plan.max_groups) == (8, 1)


def test_plan_exchange_features_of_tables_with_one_row_map_share_their_streams():
    rows = RowsModulo(6, parts=2)
    plan = Cuts(
        [Cut(6, 2, ("a",), row_map=rows, ranks=(0, 1)), Cut(6, 2, ("a",), row_map=rows, ranks=(1, 0))], 2
    ).plan()
    assert len(plan.streams) == 2
    assert [len(plan.slots_of(rank)) for rank in range(2)] == [2, 2]


def test_plan_exchange_block_without_rows_has_no_slot():
    plan = Cuts([Cut(2, 2, ("a",), row_map=RowsRange(2, parts=3), ranks=(0, 1, 2))], 3).plan()
    assert [len(plan.slots_of(rank)) for rank in range(3)] == [1, 1, 0]


def test_plan_exchange_rank_that_does_not_exist_raises_naming_table_and_rank():
    with pytest.raises(PlanError, match=r"table 't0' \(cut\): .*rank 5 of 2 ranks"):
        Cuts([Cut(4, 3, ("a",), ranks=(5,))], 2).plan()


def test_plan_exchange_kernel_that_refuses_raises_with_its_reason_and_what_to_do():
    case = Cuts([Cut(4, 3, ("a",))], 1)
    sharder = EmbeddingBagCollectionSharder({"optimizer": "adam"})
    with pytest.raises(
        UnsupportedError,
        match=r"table 't0' \(4 x 3 FP32\).*kernel 'loop'.*on cpu: it runs sgd only\. Name another",
    ):
        plan_exchange(sharder.tables(case.module()), case.shardings(), world_size=1, device_type="cpu")
