"""Large pieces between ranks of one host, through memory that both map instead of a connection to oneself.

A connection copies every byte twice in the kernel, by threads that take processor time from the ranks. Here a piece
stands in a *segment* of the sender's, into which it is copied unless it was made there (:meth:`SameHostExchange.room`),
and the receiver copies it out; what travels by gloo, in the same collective as all smaller pieces, is a *reference*. So
each all-to-all is still one of gloo's, which keeps its time-outs and notices ranks that are gone.

Segments have no name that could outlive the ranks or fill a small ``/dev/shm``: the receiver opens them by the sender's
process and descriptor. Whether it can is tried once per pair, when the first large piece is on its way; ranks that
cannot go on by gloo. At a segment's beginning each receiver counts the pieces that it has copied out, so that the
sender knows when it may be written again.

The order of writes that this relies on (data before the reference, copies before the count) is what x86 promises
(Intel 64 and IA-32 Architectures Software Developer's Manual, volume 3, section 8.2); other processors go by gloo.
"""

from __future__ import annotations

import os
import platform
import secrets
import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from attrs import define, field, frozen
from torch import Tensor

from shardwright.runtime.comm import Exchange, TorchExchange
from shardwright.settings import may_share_memory
from shardwright_plugins.comm_backends._segments import Segment, Segments

LEAST_BYTES = 1 << 18
"""Smaller pieces travel by gloo: there a reference would take about as long."""
MOST_BYTES = 1 << 25
"""So do larger ones, which would take as much memory again."""
_FLOAT_BYTES = 4
_REFERENCE = (
    5  # int64: a segment's descriptor and serial number, the oldest in use, its bytes, where the piece begins
)
_REFERENCE_BYTES = 8 * _REFERENCE
_BY_GLOO = -1  # for a descriptor: there was no memory, and the piece is sent by itself
_NO_OFFER = "none"
_TAGS = (
    1 << 20
)  # of exchanges, so that pieces sent by themselves are those of the exchange that is waited for


def is_possible() -> bool:
    """Whether this system can, and the user did not turn it off."""
    return sys.platform == "linux" and platform.machine() in ("x86_64", "AMD64") and may_share_memory()


class SameHostExchange(Exchange):
    """All-to-all over one process group; see the module.

    Args:
        process_group: of gloo.
        store: of the group.
    """

    def __init__(self, process_group: Any, store: Any) -> None:
        self._group, self._store, self._plain = process_group, store, TorchExchange(process_group)
        self._rank, self._world_size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self._peers: dict[int, _Peer | None] = {}
        self._number = _number(store, self._rank)
        self._segments = Segments(self._world_size)
        self._offer: _Offer | None = None
        self._started = 0

    def room(self, num_elements: int, device: torch.device) -> Tensor:
        size = num_elements * _FLOAT_BYTES
        is_alone = bool(self._peers) and not any(self._peers.values())
        if is_alone or not LEAST_BYTES <= size <= self._world_size * MOST_BYTES:
            return self._plain.room(num_elements, device)
        try:
            own = self._segments.free(size)
        except OSError:
            return self._plain.room(num_elements, device)
        whole, own.lent = own.segment.lend()
        return whole[:size].view(torch.float32)

    def start(
        self,
        output: Tensor | None,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        patience: timedelta | None,
    ) -> Any:
        self._started += 1
        if max(*output_splits, *input_splits) * input.element_size() < LEAST_BYTES:  # as of every small batch
            return self._plain.start(output, input, output_splits, input_splits, patience)
        large = [self._large(splits, input.element_size()) for splits in (input_splits, output_splits)]
        # All that are new, in one order: ranks that meet in a circle would wait for each other.
        self._meet_all(sorted({*large[0], *large[1]}), patience)
        leaving, arriving = (self._by_memory(peers) for peers in large)
        if not leaving and not arriving:
            return self._plain.start(output, input, output_splits, input_splits, patience)
        exchange = _Exchange(self._group, self._started % _TAGS, output, input.dtype)
        pieces = _pieces(input, input_splits, input.element_size())
        for peer in leaving:
            pieces[peer] = exchange.leave(self._segments, peer, pieces[peer])
        sizes = [count * input.element_size() for count in output_splits]
        exchange.start(pieces, sizes, arriving)
        return exchange

    def reads_in_place(self, num_elements: int, patience: timedelta | None) -> bool:
        large = self._large([num_elements] * self._world_size, _FLOAT_BYTES)
        self._meet_all(large, patience)
        return len(self._by_memory(large)) == self._world_size - 1

    def _large(self, splits: Sequence[int], element_size: int) -> list[int]:
        """The peers whose pieces are large enough, and not too large."""
        return [
            peer
            for peer, count in enumerate(splits)
            if peer != self._rank and LEAST_BYTES <= count * element_size <= MOST_BYTES
        ]

    def _by_memory(self, peers: Sequence[int]) -> dict[int, _Peer]:
        """Those of the peers with whom memory is shared; both ranks of a pair say the same."""
        met = {peer: self._peers[peer] for peer in peers}
        return {peer: known for peer, known in met.items() if known is not None}

    def _meet_all(self, peers: Sequence[int], patience: timedelta | None) -> None:
        """Ask both ranks of each pair, when the first large piece goes either way; peers rise."""
        for peer in peers:
            if peer not in self._peers:
                self._peers[peer] = self._meet(peer, patience)

    def _meet(self, peer: int, patience: timedelta | None) -> _Peer | None:
        """Try on both sides whether one reads what the other wrote."""
        if self._offer is None:
            self._offer = _Offer.make()
            self._store.set(_key(self._number, self._rank), self._offer.text)
        theirs = self._read(_key(self._number, peer), patience)
        can_read = _can_read(theirs)
        self._store.set(_key(self._number, self._rank, peer), str(int(can_read)))
        # A peer that offers nothing does not look whether it could read here.
        if not can_read or self._read(_key(self._number, peer, self._rank), patience) != "1":
            return None
        return _Peer(int(theirs.split()[0]), self._rank, self._world_size)

    def _read(self, key: str, patience: timedelta | None) -> str:
        if patience is not None:
            self._store.wait([key], patience)
        text: str = self._store.get(key).decode()
        return text


def exchange_over(process_group: Any, store: Any) -> SameHostExchange | None:
    """An exchange that shares memory where it can; ``None`` where this rank cannot, of which the others are told.

    Args:
        process_group: of gloo; every rank of it makes this call.
        store: of the group.
    """
    if is_possible():
        return SameHostExchange(process_group, store)
    rank = dist.get_rank(process_group)
    store.set(_key(_number(store, rank), rank), _NO_OFFER)
    return None


def _number(store: Any, rank: int) -> int:
    """How many times this rank, as all others, has connected to the group: what was said then is outdated."""
    return int(store.add(f"shardwright/memory/connected/{rank}", 1))


def _key(number: int, *ranks: int) -> str:
    return "/".join(["shardwright/memory", *map(str, (number, *ranks))])


def _pieces(tensor: Tensor, splits: Sequence[int], element_size: int) -> list[Tensor]:
    """The bytes to (or from) each rank."""
    flat = tensor.view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
    return list(flat.split([count * element_size for count in splits]))


@frozen(eq=False)
class _Offer:
    """Something for peers to try to read: a random word in shared memory."""

    text: str
    segment: Segment | None

    @classmethod
    def make(cls) -> _Offer:
        word = secrets.token_bytes(16)
        try:
            segment = Segment.create(len(word), serial=0, num_peers=1)
        except OSError:
            return cls(_NO_OFFER, None)
        segment.data.copy_(torch.frombuffer(bytearray(word), dtype=torch.uint8))
        return cls(f"{os.getpid()} {segment.descriptor} {word.hex()}", segment)


def _can_read(text: str) -> bool:
    """Whether another rank's word stands where it says."""
    if text == _NO_OFFER:
        return False
    process, descriptor, word = text.split()
    try:
        segment = Segment.open(int(process), int(descriptor), len(word) // 2, serial=0, num_peers=1)
    except (OSError, ValueError):  # another machine, another container, another user
        return False
    return bytes(segment.data.tolist()).hex() == word


@define(eq=False)
class _Peer:
    """A rank of the same host, whose segments this rank has mapped.

    Args:
        process: the peer's.
        rank: this rank's.
        world_size: ranks of the group.
    """

    process: int
    rank: int
    world_size: int
    _mapped: dict[int, Segment] = field(factory=dict)

    def segment(self, descriptor: int, serial: int, oldest: int, size: int) -> Segment:
        """One of the peer's segments.

        Raises:
            RuntimeError: the peer is gone.
        """
        segment = self._mapped.get(serial)
        if segment is None:
            self._mapped = {known: own for known, own in self._mapped.items() if known >= oldest}
            segment = self._mapped[serial] = self._open(descriptor, size, serial)
        return segment

    def _open(self, descriptor: int, size: int, serial: int) -> Segment:
        try:
            return Segment.open(self.process, descriptor, size, serial=serial, num_peers=self.world_size)
        except (OSError, ValueError) as error:
            raise RuntimeError(f"the memory of process {self.process} is gone: {error}") from error


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
        tag: of this exchange's pieces that are sent by themselves.
        output: where pieces belong; ``None``: where they are.
        dtype: of their elements.
    """

    def __init__(self, group: Any, tag: int, output: Tensor | None, dtype: torch.dtype) -> None:
        self._group, self._tag, self._output, self._dtype = group, tag, output, dtype
        self._read: list[tuple[Segment, int]] = []
        self._alone: list[Any] = []  # pieces for which there was no memory

    def leave(self, segments: Segments, peer: int, piece: Tensor) -> Tensor:
        """Have a piece stand where a peer can read it; returns its reference."""
        try:
            own, start = segments.holding(piece) or (segments.free(piece.numel()), None)
        except OSError:
            self._alone.append(
                _under_way(dist.isend(piece, group=self._group, group_dst=peer, tag=self._tag))
            )
            return _reference(*[_BY_GLOO] * _REFERENCE)
        segment = own.segment
        if start is None:
            start = 0
            segment.data[: piece.numel()].copy_(piece)
        own.told[peer] += 1
        return _reference(
            segment.descriptor, segment.serial, segments.oldest_serial, segment.data.numel(), start
        )

    def start(self, pieces: Sequence[Tensor], sizes: Sequence[int], arriving: Mapping[int, _Peer]) -> None:
        """Start the collective of references and small pieces.

        Args:
            pieces: to each rank.
            sizes: the bytes from each.
            arriving: those whose pieces come by reference.
        """
        self._sizes, self._arriving = sizes, arriving
        told_sizes = [_REFERENCE_BYTES if peer in arriving else size for peer, size in enumerate(sizes)]
        told, self._sent = torch.empty(sum(told_sizes), dtype=torch.uint8), torch.cat(list(pieces))
        self._told, leaving = told.split(told_sizes), [piece.numel() for piece in pieces]
        self._work = dist.all_to_all_single(
            told, self._sent, told_sizes, leaving, group=self._group, async_op=True
        )

    def wait(self, *timeout: timedelta) -> Sequence[Tensor] | None:
        """Wait for it; copy all pieces to where they belong, or return them where they are."""
        self._work.wait(*timeout)
        pieces = [self._piece(peer, size, *timeout) for peer, size in enumerate(self._sizes)]
        for work in self._alone:
            work.wait(*timeout)
        if self._output is None:
            return [piece.view(self._dtype) for piece in pieces]
        for target, piece in zip(_pieces(self._output, self._sizes, 1), pieces, strict=True):
            target.copy_(piece)
        self.release()
        return None

    def _piece(self, peer: int, size: int, *timeout: timedelta) -> Tensor:
        """The bytes from a rank."""
        source, told = self._arriving.get(peer), self._told[peer]
        if source is None:
            return told
        reference = told.clone().view(torch.int64).tolist()  # it may stand anywhere
        if reference[0] == _BY_GLOO:
            piece = torch.empty(size, dtype=torch.uint8)
            _under_way(dist.irecv(piece, group=self._group, group_src=peer, tag=self._tag)).wait(*timeout)
            return piece
        segment = source.segment(*reference[:-1])
        self._read.append((segment, source.rank))
        return segment.data[reference[-1] : reference[-1] + size]

    def release(self) -> None:
        """Tell the peers that their pieces are not read any more."""
        for segment, rank in self._read:
            segment.counts[rank, 0] += 1
        self._read = []
