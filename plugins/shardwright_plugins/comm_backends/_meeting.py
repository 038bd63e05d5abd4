"""Discovery of ranks that share memory: each pair of a process group tries it once, and then all may agree.

A rank writes a random word into anonymous memory, and its process and descriptor into the group's store. A rank that
can read the word there can map any memory of that process. Ranks on other machines, in other containers or of other
users cannot.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field, frozen

from shardwright.runtime.ranks.group_store import GroupStore
from shardwright_plugins.comm_backends._segments import Segment

NOTHING = "none"
"""Answer of a rank that has nothing to offer."""


@define(eq=False)
class Peer:
    """A rank of the same host, whose segments this rank maps.

    Args:
        process: the peer's.
        rank: this rank's.
        world_size: ranks of the group.
        offer: the peer's memory that was read first.
    """

    process: int
    rank: int
    world_size: int
    offer: Segment
    _mapped: dict[int, Segment] = field(factory=dict)

    def segment(self, descriptor: int, serial: int, oldest: int, size: int) -> Segment:
        """One of the peer's segments.

        Args:
            descriptor: the peer's.
            serial: the peer's number of it.
            oldest: the lowest number that the peer still uses.
            size: bytes of its room.

        Raises:
            RuntimeError: the peer is gone.
        """
        segment = self._mapped.get(serial)
        if segment is None:
            self._mapped = {known: own for known, own in self._mapped.items() if known >= oldest}
            segment = self._mapped[serial] = self.open(descriptor, size, serial)
        return segment

    def open(self, descriptor: int, size: int, serial: int) -> Segment:
        """Map one of the peer's segments.

        Raises:
            RuntimeError: the peer is gone.
        """
        try:
            return Segment.open(self.process, descriptor, size, serial=serial, num_peers=self.world_size)
        except (OSError, ValueError) as error:
            raise RuntimeError(f"the memory of process {self.process} is gone: {error}") from error


class Meeting:
    """This rank among those of a process group.

    Args:
        process_group: every rank of it makes one of these, or calls :func:`stay_away`.
        store: store of the group.

    Attributes:
        peers: peers that were asked, by rank; ``None`` for one that shares no memory.
        offer: this rank's memory that peers read first, once any was asked; ``None`` if there was none.
    """

    def __init__(self, process_group: Any, store: GroupStore) -> None:
        self.rank, self.world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self._store, self._number = store, _number(store, self.rank)
        self.peers: dict[int, Peer | None] = {}
        self.offer: Segment | None = None
        self._has_offered = False

    @property
    def is_alone(self) -> bool:
        """True if peers were asked, and none shares memory."""
        return bool(self.peers) and not any(self.peers.values())

    @property
    def shares_with_all(self) -> bool:
        """True if all others were asked, and share memory."""
        return len(self.peers) == self.world_size - 1 and all(self.peers.values())

    def meet(self, peers: Sequence[int], deadline: float) -> None:
        """Ask peers, in rising order; each of them asks back in the same call. Those that are known are left out.

        Args:
            peers: ranks of the peers.
            deadline: latest end for all of them together, on the monotonic clock, s.

        Raises:
            RuntimeError: a peer or the store did not answer in time.
        """
        for peer in peers:
            if peer not in self.peers:
                self.peers[peer] = self._meet(peer, deadline)

    def _meet(self, peer: int, deadline: float) -> Peer | None:
        """Try on both sides whether one reads what the other wrote."""
        if not self._has_offered:
            self._has_offered = True
            self.offer, text = _offer(self.world_size)
            self._store.set(_key(self._number, self.rank), text, deadline)
        (theirs,) = self._store.read([_key(self._number, peer)], deadline)
        segment = _read_offer(theirs, self.world_size)
        self._store.set(_key(self._number, self.rank, peer), str(int(segment is not None)), deadline)
        # A peer that offers nothing does not look whether it could read here.
        if segment is None or self._store.read([_key(self._number, peer, self.rank)], deadline) != ["1"]:
            return None
        return Peer(int(theirs.split()[0]), self.rank, self.world_size, segment)

    def tell_all(self, what: str, mine: str, deadline: float) -> list[str]:
        """Exchange a text with all ranks; a rank that says :data:`NOTHING` does not wait for the others.

        Returns:
            The text of each rank; this rank's alone if it is :data:`NOTHING`.

        Raises:
            RuntimeError: a rank or the store did not answer in time.
        """
        self._store.set(_key(self._number, what, self.rank), mine, deadline)
        if mine == NOTHING:
            return [mine]
        keys = [_key(self._number, what, rank) for rank in range(self.world_size)]
        return self._store.read(keys, deadline)


def stay_away(process_group: Any, store: GroupStore) -> None:
    """Tell the other ranks that this one shares no memory, so that they need not wait for it."""
    rank = dist.get_rank(process_group)
    number = _number(store, rank)
    for key in (_key(number, rank), _key(number, "host", rank)):
        store.set(key, NOTHING, math.inf)


def _number(store: GroupStore, rank: int) -> int:
    """Count this rank's connections to the group, by which keys of earlier ones are told from these."""
    return store.add(f"shardwright/memory/connected/{rank}", 1, math.inf)


def _key(number: int, *what: int | str) -> str:
    return "/".join(["shardwright/memory", *map(str, (number, *what))])


@frozen
class _Word:
    """A word and the process and descriptor where it is to be read."""

    process: int
    descriptor: int
    letters: str

    @classmethod
    def of(cls, text: str) -> _Word:
        process, descriptor, letters = text.split()
        return cls(int(process), int(descriptor), letters)


def _offer(num_peers: int) -> tuple[Segment | None, str]:
    """A random word in memory of this rank's, and what peers are told of it."""
    word = secrets.token_bytes(16)
    try:
        segment = Segment.create(len(word), serial=0, num_peers=num_peers)
    except OSError:
        return None, NOTHING
    segment.data.copy_(torch.frombuffer(bytearray(word), dtype=torch.uint8))
    return segment, f"{os.getpid()} {segment.descriptor} {word.hex()}"


def _read_offer(text: str, num_peers: int) -> Segment | None:
    """Another rank's memory, if its word stands where it says."""
    if text == NOTHING:
        return None
    word = _Word.of(text)
    try:
        segment = Segment.open(
            word.process, word.descriptor, len(word.letters) // 2, serial=0, num_peers=num_peers
        )
    except (OSError, ValueError):  # another machine, another container, another user
        return None
    return segment if bytes(segment.data.tolist()).hex() == word.letters else None
