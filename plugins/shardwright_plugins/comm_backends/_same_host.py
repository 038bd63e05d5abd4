"""All-to-alls between ranks of one host, through memory that they map instead of a connection to oneself.

A connection copies every byte twice in the kernel, by threads that take processor time from the ranks. Where all ranks
of a group are on one host, small pieces are messages (:mod:`_mailboxes`), and of large ones references are
(:mod:`_large_pieces`). Where some are elsewhere, each all-to-all is one of gloo's.

Memory has no name that could outlive the ranks or fill a small ``/dev/shm``: receivers open it by the sender's process
and descriptor. Whether all can is tried once; else all go on by gloo (:mod:`_meeting`).

The order of writes that this relies on (data before what says that it is there, copies before what says that they are
done) is what x86 promises (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 3, section 8.2); other
processors go by gloo.
"""

from __future__ import annotations

import math
import platform
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from attrs import evolve
from torch import Tensor
from torch.profiler import record_function

from shardwright.contracts.comm_backend import EXCHANGE_EVENT
from shardwright.runtime.ranks.group_store import GroupStore
from shardwright_plugins.comm_backends._large_pieces import REFERENCE_BYTES, LargePieces
from shardwright_plugins.comm_backends._mailboxes import Mailboxes, deadline_of
from shardwright_plugins.comm_backends._meeting import NOTHING, OFFER, Meeting
from shardwright_plugins.comm_backends._segments import Segment, Segments, bytes_of, memory_of
from shardwright_plugins.comm_backends.settings import may_share_memory
from shardwright_plugins.comm_backends.torch_communicator import AllToAll, TorchTransport, Transport

LEAST_BYTES = 1 << 18
"""Pieces of so many bytes go by reference, and smaller ones that are too long for a message."""
_FLOAT_BYTES = 4


def is_possible() -> bool:
    """True if this system can share memory, and the user did not turn it off."""
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64") and may_share_memory()


def exchange_over(process_group: Any, store: GroupStore) -> SameHostTransport | None:
    """Make an exchange that shares memory where possible; ``None`` if this rank cannot, which the others are told.

    Args:
        process_group: process group of gloo; every rank of it makes this call.
        store: store of the group.
    """
    meeting = Meeting(process_group, store)
    if is_possible():
        return SameHostTransport(process_group, meeting)
    meeting.tell_all(OFFER, NOTHING, math.inf)
    return None


class SameHostTransport(Transport):
    """All-to-all over one process group; see the module.

    Args:
        process_group: process group of gloo.
        meeting: its ranks.

    Attributes:
        least_bytes: bytes of the smallest piece that goes by reference.
        segments: this rank's memory of large pieces.
        mail: messages of the ranks, once they were asked; ``None`` if they do not share memory.
    """

    least_bytes = LEAST_BYTES

    def __init__(self, process_group: Any, meeting: Meeting) -> None:
        self._group, self._plain, self._meeting = process_group, TorchTransport(process_group), meeting
        self.rank, self.segments = meeting.rank, Segments(meeting.world_size)
        self.mail: Mailboxes | None = None
        self._has_asked = False
        self._started = 0

    def room(self, num_elements: int, device: torch.device) -> Tensor:
        size = num_elements * _FLOAT_BYTES
        if size < LEAST_BYTES or (self._has_asked and self.mail is None):
            return torch.empty(num_elements, dtype=torch.float32, device=device)
        try:
            own = self.segments.free(size)
        except OSError:
            return self._plain.room(num_elements, device)
        whole, own.lent = own.segment.lend()
        return whole[:size].view(torch.float32)

    def start(self, call: AllToAll) -> Any:
        self._started += 1
        mail = self.mail if self._has_asked else self._asked(call.patience)
        if mail is None:
            return self._start_plain(call)
        # Recording an event takes microseconds.
        if not torch.autograd._profiler_enabled() and not torch._C._len_torch_dispatch_stack():  # type: ignore[attr-defined]
            return _ByMail(self, mail, call, self._started)
        with record_function(EXCHANGE_EVENT):
            return _ByMail(self, mail, call, self._started)

    def _asked(self, patience: timedelta | None) -> Mailboxes | None:
        """The messages of the ranks; all ask in the same call."""
        if not self._has_asked:
            self._has_asked, self.mail = True, Mailboxes.among(self._meeting, deadline_of(patience))
            if self.mail is not None:
                self.least_bytes = min(LEAST_BYTES, self.mail.most_bytes + 1)
                self.large = LargePieces(self._group, self.segments, self.mail)
        return self.mail

    def _start_plain(self, call: AllToAll) -> Any:
        if call.output is not None:
            return self._plain.start(call)
        received = call.input.new_empty(sum(call.output_splits))
        work = self._plain.start(evolve(call, output=received))
        return _ReceivedPieces(work, received.split(list(call.output_splits)))

    def reads_in_place(self, num_elements: int, patience: timedelta | None) -> bool:
        mail = self._asked(patience)
        return mail is not None and num_elements * _FLOAT_BYTES >= self.least_bytes

    def close(self) -> None:
        if self.mail is not None:
            self.mail.give_up()


class _ReceivedPieces:
    """Pieces that arrive in this rank's own memory."""

    def __init__(self, work: Any, pieces: Sequence[Tensor]) -> None:
        self._work, self._pieces = work, pieces

    def wait(self, *timeout: timedelta) -> Sequence[Tensor]:
        self._work.wait(*timeout)
        return self._pieces

    def release(self) -> None:
        self._pieces = ()


class _ByMail:
    """One exchange under way between ranks that all share memory.

    Args:
        exchange: transport that the exchange belongs to.
        mail: messages of the ranks.
        call: arguments of the all-to-all.
        number: number of this exchange.
    """

    def __init__(self, exchange: SameHostTransport, mail: Mailboxes, call: AllToAll, number: int) -> None:
        self._exchange, self._mail, self._call, self._number = exchange, mail, call, number
        self._rank = rank = exchange.rank
        self._read: list[Segment] = []
        self._is_done = False
        self._least = exchange.least_bytes
        self._size = size = call.input.dtype.itemsize
        self._sent = memory_of(call.input)
        room = None if call.output is None else call.output.nbytes
        if (
            sum(call.input_splits) * size != call.input.nbytes
            or room not in (None, sum(call.output_splits) * size)
            or call.input_splits[rank] != call.output_splits[rank]
        ):
            raise _misfit(call)
        mail.newest = number
        mail.awaited.add(number)
        start = 0
        for peer, count in enumerate(call.input_splits):
            stop = start + count * size
            if peer == rank:
                self._own = start, stop
            elif stop - start >= self._least:
                self._send_reference(peer, start, stop)
            elif start < stop:
                mail.send(peer, number, self._sent[start:stop], call.patience)
            start = stop

    def __del__(self) -> None:
        mail = self._mail
        mail.awaited.discard(self._number)
        if mail.early:
            mail.forget(self._number)

    def _send_reference(self, peer: int, start: int, stop: int) -> None:
        values = bytes_of(self._call.input)[start:stop]
        reference = memoryview(self._exchange.large.leave(peer, values, self._number))
        self._mail.send(peer, self._number, reference, self._call.patience)

    def wait(self, *timeout: timedelta) -> Sequence[Tensor] | None:
        """Wait for it; copy all pieces to where they belong, or return them where they are."""
        if self._is_done:
            return None
        deadline = deadline_of(timeout[0] if timeout else None)
        if self._call.output is None:
            pieces = [
                self._piece(peer, count * self._size, deadline, timeout)
                for peer, count in enumerate(self._call.output_splits)
            ]
            return [piece.view(self._call.input.dtype) for piece in pieces]
        into, start = memory_of(self._call.output), 0
        for peer, count in enumerate(self._call.output_splits):
            size = count * self._size
            target = into[start : start + size]
            if peer == self._rank:
                target[:] = self._sent[slice(*self._own)]
            elif size >= self._least:
                target[:] = memory_of(self._referred(peer, size, deadline, timeout))
            elif size:
                self._mail.receive(peer, self._number, target, deadline)
            start += size
        if self._read:
            self.release()
        self._is_done = True
        del self._call, self._sent  # a step may keep what it waited for
        return None

    def _piece(self, peer: int, size: int, deadline: float, timeout: Sequence[timedelta]) -> Tensor:
        """A rank's bytes, where they are."""
        if peer == self._rank:
            return bytes_of(self._call.input)[slice(*self._own)]
        if size >= self._least:
            return self._referred(peer, size, deadline, timeout)
        piece = torch.empty(size, dtype=torch.uint8)
        if size:
            self._mail.receive(peer, self._number, memory_of(piece), deadline)
        return piece

    def _referred(self, peer: int, size: int, deadline: float, timeout: Sequence[timedelta]) -> Tensor:
        reference = bytearray(REFERENCE_BYTES)
        self._mail.receive(peer, self._number, memoryview(reference), deadline)
        piece, segment = self._exchange.large.find(peer, bytes(reference), size, self._number, timeout)
        if segment is not None:
            self._read.append(segment)
        return piece

    def release(self) -> None:
        """Tell the peers that their pieces are not read any more."""
        for segment in self._read:
            segment.counts[self._rank, 0] += 1
        self._read.clear()


def _misfit(call: AllToAll) -> RuntimeError:
    """The error where splits and tensors do not fit, as gloo raises one."""
    received = "" if call.output is None else f" and {call.output.nbytes}"
    return RuntimeError(
        f"the splits {list(call.input_splits)} and {list(call.output_splits)} do not fit what is sent, received, "
        f"or both: {call.input.nbytes}{received} bytes"
    )
