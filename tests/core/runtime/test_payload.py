"""Headers and payloads: what the ranks pack for a rank is what it unpacks."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.core.runtime.plans import Cut, Cuts, cuts, host_with_loops
from tests.core.runtime.streams import EXAMPLES, assert_bags, stream_bags

from shardwright.plugins import use_host
from shardwright.runtime.part import Peer
from shardwright.runtime.payload import PayloadFormat
from shardwright.runtime.routing import Router


def format_of(case, plan, rank):
    return PayloadFormat(
        plan, rank=rank, is_weighted=case.is_weighted, is_pooled=case.is_pooled, device=torch.device("cpu")
    )


@EXAMPLES
@given(cuts(is_pooled=None), st.lists(st.integers(0, 3), min_size=3, max_size=3))
def test_payload_what_the_ranks_pack_for_a_rank_is_what_it_unpacks(case, batch_sizes):
    with use_host(host_with_loops()):
        plan = case.plan()
    ranks = range(case.world_size)
    batches = [case.batch(batch_sizes[rank], seed=rank) for rank in ranks]
    formats = [format_of(case, plan, rank) for rank in ranks]
    routed = [Router(plan).route(case.read(batch)) for batch in batches]
    packed = [fmt.pack(item) for fmt, item in zip(formats, routed, strict=True)]
    sent = [payload.split(splits) for payload, splits in packed]
    headers = [fmt.headers(item) for fmt, item in zip(formats, routed, strict=True)]
    for rank in ranks:
        peers = [Peer(batch_sizes[source], headers[source][rank]) for source in ranks]
        assert [len(peer.fields) for peer in peers] == [formats[rank].header_size] * case.world_size
        pieces = [by_peer[rank] for by_peer in sent]
        assert formats[rank].receive_splits(peers) == [piece.numel() for piece in pieces]
        groups = formats[rank].unpack(torch.cat(pieces), peers)
        for group, bags in zip(plan.groups[rank], groups, strict=True):
            by_slot = [
                [stream_bags(case, plan.streams[slot.stream], batch) for slot in group.slots]
                for batch in batches
            ]
            assert_bags(
                bags.lengths, bags.ids, bags.weights, [bag for own in by_slot for slot in own for bag in slot]
            )
            assert (bags.lengths is None) != case.is_pooled
            count = len if case.is_pooled else lambda slot: sum(len(bag) for bag in slot)
            assert bags.counts == tuple(tuple(count(slot) for slot in own) for own in by_slot)
            assert bags.num_slots == len(group.slots)
            assert bags.num_bags == sum(bags.flat_counts)


def test_headers_say_how_many_ids_each_slot_gets():
    case = Cuts([Cut(4, 2, ("a",), ranks=(0,)), Cut(4, 2, ("b", "a"), ranks=(1,))], 2)
    fmt = format_of(case, case.plan(), 1)
    batch = case.batch(5)
    a, b = (batch[feature].values().numel() for feature in "ab")
    assert fmt.headers(Router(case.plan()).route(case.read(batch))) == [[a, 0], [b, a]]
