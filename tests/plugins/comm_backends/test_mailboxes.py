"""Rings of messages, both sides in one process; between processes see ``tests/distributed/hosts/test_same_host.py``."""

from __future__ import annotations

import math
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright_plugins.comm_backends import _mailboxes
from shardwright_plugins.comm_backends._mailboxes import (
    ALL_RINGS_BYTES,
    MESSAGES,
    RING_BYTES,
    Mailboxes,
    Ring,
    ring_bytes,
)
from shardwright_plugins.comm_backends._segments import LINE_BYTES

SIZE = 256


@settings(max_examples=200, deadline=None)
@given(asked=st.lists(st.one_of(st.none(), st.integers(1, SIZE - 16)), max_size=60))
def test_ring_gives_messages_in_their_order_and_never_overwrites_one(asked: list[int | None]) -> None:
    room, read = memoryview(bytearray(LINE_BYTES + SIZE)), memoryview(bytearray(8)).cast("q")
    sender, receiver = Ring(room, read), Ring(room, read)
    under_way = deque[tuple[int, bytes]]()
    for number, size in enumerate(asked):
        message = bytes((number + place) % 256 for place in range(size or 0))
        if size is not None and sender.put(number, memoryview(message)):
            under_way.append((number, message))
        elif under_way:  # a message is asked for, or there is no room
            exchange, message = under_way.popleft()
            assert receiver.has_message
            assert receiver.header == (exchange, len(message))
            target = bytearray(len(message))
            if exchange % 3:
                assert not receiver.take(exchange + 1, memoryview(target))
                assert not receiver.take(exchange, memoryview(bytearray(len(message) + 1)))
                assert receiver.take(exchange, memoryview(target))
                assert target == message
            else:
                receiver.skip()
        assert receiver.has_message == bool(under_way)


@pytest.mark.parametrize(("world_size", "size"), [(2, RING_BYTES), (16, RING_BYTES), (64, RING_BYTES // 4)])
def test_ring_bytes_of_many_ranks_are_no_more_than_those_of_sixteen(world_size: int, size: int) -> None:
    assert ring_bytes(world_size) == size
    assert world_size * size <= ALL_RINGS_BYTES


def test_ring_bytes_of_very_many_ranks_are_a_page() -> None:
    assert ring_bytes(100_000) // MESSAGES >= 512


def test_message_that_finds_room_while_the_other_rank_ends_is_written_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_mailboxes, "_SPIN_S", 0.0)
    monkeypatch.setattr(Mailboxes, "_reason_to_end", lambda *_: "its process has ended")
    answers = iter([False, True])  # a third question, which would write it again, is an error
    object.__new__(Mailboxes)._wait(1, lambda: next(answers), math.inf)
    assert list(answers) == []
