"""Large pieces between ranks of one host, through memory that both map instead of a connection to oneself.

A connection copies every byte twice in the kernel, by threads that take processor time from the ranks. Here the sender
copies a piece into a *segment* of shared memory, and the receiver copies it out; what travels by gloo, in the same
collective as all smaller pieces, is a *reference*. So each all-to-all is still one of gloo's, which keeps its time-outs
and notices ranks that are gone.

Segments belong to a pair of ranks and a direction. They have no name that could outlive the ranks or fill a small
``/dev/shm``: the receiver opens them by the sender's process and descriptor. Whether it can is tried once per pair,
when the first large piece is on its way; ranks that cannot go on by gloo. The receiver counts what it has copied out in
the segment's first bytes, so that the sender knows when it may be written again.

The order of writes that this relies on (data before the reference, copies before the count) is what x86 promises
(Intel 64 and IA-32 Architectures Software Developer's Manual, volume 3, section 8.2); other processors go by gloo.
"""

from __future__ import annotations

import mmap
import os
import platform
import secrets
import sys
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field, frozen
from torch import Tensor

VARIABLE = "SHARDWRIGHT_SHARED_MEMORY"
LEAST_BYTES = 1 << 18
"""Smaller pieces travel by gloo: there a reference would take about as long."""
MOST_BYTES = 1 << 25
"""So do larger ones, which would take as much memory again."""
_MOST_SEGMENTS = 8  # of a pair and direction; a step has at most four large exchanges of a module under way
_COUNT_BYTES = 64  # a cache line
_REFERENCE = (
    4  # int64: descriptor, serial number and bytes of the segment, and the oldest serial number still in use
)
_REFERENCE_BYTES = 8 * _REFERENCE
_BY_GLOO = -1  # for a descriptor: there was no memory, and the piece is sent by itself
_TAG = 0x5EED
_SPARE = 1.25  # room for pieces that grow a little from step to step
_STEP_BYTES = 1 << 18


def is_possible() -> bool:
    """Whether this system can, and the user did not turn it off."""
    return (
        sys.platform == "linux"
        and platform.machine() in ("x86_64", "AMD64")
        and os.environ.get(VARIABLE, "on").lower() not in ("0", "off", "false", "no")
    )


class SameHostExchange:
    """All-to-all over one process group; see the module.

    Args:
        process_group: of gloo.
        store: of the group.
    """

    def __init__(self, process_group: Any, store: Any) -> None:
        self._group, self._store = process_group, store
        self._rank, self._world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self._pairs: dict[int, _Pair | None] = {}
        self._offer: _Offer | None = None

    def __call__(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        patience: timedelta | None,
    ) -> Any:
        """Start the collective; what is returned has ``wait(timeout)``."""
        leaving = self._by_memory(input_splits, input.element_size(), patience)
        arriving = self._by_memory(output_splits, output.element_size(), patience)
        if not leaving and not arriving:
            return dist.all_to_all_single(
                output, input, list(output_splits), list(input_splits), group=self._group, async_op=True
            )
        exchange = _Exchange(self._group)
        pieces = _pieces(input, input_splits)
        for peer, pair in leaving.items():
            pieces[peer] = exchange.leave(peer, pair, pieces[peer])
        exchange.start(pieces, _pieces(output, output_splits), arriving)
        return exchange

    def _by_memory(
        self, splits: Sequence[int], element_size: int, patience: timedelta | None
    ) -> dict[int, _Pair]:
        """The peers whose pieces go by memory; both ranks of a pair say the same."""
        found = {}
        for peer, count in enumerate(splits):
            if peer != self._rank and LEAST_BYTES <= count * element_size <= MOST_BYTES:
                pair = self._pair(peer, patience)
                if pair is not None:
                    found[peer] = pair
        return found

    def _pair(self, peer: int, patience: timedelta | None) -> _Pair | None:
        """What is shared with a peer; asked for on both sides when the first large piece goes either way."""
        if peer not in self._pairs:
            self._pairs[peer] = self._meet(peer, patience)
        return self._pairs[peer]

    def _meet(self, peer: int, patience: timedelta | None) -> _Pair | None:
        """Try on both sides whether one reads what the other wrote."""
        if self._offer is None:
            self._offer = _Offer.make()
            self._store.set(_key(self._rank), self._offer.text)
        theirs = self._read(_key(peer), patience)
        can_read = _can_read(theirs)
        self._store.set(_key(self._rank, peer), str(int(can_read)))
        is_read = self._read(_key(peer, self._rank), patience) == "1"
        return _Pair(int(theirs.split()[0])) if can_read and is_read else None

    def _read(self, key: str, patience: timedelta | None) -> str:
        if patience is not None:
            self._store.wait([key], patience)
        text: str = self._store.get(key).decode()
        return text


def _key(*ranks: int) -> str:
    return "/".join(["shardwright/memory", *map(str, ranks)])


def _pieces(tensor: Tensor, splits: Sequence[int]) -> list[Tensor]:
    """The bytes to (or from) each rank."""
    size = tensor.element_size()
    flat = tensor.view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    return list(flat.split([count * size for count in splits]))


@frozen(eq=False)
class _Offer:
    """Something for peers to try to read: a random word in shared memory."""

    text: str
    segment: _Segment | None

    @classmethod
    def make(cls) -> _Offer:
        word = secrets.token_bytes(16)
        try:
            segment = _Segment.create(len(word), serial=0)
        except OSError:
            return cls(f"{os.getpid()} {_BY_GLOO} -", None)
        segment.data.copy_(torch.frombuffer(bytearray(word), dtype=torch.uint8))
        return cls(f"{os.getpid()} {segment.descriptor} {word.hex()}", segment)


def _can_read(text: str) -> bool:
    """Whether another rank's word stands where it says."""
    process, descriptor, word = text.split()
    try:
        segment = _Segment.open(int(process), int(descriptor), serial=0, size=len(word) // 2)
    except (OSError, ValueError):  # another machine, another container, another user
        return False
    return bytes(segment.data.tolist()).hex() == word


@frozen(eq=False)
class _Segment:
    """Shared memory with room for one piece.

    Args:
        descriptor: the sender's.
        serial: the sender's number of it.
        count: ``[1]`` int64 at its beginning: the pieces that were copied out.
        data: the room.
    """

    descriptor: int
    serial: int
    count: Tensor
    data: Tensor

    @classmethod
    def create(cls, size: int, serial: int) -> _Segment:
        """A new one; its descriptor is closed with it.

        Raises:
            OSError: there is no memory for it.
        """
        descriptor = os.memfd_create("shardwright")
        try:
            os.posix_fallocate(descriptor, 0, _COUNT_BYTES + size)
            segment = cls._map(descriptor, descriptor, serial, size)
        except OSError:
            os.close(descriptor)
            raise
        weakref.finalize(segment, os.close, descriptor)
        return segment

    @classmethod
    def open(cls, process: int, descriptor: int, serial: int, size: int) -> _Segment:
        """Another process's.

        Raises:
            OSError: it cannot be opened.
            ValueError: it is smaller.
        """
        opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls._map(opened, descriptor, serial, size)
        finally:
            os.close(opened)  # the memory stays mapped

    @classmethod
    def _map(cls, opened: int, descriptor: int, serial: int, size: int) -> _Segment:
        """The memory is unmapped when the last tensor in it is gone."""
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
        memory = torch.frombuffer(mmap.mmap(opened, _COUNT_BYTES + size, flags), dtype=torch.uint8)
        return cls(descriptor, serial, memory[:8].view(torch.int64), memory[_COUNT_BYTES:])


@define(eq=False)
class _Outgoing:
    """A segment, and how many pieces were written into it."""

    segment: _Segment
    written: int = 0

    @property
    def is_free(self) -> bool:
        """Whether the peer has copied out all of them."""
        return int(self.segment.count) == self.written


@define(eq=False)
class _Pair:
    """The segments between this rank and a peer of the same host, one list for each direction.

    Args:
        process: the peer's.
    """

    process: int
    _outgoing: list[_Outgoing] = field(factory=list)
    _incoming: dict[int, _Segment] = field(factory=dict)
    _last_serial: int = 0

    def write(self, piece: Tensor) -> Tensor:
        """Put a piece into a free segment; returns the reference.

        Raises:
            OSError: there is no memory for it.
        """
        free = [own for own in self._outgoing if own.is_free]
        chosen = next((own for own in free if own.segment.data.numel() >= piece.numel()), None)
        if chosen is None:
            chosen = self._grow(free, piece.numel())
        segment = chosen.segment
        segment.data[: piece.numel()].copy_(piece)
        chosen.written += 1
        return _reference(segment.descriptor, segment.serial, segment.data.numel(), self._oldest_serial)

    @property
    def _oldest_serial(self) -> int:
        return min(own.segment.serial for own in self._outgoing)

    def _grow(self, free: Sequence[_Outgoing], size: int) -> _Outgoing:
        """A new segment in place of the free ones, which are too small."""
        self._outgoing = [own for own in self._outgoing if own not in free]
        if len(self._outgoing) >= _MOST_SEGMENTS:
            raise OSError(f"{_MOST_SEGMENTS} pieces are waiting to be read")
        self._last_serial += 1
        whole = -(-int(size * _SPARE) // _STEP_BYTES) * _STEP_BYTES
        grown = _Outgoing(_Segment.create(whole, self._last_serial))
        self._outgoing.append(grown)
        return grown

    def read(self, reference: Tensor, target: Tensor) -> None:
        """Copy out the piece that a reference stands for.

        Raises:
            RuntimeError: the peer is gone.
        """
        descriptor, serial, size, oldest = reference.tolist()
        if serial not in self._incoming:
            try:
                self._incoming[serial] = _Segment.open(self.process, descriptor, serial, size)
            except (OSError, ValueError) as error:
                raise RuntimeError(f"the memory of process {self.process} is gone: {error}") from error
        segment = self._incoming[serial]
        target.copy_(segment.data[: target.numel()])
        segment.count.add_(1)
        self._incoming = {known: own for known, own in self._incoming.items() if known >= oldest}


def _reference(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64).view(torch.uint8)


def _under_way(work: Any) -> Any:
    """What ``torch.distributed`` returns for messages of ranks that are in the group."""
    assert work is not None
    return work


class _Exchange:
    """One collective under way.

    Args:
        group: the process group.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._alone: list[Any] = []  # pieces for which there was no memory

    def leave(self, peer: int, pair: _Pair, piece: Tensor) -> Tensor:
        """Write a piece for a peer; returns its reference."""
        try:
            return pair.write(piece)
        except OSError:
            self._alone.append(_under_way(dist.isend(piece, group=self._group, group_dst=peer, tag=_TAG)))
            return _reference(*[_BY_GLOO] * _REFERENCE)

    def start(
        self, pieces: Sequence[Tensor], targets: Sequence[Tensor], arriving: Mapping[int, _Pair]
    ) -> None:
        """Start the collective of references and small pieces."""
        self._targets, self._arriving = targets, arriving
        sizes = [_REFERENCE_BYTES if peer in arriving else own.numel() for peer, own in enumerate(targets)]
        told = torch.empty(sum(sizes), dtype=torch.uint8)
        self._told, self._sent = told.split(sizes), torch.cat(list(pieces))
        leaving = [piece.numel() for piece in pieces]
        self._work = dist.all_to_all_single(
            told, self._sent, sizes, leaving, group=self._group, async_op=True
        )

    def wait(self, *timeout: timedelta) -> None:
        """Wait for it, and copy all pieces to where they belong."""
        self._work.wait(*timeout)
        for peer, (told, target) in enumerate(zip(self._told, self._targets, strict=True)):
            pair = self._arriving.get(peer)
            if pair is None:
                target.copy_(told)
            elif (reference := told.view(torch.int64))[0] == _BY_GLOO:
                _under_way(dist.irecv(target, group=self._group, group_src=peer, tag=_TAG)).wait(*timeout)
            else:
                pair.read(reference, target)
        for work in self._alone:
            work.wait(*timeout)
