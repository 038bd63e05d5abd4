"""Flat buffers through pieces and codecs and back: the values, their order, and the bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.runtime.exact_codecs import Doubles, Mirrored

from shardwright.runtime.wire import Segment, Wire, decode, encode, lay_out
from shardwright.testing.simulated import run_simulated

DOUBLES, MIRRORED = Doubles(), Mirrored()
CODECS = [None, DOUBLES, MIRRORED]


@st.composite
def segments(draw):
    dims = draw(st.lists(st.integers(1, 5), min_size=0, max_size=5))
    batch_major = draw(st.booleans())
    count = st.integers(0, 4)
    counts = [draw(count)] * len(dims) if batch_major else [draw(count) for _ in dims]
    outputs = [draw(st.integers(0, len(CODECS) - 1)) for _ in dims]
    return Segment(outputs, dims, counts, batch_major)


def elements(segment):
    return sum(count * dim for count, dim in zip(segment.counts, segment.dims, strict=True))


def slot_bytes(segment):
    codecs = [CODECS[output] for output in segment.outputs]
    widths = [dim * 4 if c is None else c.row_bytes(dim) for c, dim in zip(codecs, segment.dims, strict=True)]
    return sum(count * width for count, width in zip(segment.counts, widths, strict=True))


@settings(max_examples=500)
@given(st.lists(st.lists(segments(), max_size=3), min_size=1, max_size=3))
def test_buffer_encoded_and_decoded_is_the_same_in_order(peers):
    total = sum(elements(segment) for own in peers for segment in own)
    values = torch.arange(1.0, total + 1)
    pieces = lay_out(peers, CODECS)
    assert sum(piece.rows * piece.columns for own in pieces for piece in own) == total
    encoded = encode(values, pieces)
    assert torch.equal(decode(encoded, pieces, total), values)
    for own, segment_list in zip(pieces, peers, strict=True):
        least = sum(slot_bytes(segment) for segment in segment_list)
        num_slots = sum(len(segment.dims) for segment in segment_list)
        assert least <= sum(piece.num_bytes for piece in own) <= least + 7 * num_slots


@settings(max_examples=200)
@given(st.lists(segments(), max_size=3))
def test_peer_pieces_do_not_depend_on_what_stands_before_it(own):
    """What the sender writes among other peers' pieces, the receiver reads among others."""
    before = [Segment([2, 1], [3, 2], [1, 5], False)]
    alone, after = lay_out([own], CODECS)[0], lay_out([before, own], CODECS)[1]
    shift = elements(before[0])
    found = [(p.codec, p.start - shift, p.rows, p.columns, p.stride) for p in after]
    assert found == [(p.codec, p.start, p.rows, p.columns, p.stride) for p in alone]


@pytest.mark.parametrize("batch_major", [False, True])
@pytest.mark.parametrize("codec", [None, DOUBLES, MIRRORED])
def test_slots_of_one_codec_and_width_are_one_piece(codec, batch_major):
    segment = Segment([0] * 6, [4] * 6, [5] * 6, batch_major)
    (piece,) = lay_out([[segment]], [codec])[0]
    assert piece.rows * piece.columns == 120


def test_slots_side_by_side_of_several_codecs_are_a_piece_a_run_or_slot():
    segment = Segment([0, 0, 1, 2, 2], [2, 3, 4, 5, 5], [7] * 5, True)
    pieces = lay_out([[segment]], [DOUBLES, None, MIRRORED])[0]
    assert [(p.codec, p.start, p.rows, p.columns, p.stride) for p in pieces] == [
        (DOUBLES, 0, 7, 5, 19),
        (None, 5, 7, 4, 19),
        (MIRRORED, 9, 7, 5, 19),
        (MIRRORED, 14, 7, 5, 19),
    ]


@pytest.mark.parametrize("codecs", [[None], [DOUBLES], [MIRRORED]])
def test_wire_brings_each_rank_its_values(codecs):
    def run(env):
        sizes = [2 * rank + env.rank for rank in range(3)]  # rows sent to each
        theirs = [2 * env.rank + rank for rank in range(3)]
        sent = torch.cat([torch.full((rows * 4,), 10.0 * env.rank + i) for i, rows in enumerate(sizes)])
        wire = Wire(env.communicator, codecs)
        splits, send_splits = [rows * 4 for rows in theirs], [rows * 4 for rows in sizes]
        peers = tuple([[Segment([0], [4], [rows], False)] for rows in own] for own in (sizes, theirs))
        received = wire.exchange(sent, splits, send_splits, lambda: peers, label="x").wait()
        expected = torch.cat([torch.full((n,), 10.0 * i + env.rank) for i, n in enumerate(splits)])
        assert torch.equal(received, expected)
        return env.communicator.sent_bytes, env.communicator.labels

    row_bytes = 16 if codecs[0] is None else codecs[0].row_bytes(4)
    for rank, (sent, labels) in enumerate(run_simulated(run, 3)):
        rows = [2 * other + rank for other in range(3)]
        assert sent == [("x", [-(-count * row_bytes // 8) * 8 for count in rows])]
        assert labels == ["x"]


def test_wire_without_codecs_sends_the_buffer_itself_and_asks_for_no_pieces():
    class Recorded:
        def all_to_all(self, output, input, output_splits, input_splits, *, label):
            self.seen = (output, input, output_splits, input_splits, label)
            return self

        def wait(self):
            pass

    def fail():
        raise AssertionError("pieces were asked for")

    recorded, sent = Recorded(), torch.rand(5)
    transfer = Wire(recorded, [None, None]).exchange(sent, [2, 1], [3, 2], fail, label="results")
    output, moved, *rest = recorded.seen
    assert moved is sent
    assert transfer.wait() is output
    assert rest == [[2, 1], [3, 2], "results"]
