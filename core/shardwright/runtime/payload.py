"""The bytes of the first two collectives: a fixed-size header per peer, and one packed payload.

Legend: W ranks, S_r slots of rank r, B_w batch size of rank w, G groups of the receiving rank.

Header, int64: batch size, status, feature, value, position, then the ids for each group of the receiver. Payload
for rank r, each section padded to 8 bytes: lengths ``[S_r, B]`` int32, ids int64, weights float32.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from attrs import frozen
from torch import Tensor

from shardwright.runtime.exchange_plan import ExchangePlan
from shardwright.runtime.inputs import Problem, Status
from shardwright.runtime.lookup import Bags
from shardwright.runtime.routing import Routed

_FIXED = 5
_ALIGNMENT = 8


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


@frozen
class PeerHeader:
    """What one rank says of its batch to another."""

    batch_size: int
    problem: Problem
    ids_per_group: tuple[int, ...]

    @property
    def num_ids(self) -> int:
        """Ids sent, over all groups."""
        return sum(self.ids_per_group)


class PayloadFormat:
    """Packs and unpacks headers and payloads of one exchange, on one rank."""

    def __init__(self, plan: ExchangePlan, *, rank: int, is_weighted: bool, device: torch.device) -> None:
        self._rank, self._is_weighted, self._device = rank, is_weighted, device
        self._slots = [[slot.stream for slot in plan.slots_of(peer)] for peer in range(len(plan.groups))]
        self._group_slots = [[len(group.slots) for group in groups] for groups in plan.groups]
        self._send_order = [stream for streams in self._slots for stream in streams]
        self._same_order = self._send_order == list(range(len(plan.streams)))
        self._send_index = torch.tensor(self._send_order, dtype=torch.int64, device=device)
        self.header_size = _FIXED + plan.max_groups

    def headers(self, routed: Routed | None, problem: Problem) -> Tensor:
        """The headers to every peer, ``[W * header_size]`` int64; ``routed`` is ``None`` where there is a problem."""
        rows = []
        for streams, group_slots in zip(self._slots, self._group_slots, strict=True):
            counts = [0] * (self.header_size - _FIXED)
            if routed is not None:
                start = 0
                for group, num_slots in enumerate(group_slots):
                    counts[group] = sum(routed.ids[s].numel() for s in streams[start : start + num_slots])
                    start += num_slots
            batch_size = routed.batch_size if routed is not None else 0
            rows += [
                batch_size,
                int(problem.status),
                problem.feature,
                problem.value,
                problem.position,
                *counts,
            ]
        return torch.tensor(rows, dtype=torch.int64).to(self._device, non_blocking=True)

    def read_headers(self, received: Tensor) -> list[PeerHeader]:
        """What each peer said."""
        num_groups = len(self._group_slots[self._rank])
        return [
            PeerHeader(
                row[0], Problem(Status(row[1]), *row[2:_FIXED]), tuple(row[_FIXED : _FIXED + num_groups])
            )
            for row in received.view(-1, self.header_size).tolist()
        ]

    def pack(self, routed: Routed) -> tuple[Tensor, list[int]]:
        """The payloads to every peer as one byte tensor, and the bytes for each."""
        lengths = routed.lengths if self._same_order else routed.lengths.index_select(0, self._send_index)
        length_rows = lengths.contiguous().view(-1).view(torch.uint8)
        pieces: list[Tensor] = []
        splits: list[int] = []
        start = 0
        for streams in self._slots:
            stop = start + len(streams) * routed.batch_size * 4
            sections = [[length_rows[start:stop]], [routed.ids[s].view(torch.uint8) for s in streams]]
            start = stop
            if routed.weights is not None:
                sections.append([routed.weights[s].view(torch.uint8) for s in streams])
            splits.append(sum(self._append(pieces, section) for section in sections))
        return torch.cat(pieces) if pieces else length_rows[:0], splits

    def _append(self, pieces: list[Tensor], section: list[Tensor]) -> int:
        num_bytes = sum(piece.numel() for piece in section)
        padding = _padded(num_bytes) - num_bytes
        pieces += section
        if padding:
            pieces.append(torch.zeros(padding, dtype=torch.uint8, device=self._device))
        return num_bytes + padding

    def receive_splits(self, headers: Sequence[PeerHeader]) -> list[int]:
        """The payload bytes from each peer."""
        return [sum(self._sections(header)) for header in headers]

    def _sections(self, header: PeerHeader) -> tuple[int, int, int]:
        """Padded bytes of lengths, ids and weights from a peer."""
        num_slots = len(self._slots[self._rank])
        weights = _padded(header.num_ids * 4) if self._is_weighted else 0
        return _padded(num_slots * header.batch_size * 4), header.num_ids * 8, weights

    def unpack(self, received: Tensor, headers: Sequence[PeerHeader]) -> list[Bags]:
        """The bags of each local group."""
        group_slots = self._group_slots[self._rank]
        lengths: list[list[Tensor]] = [[] for _ in group_slots]
        ids: list[list[Tensor]] = [[] for _ in group_slots]
        weights: list[list[Tensor]] = [[] for _ in group_slots]
        start = 0
        for header in headers:
            counts = list(header.ids_per_group)
            bags = [num_slots * header.batch_size for num_slots in group_slots]
            length_bytes, id_bytes, weight_bytes = self._sections(header)
            _deal(lengths, received[start : start + sum(bags) * 4].view(torch.int32), bags)
            start += length_bytes
            _deal(ids, received[start : start + id_bytes].view(torch.int64), counts)
            start += id_bytes
            if self._is_weighted:
                _deal(weights, received[start : start + header.num_ids * 4].view(torch.float32), counts)
                start += weight_bytes
        batch_sizes = tuple(header.batch_size for header in headers)
        return [
            Bags(
                ids=_joined(ids[group]),
                lengths=_joined(lengths[group]),
                weights=_joined(weights[group]) if self._is_weighted else None,
                batch_sizes=batch_sizes,
                num_slots=num_slots,
            )
            for group, num_slots in enumerate(group_slots)
        ]


def _deal(targets: list[list[Tensor]], values: Tensor, counts: Sequence[int]) -> None:
    for target, piece in zip(targets, values.split(list(counts)), strict=True):
        target.append(piece)


def _joined(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)
