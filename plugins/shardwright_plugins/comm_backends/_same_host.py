"""All-to-alls between ranks of one host, through memory that they map instead of a connection to oneself.

A connection copies every byte twice in the kernel, by threads that take processor time from the ranks. Where all ranks
of a group are on one host, small pieces are messages (:mod:`_mailboxes`), and of large ones references are
(:mod:`_large_pieces`). Where some are elsewhere, each all-to-all is one of gloo's, and references are among what it
carries to ranks of this host.

Memory has no name that could outlive the ranks or fill a small ``/dev/shm``: receivers open it by the sender's process
and descriptor. Whether they can is tried once per pair; ranks that cannot go on by gloo (:mod:`_meeting`).

The order of writes that this relies on (data before what says that it is there, copies before what says that they are
done) is what x86 promises (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 3, section 8.2); other
processors go by gloo.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from attrs import evolve
from torch import Tensor
from torch.profiler import record_function

from shardwright.runtime.ranks.comm import EXCHANGE_EVENT, AllToAll, TorchTransport, Transport
from shardwright.runtime.ranks.group_store import GroupStore
from shardwright.settings import may_share_memory
from shardwright_plugins.comm_backends._large_pieces import REFERENCE_BYTES, LargePieces
from shardwright_plugins.comm_backends._mailboxes import Mailboxes, deadline_of
from shardwright_plugins.comm_backends._meeting import Meeting, stay_away
from shardwright_plugins.comm_backends._segments import Segment, bytes_of, memory_of

LEAST_BYTES = 1 << 18
"""Smaller pieces travel by gloo where it carries: there a reference would take about as long."""
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
    if is_possible():
        return SameHostTransport(process_group, store)
    stay_away(process_group, store)
    return None


class SameHostTransport(Transport):
    """All-to-all over one process group; see the module.

    Args:
        process_group: process group of gloo.
        store: store of the group.

    Attributes:
        least_bytes: bytes of the smallest piece that goes by reference, beside messages.
    """

    least_bytes = LEAST_BYTES

    def __init__(self, process_group: Any, store: GroupStore) -> None:
        self._group, self._plain = process_group, TorchTransport(process_group)
        self.meeting = Meeting(process_group, store)
        self.large = LargePieces(process_group, self.meeting)
        self._mail: Mailboxes | None = None
        self._has_asked = False
        self._started = 0

    def room(self, num_elements: int, device: torch.device) -> Tensor:
        size = num_elements * _FLOAT_BYTES
        if size < LEAST_BYTES or self.meeting.is_alone:
            return torch.empty(num_elements, dtype=torch.float32, device=device)
        try:
            own = self.large.segments.free(size)
        except OSError:
            return self._plain.room(num_elements, device)
        whole, own.lent = own.segment.lend()
        return whole[:size].view(torch.float32)

    def start(self, call: AllToAll) -> Any:
        self._started += 1
        if not self._has_asked:
            self._has_asked, self._mail = True, Mailboxes.among(self.meeting, deadline_of(call.patience))
            if self._mail is not None:
                self.least_bytes = min(LEAST_BYTES, self._mail.most_bytes + 1)
        if self._mail is None:
            return self._start_by_gloo(call)
        # Recording an event takes microseconds.
        if not torch.autograd._profiler_enabled() and not torch._C._len_torch_dispatch_stack():  # type: ignore[attr-defined]
            return _ByMail(self, self._mail, call, self._started)
        with record_function(EXCHANGE_EVENT):
            return _ByMail(self, self._mail, call, self._started)

    def _start_by_gloo(self, call: AllToAll) -> Any:
        size = call.input.element_size()
        if max(*call.output_splits, *call.input_splits) * size < LEAST_BYTES:  # as of every small batch
            return self._start_plain(call)
        large = [self._large(splits, size) for splits in (call.input_splits, call.output_splits)]
        # All that are new, in one order: ranks that meet in a circle would wait for each other.
        self.meeting.meet(sorted({*large[0], *large[1]}), deadline_of(call.patience))
        leaving, arriving = (self._sharing(peers) for peers in large)
        if not leaving and not arriving:
            return self._start_plain(call)
        return _ByGloo(self, self._group, call, self._started, leaving, arriving)

    def _start_plain(self, call: AllToAll) -> Any:
        if call.output is not None:
            return self._plain.start(call)
        received = call.input.new_empty(sum(call.output_splits))
        work = self._plain.start(evolve(call, output=received))
        return _ReceivedPieces(work, received.split(list(call.output_splits)))

    def reads_in_place(self, num_elements: int, patience: timedelta | None) -> bool:
        large = self._large([num_elements] * self.meeting.world_size, _FLOAT_BYTES)
        self.meeting.meet(large, deadline_of(patience))
        return len(self._sharing(large)) == self.meeting.world_size - 1

    def close(self) -> None:
        if self._mail is not None:
            self._mail.give_up()

    def _large(self, splits: Sequence[int], element_size: int) -> list[int]:
        """The peers whose pieces are large enough."""
        return [
            peer
            for peer, count in enumerate(splits)
            if peer != self.meeting.rank and count * element_size >= LEAST_BYTES
        ]

    def _sharing(self, peers: Sequence[int]) -> frozenset[int]:
        """Those of the peers with whom memory is shared; both ranks of a pair say the same."""
        return frozenset(peer for peer in peers if self.meeting.peers[peer] is not None)


class _ReceivedPieces:
    """Pieces that arrive in this rank's own memory."""

    def __init__(self, work: Any, pieces: Sequence[Tensor]) -> None:
        self._work, self._pieces = work, pieces

    def wait(self, *timeout: timedelta) -> Sequence[Tensor]:
        self._work.wait(*timeout)
        return self._pieces

    def release(self) -> None:
        self._pieces = ()


class _ByGloo:
    """One collective of gloo's under way, which carries references beside small pieces.

    Args:
        exchange: transport that the collective belongs to.
        group: the process group.
        call: arguments of the all-to-all.
        number: number of this exchange.
        leaving: ranks that pieces go to by reference.
        arriving: ranks that pieces come from by reference.
    """

    def __init__(
        self,
        exchange: SameHostTransport,
        group: Any,
        call: AllToAll,
        number: int,
        leaving: frozenset[int],
        arriving: frozenset[int],
    ) -> None:
        self._call, self._coming = call, arriving
        self._large, self._rank, self._number = exchange.large, exchange.meeting.rank, number
        self._read: list[Segment] = []
        self._is_done = False
        element_size = call.input.element_size()
        pieces = list(bytes_of(call.input).split([count * element_size for count in call.input_splits]))
        for peer in leaving:
            reference = bytearray(exchange.large.leave(peer, pieces[peer], number))
            pieces[peer] = torch.frombuffer(reference, dtype=torch.uint8)
        self._sizes = [count * element_size for count in call.output_splits]
        told_sizes = [REFERENCE_BYTES if peer in arriving else size for peer, size in enumerate(self._sizes)]
        told, self._sent = torch.empty(sum(told_sizes), dtype=torch.uint8), torch.cat(pieces)
        self._told = told.split(told_sizes)
        leaving_sizes = [piece.numel() for piece in pieces]
        self._work = dist.all_to_all_single(
            told, self._sent, told_sizes, leaving_sizes, group=group, async_op=True
        )

    def wait(self, *timeout: timedelta) -> Sequence[Tensor] | None:
        """Wait for it; copy all pieces to where they belong, or return them where they are."""
        if self._is_done:
            return None
        self._work.wait(*timeout)
        pieces = [
            _found(self._large, (peer, told.numpy().tobytes(), size, self._number, timeout), self._read)
            if peer in self._coming
            else told
            for peer, (told, size) in enumerate(zip(self._told, self._sizes, strict=True))
        ]
        if self._call.output is None:
            return [piece.view(self._call.input.dtype) for piece in pieces]
        for target, piece in zip(bytes_of(self._call.output).split(self._sizes), pieces, strict=True):
            target.copy_(piece)
        self.release()
        self._is_done = True
        del self._call, self._sent, self._told
        return None

    def release(self) -> None:
        """Tell the peers that their pieces are not read any more."""
        _release(self._read, self._rank)


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
        self._rank = rank = exchange.meeting.rank
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
        mail.begin(number)
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
        self._mail.end(self._number)

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
            _release(self._read, self._rank)
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
        return _found(self._exchange.large, (peer, bytes(reference), size, self._number, timeout), self._read)

    def release(self) -> None:
        """Tell the peers that their pieces are not read any more."""
        if self._read:
            _release(self._read, self._rank)


def _found(large: LargePieces, place: tuple[Any, ...], read: list[Segment]) -> Tensor:
    """The bytes of a rank that came by reference; their segment is noted, as it is read from now on."""
    piece, segment = large.find(*place)
    if segment is not None:
        read.append(segment)
    return piece


def _release(read: list[Segment], rank: int) -> None:
    """Tell the peers that pieces in their segments are not read any more."""
    for segment in read:
        segment.counts[rank, 0] += 1
    read.clear()


def _misfit(call: AllToAll) -> RuntimeError:
    """The error where splits and tensors do not fit, as gloo raises one."""
    received = "" if call.output is None else f" and {call.output.nbytes}"
    return RuntimeError(
        f"the splits {list(call.input_splits)} and {list(call.output_splits)} do not fit what is sent, received, "
        f"or both: {call.input.nbytes}{received} bytes"
    )
