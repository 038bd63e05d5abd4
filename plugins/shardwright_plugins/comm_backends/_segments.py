"""Shared memory that has no name: its owner writes pieces into it, peers map it and copy them out."""

from __future__ import annotations

import mmap
import os
import time
import weakref
from collections.abc import Sequence
from multiprocessing.util import Finalize
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from attrs import define, field, frozen
from torch import Tensor

MOST_PER_PEER = 8
"""Segments of a rank in use at once, for each peer; a step has at most four large exchanges of a module under way."""
LINE_BYTES = 64  # of a cache line: so far apart are the counts of different peers, which write them
_SPARE = 1.25  # room for pieces that grow a little from step to step
_STEP_BYTES = 1 << 18  # bytes: sizes of segments are multiples, so that pieces of like sizes share them


@frozen(eq=False)
class Segment:
    """Shared memory, as its owner or a peer has it mapped.

    Args:
        descriptor: the owner's.
        serial: the owner's number of it.
        counts: int64 ``[peers, 8]``: in a column, the pieces that each peer has copied out. An array, since counting
            by one takes a tensor 30 microseconds.
        data: uint8, the room.
    """

    descriptor: int
    serial: int
    counts: npt.NDArray[np.int64]
    data: Tensor

    @classmethod
    def create(cls, size: int, *, serial: int, num_peers: int) -> Segment:
        """A new one; its descriptor is closed with it.

        Raises:
            OSError: there is no memory for it.
        """
        descriptor = os.memfd_create("shardwright")
        try:
            os.posix_fallocate(descriptor, 0, num_peers * LINE_BYTES + size)
            segment = cls._map(descriptor, descriptor, serial, size, num_peers)
        except OSError:
            os.close(descriptor)
            raise
        weakref.finalize(
            segment, os.close, descriptor
        ).atexit = False  # the process's end closes it, after the drain
        return segment

    @classmethod
    def open(cls, process: int, descriptor: int, size: int, *, serial: int, num_peers: int) -> Segment:
        """Another process's.

        Raises:
            OSError: it cannot be opened.
            ValueError: it is smaller.
        """
        opened = os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        try:
            return cls._map(opened, descriptor, serial, size, num_peers)
        finally:
            os.close(opened)  # the memory stays mapped

    @classmethod
    def _map(cls, opened: int, descriptor: int, serial: int, size: int, num_peers: int) -> Segment:
        """The memory is unmapped when the last tensor in it is gone."""
        begin = num_peers * LINE_BYTES
        mapped = mmap.mmap(opened, begin + size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        with torch.inference_mode(False):  # it may be written in any mode, whichever it is first needed in
            memory = torch.frombuffer(mapped, dtype=torch.uint8)
            counts = memory[:begin].view(torch.int64).view(num_peers, -1).numpy()
            return cls(descriptor, serial, counts, memory[begin:])

    def lend(self) -> tuple[Tensor, weakref.finalize]:
        """The room as a tensor of its own, and what says whether it, and all its views, are gone."""
        array = self.data.numpy().view()  # a new object, which the tensor's storage keeps
        return torch.from_numpy(array), weakref.finalize(array, _nothing)


def bytes_of(tensor: Tensor) -> Tensor:
    """A flat tensor's bytes, shared."""
    return tensor.view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)


# Types whose arrays are cast to bytes as they are, the most frequent: to view a tensor as bytes takes a microsecond.
_CAST = frozenset((torch.float32, torch.int64, torch.uint8))


def memory_of(tensor: Tensor) -> memoryview:
    """View a tensor's bytes as a ``memoryview``, which is sliced and copied faster than tensors are."""
    if not tensor.nbytes:
        return memoryview(bytearray())
    own: Any = tensor if tensor.dtype in _CAST else tensor.view(torch.uint8)
    return memoryview(own.numpy()).cast("B")


def _nothing() -> None:
    """Do nothing when a lent tensor is gone: the finalizer is only asked if it is alive."""


@define(eq=False)
class Own:
    """A segment of this rank, and the pieces in it that each peer was told of.

    Args:
        segment: the segment.
        told: number of pieces that each peer was told of.
        lent: finalizer of the tensor that was made in it, which tells if the tensor is gone.
        kept: object that must not be freed until the peers have read all pieces.
        column: the column of ``counts`` in which they count.
    """

    segment: Segment
    told: list[int]
    lent: weakref.finalize | None = None
    kept: list[Any] = field(factory=list)
    column: int = 0

    @property
    def is_free(self) -> bool:
        """True if no tensor is in it, and the peers have copied out all pieces."""
        return self.is_read and not (self.lent is not None and self.lent.alive)

    @property
    def is_read(self) -> bool:
        """True if the peers have copied out all pieces that they were told of."""
        return self.segment.counts[:, self.column].tolist() == self.told

    def start_of(self, piece: Tensor) -> int | None:
        """First byte of a piece in the segment; ``None`` if it is elsewhere."""
        start = piece.data_ptr() - self.segment.data.data_ptr()
        return start if 0 <= start < self.segment.data.numel() else None


@define(eq=False)
class Segments:
    """This rank's segments.

    Args:
        num_peers: ranks of the group.
    """

    num_peers: int
    _own: list[Own] = field(factory=list)
    _watched: list[Own] = field(factory=list)
    _last_serial: int = 0

    def __attrs_post_init__(self) -> None:
        _drain_at_end()
        for own in (self._own, self._watched):
            _in_use.append(own)
            weakref.finalize(self, _outlive, own).atexit = False

    def free(self, size: int) -> Own:
        """A free segment with so much room.

        Raises:
            OSError: there is no memory for it.
        """
        free = [own for own in self._own if own.is_free]
        fitting = [own for own in free if own.segment.data.numel() >= size]
        return fitting[0] if fitting else self._grow(free, size)

    def _grow(self, free: Sequence[Own], size: int) -> Own:
        """A new one in place of the free ones, which are too small."""
        self._own[:] = [own for own in self._own if own not in free]
        if len(self._own) >= MOST_PER_PEER * self.num_peers:
            raise OSError(f"{len(self._own)} segments of shared memory are in use")
        self._last_serial += 1
        whole = -(-int(size * _SPARE) // _STEP_BYTES) * _STEP_BYTES
        segment = Segment.create(whole, serial=self._last_serial, num_peers=self.num_peers)
        self._own.append(Own(segment, [0] * self.num_peers))
        return self._own[-1]

    def holding(self, piece: Tensor) -> tuple[Own, int] | None:
        """The lent segment in which a piece stands, and where."""
        for own in self._own:
            start = own.start_of(piece)
            if start is not None:
                return own, start
        return None

    def watch(self, own: Own) -> None:
        """Wait at the process's end for another one's readers, too."""
        self._watched.append(own)

    @property
    def oldest_serial(self) -> int:
        """The number of the oldest that is still used."""
        return min(own.segment.serial for own in self._own)


_in_use: list[list[Own]] = []  # of each Segments
_unread: list[Own] = []  # of those that are gone: what their peers had not copied out yet
_drain_call: tuple[int, Finalize] | None = None  # of which process
_LONGEST_DRAIN_S = 3.0
_POLL_S = 0.001


def _outlive(own: list[Own]) -> None:
    """The group is gone; what its peers have not read stays."""
    _in_use[:] = [other for other in _in_use if other is not own]
    _unread[:] = [segment for segment in (*_unread, *own) if not segment.is_read]


def _drain_at_end() -> None:
    """Have this process call :func:`_drain` when it ends; a forked one begins anew.

    ``atexit`` would not do: processes that ``multiprocessing`` forks leave it out.
    """
    global _drain_call
    if _drain_call is None or _drain_call[0] != os.getpid():
        _in_use.clear()  # those of the process that this was forked from
        _unread.clear()
        _drain_call = os.getpid(), Finalize(None, _drain, exitpriority=0)


def _drain() -> None:
    """Let peers that are behind read the last pieces, before this process ends and its descriptors with it."""
    deadline = time.monotonic() + _LONGEST_DRAIN_S
    last = [*_unread, *(segment for own in _in_use for segment in own)]
    while not all(segment.is_read for segment in last) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
