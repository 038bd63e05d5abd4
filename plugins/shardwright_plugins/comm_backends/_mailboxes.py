"""Small pieces between ranks that are all on one host: messages in memory that all have mapped.

Each rank writes into a *ring* for each other, message after message, and how many bytes it has written; the receiver
copies a message out, and says how many it has read. So a message costs two copies and no call of the system, where a
connection takes the ranks' processor time for its threads, and some ten times as long (see the page on performance).

A rank that waits looks again and again for a tenth of a millisecond, lending its processor to others each time, then
sleeps between looks, ever longer. While it sleeps it also looks whether the other rank's process lives and whether that
rank gave up an exchange, so that a failure is known to all at once; and it waits no longer than it is told.

The order of writes that this relies on (data before the count of what is written, copies before the count of what is
read) is what x86 promises (see :mod:`_same_host`).
"""

from __future__ import annotations

import math
import mmap
import os
import secrets
import struct
import time
import weakref
from collections.abc import Callable
from datetime import timedelta

from attrs import define

from shardwright.runtime.ranks.group_store import has_ended, this_host
from shardwright_plugins.comm_backends._meeting import NOTHING, OFFER, Meeting, Peer
from shardwright_plugins.comm_backends._segments import LINE_BYTES, Segment, memory_of

RING_BYTES = 1 << 20
"""Most bytes of the ring for each pair of ranks and direction."""
ALL_RINGS_BYTES = 1 << 24
"""Most bytes of all rings of one rank: among many ranks each ring is smaller."""
MESSAGES = 8
"""Number of largest messages that a ring holds: several are under way at once; senders wait for a full ring."""
_HEADER = struct.Struct("2q")  # the number of the exchange, and the bytes that follow
_HEADER_BYTES = _HEADER.size
_GAVE_UP, _LEFT = 1, 2  # a rank's state: an exchange failed there; it let go of its mailboxes
_WORD = 2  # the column with a random word, by which the segment is known
_UNIT = 16  # messages begin at multiples, so that no header is cut in two
_MOST_PADDED = _HEADER_BYTES + _UNIT - 1  # with it, bytes are rounded up to whole units
_SPIN_S = 100e-6
_ALIVE_S = 5e-3  # a longer wait looks whether the other process lives, which takes tens of microseconds
_SHORTEST_NAP_S, _LONGEST_NAP_S, _LONGER = 20e-6, 1e-3, 1.2


def deadline_of(patience: timedelta | None) -> float:
    """Until when to wait from now on, on the monotonic clock."""
    return math.inf if patience is None else time.monotonic() + patience.total_seconds()


def ring_bytes(world_size: int) -> int:
    """Bytes of each ring among so many ranks, in whole pages."""
    return max(1, min(RING_BYTES, ALL_RINGS_BYTES // world_size) // mmap.PAGESIZE) * mmap.PAGESIZE


class Ring:
    """One side's view of the messages from one rank to another.

    Args:
        room: the bytes of a line, which counts what is written, and those of the messages.
        read: one integer, which counts what is read.
    """

    def __init__(self, room: memoryview, read: memoryview) -> None:
        self._written, self._read = room[:8].cast("q"), read
        self._room, self._size = room[LINE_BYTES:], len(room) - LINE_BYTES
        self._place = 0  # where this side goes on

    def put(self, exchange: int, message: memoryview) -> bool:
        """Write a message; false, and nothing is written, where there is no room."""
        size = len(message)
        whole = (_MOST_PADDED + size) // _UNIT * _UNIT
        if self._place + whole - self._read[0] > self._size:
            return False
        start = self._place % self._size
        _HEADER.pack_into(self._room, start, exchange, size)
        start += _HEADER_BYTES
        stop = start + size
        if stop <= self._size:
            self._room[start:stop] = message
        else:
            at_end = self._size - start
            self._room[start:], self._room[: size - at_end] = message[:at_end], message[at_end:]
        self._place += whole
        self._written[0] = self._place  # last, as it says that all is there
        return True

    @property
    def has_message(self) -> bool:
        """True if there is a message that the receiver has not taken."""
        return self._written[0] != self._place

    @property
    def header(self) -> tuple[int, int]:
        """The next message's exchange and size."""
        exchange, size = _HEADER.unpack_from(self._room, self._place % self._size)
        return exchange, size

    def skip(self) -> None:
        """Leave the next message unread."""
        self._place += (_MOST_PADDED + self.header[1]) // _UNIT * _UNIT
        self._read[0] = self._place

    def take(self, exchange: int, target: memoryview) -> bool:
        """Copy the next message into ``target``; false if it is not there, of another exchange or of another size."""
        place, size = self._place, len(target)
        start = place % self._size
        if self._written[0] == place or _HEADER.unpack_from(self._room, start) != (exchange, size):
            return False
        start += _HEADER_BYTES
        stop = start + size
        if stop <= self._size:
            target[:] = self._room[start:stop]
        else:
            at_end = self._size - start
            target[:at_end], target[at_end:] = self._room[start:], self._room[: size - at_end]
        self._read[0] = self._place = place + (_MOST_PADDED + size) // _UNIT * _UNIT
        return True


@define(eq=False)
class _Other:
    """Another rank.

    Args:
        process: number of its process.
        sending: ring of messages to it.
        coming: ring of messages from it.
        state: one integer, of :data:`_GAVE_UP` and the like.
    """

    process: int
    sending: Ring
    coming: Ring
    state: memoryview


class Mailboxes:
    """The messages between this rank and all others; see the module.

    Args:
        rank: this rank.
        own: this rank's segment, with a ring for each other rank.
        peers: the other ranks, with their segments.

    Attributes:
        most_bytes: longest message, bytes.
        newest: number of the newest exchange that was begun; numbers rise.
        awaited: numbers of the exchanges that were begun, and may be waited for: what else comes is not kept.
        early: messages that came while another was waited for, by source and exchange.
    """

    def __init__(self, rank: int, own: Segment, peers: dict[int, Peer]) -> None:
        self.own, self.peers = own, peers
        self._state = _count(own, rank)
        ring = ring_bytes(len(peers) + 1)
        self.most_bytes = ring // MESSAGES
        self._others = {
            other: _Other(
                process=peer.process,
                sending=Ring(_room(own, other, ring), _count(own, other)),
                coming=Ring(_room(peer.rings, rank, ring), _count(peer.rings, rank)),
                state=_count(peer.rings, other),
            )
            for other, peer in peers.items()
        }
        self.early: dict[tuple[int, int], bytes] = {}
        self.newest, self.awaited = 0, set[int]()
        weakref.finalize(self, _leave, self._state, os.getpid())

    @classmethod
    def among(cls, meeting: Meeting, deadline: float) -> Mailboxes | None:
        """Those of all ranks, or ``None`` on all; every rank makes this call, and waits until the deadline at most."""
        own = _make(meeting.world_size)
        offer = (
            NOTHING if own is None else f"{this_host()} {os.getpid()} {own.descriptor} {own.counts[0, _WORD]}"
        )
        peers = _map(meeting, meeting.tell_all(OFFER, offer, deadline))
        agreed = meeting.tell_all("mapped", NOTHING if peers is None else "mapped", deadline)
        return None if own is None or peers is None or NOTHING in agreed else cls(meeting.rank, own, peers)

    def give_up(self) -> None:
        """Let ranks that wait for this one know that it sends nothing more."""
        self._state[0] = _GAVE_UP

    def forget(self, exchange: int) -> None:
        """Drop what came early of an exchange that will not be waited for any more."""
        for source in self._others:
            self.early.pop((source, exchange), None)

    def send(self, to: int, exchange: int, message: memoryview, patience: timedelta | None) -> None:
        """Put a message where a rank reads it; waits only where there is no room.

        Raises:
            RuntimeError: the rank is gone or gave up, or time is up.
        """
        other = self._others[to]
        ring = other.sending
        if self._state[0] or other.state[0] == _GAVE_UP:
            where = f" on rank {to}" if other.state[0] else ""
            raise RuntimeError(f"an exchange before this one failed{where}")
        if not ring.put(exchange, message):
            self._wait(to, lambda: self._puts(ring, exchange, message), deadline_of(patience))

    def _puts(self, ring: Ring, exchange: int, message: memoryview) -> bool:
        """Write a message after taking the others': they might wait for this rank to do so."""
        for other, own in self._others.items():
            while own.coming.has_message:
                self._set_aside(other, own.coming)
        return ring.put(exchange, message)

    def _set_aside(self, source: int, ring: Ring) -> None:
        exchange, size = ring.header
        if exchange <= self.newest and exchange not in self.awaited:
            ring.skip()
            return
        early = bytearray(size)
        ring.take(exchange, memoryview(early))
        self.early[source, exchange] = bytes(early)

    def receive(self, source: int, exchange: int, target: memoryview, deadline: float) -> None:
        """Wait for a message and copy it into ``target``.

        Raises:
            RuntimeError: the rank is gone, gave up, or sent something else; or time is up.
        """
        early = self.early.pop((source, exchange), None) if self.early else None
        if early is not None:
            _check(source, len(early), len(target))
            target[:] = early
            return
        ring = self._others[source].coming
        while not ring.take(exchange, target):
            if not ring.has_message:
                self._wait(source, lambda: ring.has_message, deadline)
            sent, size = ring.header
            if sent < exchange:
                self._set_aside(source, ring)
            else:
                _check(source, size if sent == exchange else 0, len(target))

    def _wait(self, other: int, is_ready: Callable[[], bool], deadline: float) -> None:
        """Return when it is ready, within time; ``is_ready`` is not asked again once it said so."""
        started = time.monotonic()
        while time.monotonic() - started < _SPIN_S:
            if is_ready():
                return
            os.sched_yield()
        nap = _SHORTEST_NAP_S
        while not is_ready():
            reason = self._reason_to_end(other, started, deadline)
            if reason:
                if is_ready():  # it may have been sent meanwhile
                    return
                self.give_up()
                raise RuntimeError(reason)
            time.sleep(nap)
            nap = min(nap * _LONGER, _LONGEST_NAP_S)

    def _reason_to_end(self, other: int, started: float, deadline: float) -> str:
        """The reason to stop waiting: the rank gave up or ended, or time is up; empty if there is none."""
        if self._others[other].state[0]:
            return f"rank {other} gave up an exchange, or left"
        now = time.monotonic()
        if now > started + _ALIVE_S and has_ended(self._others[other].process):
            return f"the process of rank {other} has ended"
        if now > deadline:
            return f"nothing came from rank {other} in {now - started:.1f} s"
        return ""


def _check(source: int, came: int, wanted: int) -> None:
    if came != wanted:
        raise RuntimeError(
            f"rank {source} sent {came} bytes where {wanted} were expected: it makes another call"
        )


def _make(world_size: int) -> Segment | None:
    """A segment with a ring for each rank, if there is memory."""
    try:
        segment = Segment.create(_size(world_size), serial=0, num_peers=world_size)
    except OSError:
        return None
    segment.counts[0, _WORD] = secrets.randbits(63)
    return segment


def _map(meeting: Meeting, offers: list[str]) -> dict[int, Peer] | None:
    """The other ranks with their segments, if all are on one host and can be mapped."""
    if NOTHING in offers:
        return None
    told = [offer.rsplit(maxsplit=3) for offer in offers]
    if len({host for host, *_ in told}) > 1:
        return None
    rank, world_size, peers = meeting.rank, meeting.world_size, dict[int, Peer]()
    for other, (_, process, descriptor, word) in enumerate(told):
        if other != rank:
            try:
                rings = Segment.open(
                    int(process), int(descriptor), _size(world_size), serial=0, num_peers=world_size
                )
            except (OSError, ValueError):  # of another user
                return None
            if rings.counts[0, _WORD] != int(word):  # another process's: two hosts look alike
                return None
            peers[other] = Peer(int(process), rank, world_size, rings)
    return peers


def _size(world_size: int) -> int:
    """Bytes of a rank's segment."""
    return world_size * (LINE_BYTES + ring_bytes(world_size))


def _room(segment: Segment, receiver: int, ring: int) -> memoryview:
    """The ring for a rank, in its sender's segment."""
    size = LINE_BYTES + ring
    return memory_of(segment.data)[receiver * size : (receiver + 1) * size]


def _count(segment: Segment, rank: int) -> memoryview:
    """One integer, which a rank writes: in another's segment what it has read, in its own whether it gave up."""
    start = rank * LINE_BYTES
    return segment.counts.data.cast("B")[start : start + 8].cast("q")


def _leave(state: memoryview, process: int) -> None:
    """Say that nothing comes any more; not from a process that was forked from the rank's."""
    if os.getpid() == process and not state[0]:
        state[0] = _LEFT
