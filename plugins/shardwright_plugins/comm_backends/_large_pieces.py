"""Large pieces for ranks of one host, in memory of the sender's; what is sent is only where they stand.

A piece is copied into a *segment* unless it was made there, and the receiver reads or copies it out. At a segment's
beginning each receiver counts the pieces that it is done with, so that the sender knows when it may be written again.
Where there is no memory left, a piece is sent by itself over the process group.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright_plugins.comm_backends._mailboxes import Mailboxes
from shardwright_plugins.comm_backends._meeting import Peer
from shardwright_plugins.comm_backends._segments import Own, Segment, Segments

_REFERENCE = struct.Struct("5q")
"""A segment's descriptor and serial number, the oldest in use, its bytes, and where the piece begins."""
REFERENCE_BYTES = _REFERENCE.size
_BY_ITSELF = -1  # for a descriptor: there was no memory
_ALONE = 1  # the column in which those are counted
_TAGS = 1 << 20  # of exchanges, so that a piece sent by itself is that of the exchange that is waited for


def tag_of(exchange: int) -> int:
    """Tag by which both ranks know a piece that is sent by itself."""
    return exchange % _TAGS


class LargePieces:
    """The large pieces that this rank has sent by reference.

    Args:
        process_group: group that carries pieces for which there is no shared memory.
        segments: this rank's memory.
        mail: messages of the ranks, in whose memory receivers count pieces that were sent by themselves.
    """

    def __init__(self, process_group: Any, segments: Segments, mail: Mailboxes) -> None:
        self._group, self._segments, self._peers = process_group, segments, mail.peers
        self._alone = Own(mail.own, [0] * segments.num_peers, column=_ALONE)
        segments.watch(self._alone)

    def leave(self, peer: int, piece: Tensor, exchange: int) -> bytes:
        """Have bytes stand where a peer can read them.

        Args:
            peer: the receiver.
            piece: uint8.
            exchange: its number, the same on both ranks.

        Returns:
            The reference to be sent.
        """
        try:
            own, start = self._segments.holding(piece) or (self._segments.free(piece.numel()), None)
        except OSError:
            return self._send_alone(peer, piece, exchange)
        segment = own.segment
        if start is None:
            start = 0
            segment.data[: piece.numel()].copy_(piece)
        own.told[peer] += 1
        return _REFERENCE.pack(
            segment.descriptor, segment.serial, self._segments.oldest_serial, segment.data.numel(), start
        )

    def _send_alone(self, peer: int, piece: Tensor, exchange: int) -> bytes:
        """Send a copy, and keep it until it is read.

        Nobody waits for it to be sent: the receiver reads it when it waits for this exchange, perhaps after one for
        which it waits for this rank.
        """
        alone = self._alone
        if alone.is_read:
            alone.kept.clear()
        copy = piece.clone()
        alone.kept.append((copy, dist.isend(copy, group=self._group, group_dst=peer, tag=tag_of(exchange))))
        alone.told[peer] += 1
        return _REFERENCE.pack(*[_BY_ITSELF] * 5)

    def find(
        self, rank: int, reference: bytes, size: int, exchange: int, timeout: Sequence[timedelta]
    ) -> tuple[Tensor, Segment | None]:
        """The bytes from a rank, and the segment in which they stand, to be counted there when they are read.

        Raises:
            RuntimeError: the rank is gone, or time is up.
        """
        peer, numbers = self._peers[rank], _REFERENCE.unpack(reference)
        if numbers[0] == _BY_ITSELF:
            return self._receive_alone(rank, peer, size, exchange, timeout), None
        segment = peer.segment(*numbers[:-1])
        return segment.data[numbers[-1] : numbers[-1] + size], segment

    def _receive_alone(
        self, rank: int, peer: Peer, size: int, exchange: int, timeout: Sequence[timedelta]
    ) -> Tensor:
        piece = torch.empty(size, dtype=torch.uint8)
        work = dist.irecv(piece, group=self._group, group_src=rank, tag=tag_of(exchange))
        assert work is not None  # this rank is in the group
        work.wait(*timeout)
        peer.rings.counts[peer.rank, _ALONE] += 1
        return piece
