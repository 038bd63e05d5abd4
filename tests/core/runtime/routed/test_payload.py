"""Headers and messages of ids: what the ranks pack for a rank is what it unpacks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from tests.core.runtime.buckets import EXAMPLES, assert_bags, slot_bags
from tests.core.runtime.plans import Cut, Cuts, cuts, host_with_loops

from shardwright.host import use_host
from shardwright.planning.layouts.layout import Exchange
from shardwright.runtime.routed.payload import PayloadFormat
from shardwright.runtime.routed.routing import routers_of
from shardwright.runtime.step.executor import PeerHeaders
from shardwright_plugins.dataflows import Hierarchical


def format_of(case, plan):
    return PayloadFormat(
        routers_of(plan), plan.groups, rank=plan.rank, columns=case.columns, is_pooled=case.is_pooled
    )


@pytest.mark.parametrize("dataflow", [Exchange(), Hierarchical()], ids=lambda flow: flow.name)
@EXAMPLES
@given(cuts(is_pooled=None), st.lists(st.integers(0, 3), min_size=3, max_size=3), st.booleans())
def test_payload_what_the_ranks_pack_for_a_rank_is_what_it_unpacks(dataflow, case, batch_sizes, has_columns):
    last = evolve(case.tables[-1], dataflow=dataflow)
    case = evolve(case, tables=[*case.tables[:-1], last], has_columns=has_columns)
    ranks = range(case.world_size)
    with use_host(host_with_loops()):
        plans = [case.plan(rank) for rank in ranks]
    batches = [case.batch(batch_sizes[rank], seed=rank) for rank in ranks]
    formats = [format_of(case, plan) for plan in plans]
    routed = [
        [router.route(case.read(batch)) for router in routers_of(plan)]
        for plan, batch in zip(plans, batches, strict=True)
    ]
    packed = [fmt.pack(own) for fmt, own in zip(formats, routed, strict=True)]
    sent = [payload.split(splits) for payload, splits in packed]
    headers = [fmt.headers(own) for fmt, own in zip(formats, routed, strict=True)]
    sizes = np.array([batch_sizes[rank] for rank in ranks])
    for rank, (plan, fmt) in enumerate(zip(plans, formats, strict=True)):
        peers = PeerHeaders(sizes, np.stack([own[rank] for own in headers]))
        assert peers.fields.shape == (case.world_size, fmt.header_size)
        pieces = [by_peer[rank] for by_peer in sent]
        incoming = fmt.incoming(peers)
        assert incoming.splits == [piece.numel() for piece in pieces]
        groups = fmt.unpack(torch.cat(pieces), incoming)
        assert len(groups) == len(plan.groups)
        for group, bags in zip(plan.groups, groups, strict=True):
            own = [slot + int(plan.slots.first[rank]) for slot in group.slots]
            by_slot = [[slot_bags(case, plan, slot, batch) for slot in own] for batch in batches]
            expected = [bag for source in by_slot for slot in source for _, bag in slot]
            weights = {} if bags.weights is None else {"weights": bags.weights}
            columns = {**weights, **bags.columns}
            assert columns.keys() == case.columns.keys()
            assert_bags(bags.lengths, bags.ids, columns, expected)
            assert (bags.lengths is None) != case.is_pooled
            assert bags.counts == tuple(tuple(len(slot) for slot in source) for source in by_slot)
            assert bags.is_ragged == group.kind.is_ragged
            assert bags.num_slots == len(group.slots)
            assert bags.num_bags == sum(bags.flat_counts)


def test_headers_say_how_many_ids_and_bags_each_slot_gets():
    case = Cuts([Cut(4, 2, ("a",), ranks=(0,)), Cut(4, 2, ("b", "a"), ranks=(1,))], 2)
    plan = case.plan(1)
    batch = case.batch(5)
    a, b = (batch[feature].values().numel() for feature in "ab")
    (router,) = routers_of(plan)
    headers = format_of(case, plan).headers([router.route(case.read(batch))])
    assert (headers & 0xFFFFFFFF).tolist() == [[a, 0], [b, a]]
    assert (headers >> 32).tolist() == [[5, 0], [5, 5]]
