"""The payload of the second collective: lengths, ids and weights, packed for each rank.

Legend: W ranks, S_r slots of rank r, B_w batch size of rank w, N ids.

The payload for rank r, each section padded to 8 bytes: lengths ``[S_r, B]`` int32 (pooled collections only), ids
int64, weights float32. How many ids each slot gets stands in the header.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from shardwright.runtime.buffers import ALIGNMENT, joined, padded
from shardwright.runtime.lookup import Bags
from shardwright.runtime.part import Peer
from shardwright.runtime.routing import Routed
from shardwright.runtime.routing_plan import RoutingPlan


class PayloadFormat:
    """Packs and unpacks the payloads of one part, on one rank."""

    def __init__(
        self, plan: RoutingPlan, *, rank: int, is_weighted: bool, is_pooled: bool, device: torch.device
    ) -> None:
        self._rank, self._is_weighted, self._is_pooled, self._device = rank, is_weighted, is_pooled, device
        self._slots = [[slot.stream for slot in plan.slots_of(peer)] for peer in range(plan.world_size)]
        self._group_slots = [len(group.slots) for group in plan.groups[rank]]
        send_order = [stream for streams in self._slots for stream in streams]
        same_order = send_order == list(range(len(plan.streams)))
        # For each rank, the streams of its slots: all of them in a row need no index.
        self._send_index = [
            None if same_order else torch.tensor(own, dtype=torch.int64, device=device) for own in self._slots
        ]
        self.header_size = plan.max_slots

    def headers(self, routed: Routed) -> list[list[int]]:
        """For each rank, how many ids each of its slots gets, filled up with zeros."""
        counts = [[routed.ids[stream].numel() for stream in streams] for streams in self._slots]
        return [own + [0] * (self.header_size - len(own)) for own in counts]

    def pack(self, routed: Routed) -> tuple[Tensor, list[int]]:
        """The payloads to every rank as one byte tensor, and the bytes for each."""
        sections = [self._sizes_to(routed, streams) for streams in self._slots]
        splits = [sum(sizes) for sizes in sections]
        # In units of 8 bytes, to which every section is padded, so that all of them can be seen as ids or as bytes.
        packed = torch.empty(sum(splits) // ALIGNMENT, dtype=torch.int64, device=self._device)
        first = 0
        for streams, index, sizes in zip(self._slots, self._send_index, sections, strict=True):
            stops = list(accumulate((size // ALIGNMENT for size in sizes), initial=first))
            if streams:
                if self._is_pooled:
                    _fill_lengths(packed[stops[0] : stops[1]], routed.lengths, streams, index)
                _fill(packed[stops[1] : stops[2]], [routed.ids[stream] for stream in streams])
                if routed.weights is not None:
                    _fill(packed[stops[2] : stops[3]], [routed.weights[stream] for stream in streams])
            first = stops[-1]
        return packed.view(torch.uint8), splits

    def _sizes_to(self, routed: Routed, streams: Sequence[int]) -> tuple[int, int, int]:
        """Padded bytes of lengths, ids and weights for the slots of a rank."""
        num_ids = sum([routed.ids[stream].numel() for stream in streams])
        return self._section_bytes(len(streams), routed.batch_size, num_ids)

    def _section_bytes(self, num_slots: int, batch_size: int, num_ids: int) -> tuple[int, int, int]:
        lengths = padded(num_slots * batch_size * 4) if self._is_pooled else 0
        return lengths, num_ids * 8, padded(num_ids * 4) if self._is_weighted else 0

    def receive_splits(self, peers: Sequence[Peer]) -> list[int]:
        """The payload bytes from each rank."""
        return [sum(self._sections(peer)) for peer in peers]

    def _counts(self, peer: Peer) -> Sequence[int]:
        """The ids a rank sends for each slot here."""
        return peer.fields[: len(self._slots[self._rank])]

    def _sections(self, peer: Peer) -> tuple[int, int, int]:
        """Padded bytes of lengths, ids and weights from a rank."""
        return self._section_bytes(len(self._slots[self._rank]), peer.batch_size, sum(self._counts(peer)))

    def unpack(self, received: Tensor, peers: Sequence[Peer]) -> list[Bags]:
        """The bags of each local group."""
        groups = range(len(self._group_slots))
        lengths: list[list[Tensor]] = [[] for _ in groups]
        ids: list[list[Tensor]] = [[] for _ in groups]
        weights: list[list[Tensor]] = [[] for _ in groups]
        start = 0
        for peer in peers:
            id_counts = [sum(counts) for counts in self._by_group(self._counts(peer))]
            length_bytes, id_bytes, weight_bytes = self._sections(peer)
            if self._is_pooled:
                bag_counts = [num_slots * peer.batch_size for num_slots in self._group_slots]
                _deal(lengths, received[start : start + sum(bag_counts) * 4].view(torch.int32), bag_counts)
            start += length_bytes
            _deal(ids, received[start : start + id_bytes].view(torch.int64), id_counts)
            start += id_bytes
            if self._is_weighted:
                _deal(weights, received[start : start + sum(id_counts) * 4].view(torch.float32), id_counts)
            start += weight_bytes
        counts = self._bag_counts(peers)
        return [
            Bags(
                ids=joined(ids[group]),
                lengths=joined(lengths[group]) if self._is_pooled else None,
                weights=joined(weights[group]) if self._is_weighted else None,
                counts=tuple(own[group] for own in counts),
            )
            for group in groups
        ]

    def _bag_counts(self, peers: Sequence[Peer]) -> Sequence[Sequence[tuple[int, ...]]]:
        """For each source and group, the bags of each slot: samples, or ids where each id is a bag of its own."""
        if self._is_pooled:
            return [[(peer.batch_size,) * num_slots for num_slots in self._group_slots] for peer in peers]
        return [[tuple(own) for own in self._by_group(self._counts(peer))] for peer in peers]

    def _by_group(self, per_slot: Sequence[int]) -> list[Sequence[int]]:
        parts, start = [], 0
        for num_slots in self._group_slots:
            parts.append(per_slot[start : start + num_slots])
            start += num_slots
        return parts


def _deal(targets: list[list[Tensor]], values: Tensor, counts: Sequence[int]) -> None:
    pieces = [values] if len(counts) == 1 else values.split_with_sizes(list(counts))
    for target, piece in zip(targets, pieces, strict=True):
        target.append(piece)


def _fill_lengths(room: Tensor, lengths: Tensor, streams: Sequence[int], index: Tensor | None) -> None:
    """Write the lengths ``[S, B]`` of some streams into ``room``, int64; ``index`` is ``None`` if they are in a row."""
    if not room.numel():
        return
    room[-1] = 0
    target = room.view(lengths.dtype)[: len(streams) * lengths.shape[1]].view(len(streams), -1)
    if index is None:
        target.copy_(lengths[streams[0] : streams[-1] + 1])
    else:
        torch.index_select(lengths, 0, index, out=target)


def _fill(room: Tensor, pieces: list[Tensor]) -> None:
    """Write pieces of one dtype into ``room``, int64, and zeros into what is left of its last 8 bytes."""
    if not room.numel():
        return
    if pieces[0].dtype is not torch.int64:
        room[-1] = 0
        room = room.view(pieces[0].dtype)[: sum([piece.numel() for piece in pieces])]
    torch.cat(pieces, out=room)
