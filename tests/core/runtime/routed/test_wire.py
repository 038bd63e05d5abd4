"""Segments of messages through codecs and back: the values, their order, and the bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.runtime.exact_codecs import Doubles, Mirrored

from shardwright.runtime.routed.wire import Wire, WireSegment
from shardwright_testing.simulated import run_simulated

DOUBLES, MIRRORED = Doubles(), Mirrored()
CODECS = [None, DOUBLES, MIRRORED]
PARTS = st.lists(st.tuples(st.sampled_from(CODECS), st.integers(1, 5)), min_size=1, max_size=3)


def row_bytes(codec, width):
    return 4 * width if codec is None else codec.row_bytes(width)


def exchanged(parts, rows, world_size, before=0):
    """What each rank got of each part, and the bytes it sent; `rows[part][rank][to]` rows travel.

    Each part that is sent follows `before` other values in its memory.
    """

    def values_of(part, rank, to):
        width, count = parts[part][1], rows[part][rank][to]
        return 1000.0 * part + 100 * rank + 10 * to + torch.arange(count * width) / 64

    def run(env):
        wire = Wire(env.communicator, [WireSegment(*part) for part in parts])
        ranks, numbers = range(world_size), range(len(parts))
        widths = np.array([[width] for _, width in parts])
        leaving = widths * np.array([[rows[part][env.rank][to] for to in ranks] for part in numbers])
        arriving = widths * np.array([[rows[part][other][env.rank] for other in ranks] for part in numbers])
        sent = [
            torch.cat([torch.zeros(before), *(values_of(part, env.rank, to) for to in ranks)])[before:]
            for part in numbers
        ]
        kept = [own.clone() for own in sent]
        received = wire.exchange(sent, leaving, arriving, label="x").wait()
        for part, own in enumerate(received):
            assert torch.equal(own, torch.cat([values_of(part, other, env.rank) for other in ranks]))
        assert all(torch.equal(own, before) for own, before in zip(sent, kept, strict=True))
        return env.communicator.sent_bytes

    return run_simulated(run, world_size)


@settings(max_examples=60, deadline=None)
@given(PARTS, st.integers(1, 3), st.randoms(use_true_random=False))
def test_parts_arrive_as_they_were_sent_with_their_codecs_bytes(parts, world_size, random):
    ranks = range(world_size)
    rows = [[[random.choice([0, 1, 2, 40]) for _ in ranks] for _ in ranks] for _ in parts]
    for rank, sent in enumerate(exchanged(parts, rows, world_size)):
        by_rank = [
            sum(own[rank][to] * row_bytes(*part) for own, part in zip(rows, parts, strict=True))
            for to in ranks
        ]
        assert sent == [("x", by_rank)]


@pytest.mark.parametrize("before", [1, 2])
def test_parts_are_sent_from_anywhere_in_memory(before):
    parts = [(None, 2), (DOUBLES, 1)]
    assert exchanged(parts, [[[4]], [[2]]], 1, before) == [[("x", [4 * 8 + 2 * 8])]]


def test_a_column_of_a_wider_gradient_travels_as_itself():
    column = torch.arange(6.0).view(3, 2)[:, 1:]
    segment = WireSegment(None, 1)
    assert segment.decoded(segment.encoded(column).view(-1)).tolist() == [1.0, 3.0, 5.0]
