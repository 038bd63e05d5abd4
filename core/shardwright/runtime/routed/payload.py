"""The message of ids, and the header fields that tell its sizes.

A slot has one header field. Its low 32 bits are the number of ids, its high 32 bits the number of bags. These are fewer
than the batch size if bags without ids are left out, or if the feature has a batch size of its own.

The message to a rank has these parts in turn: the ids of each router's slots (int64); in pooled collections the lengths
of their bags (int32); if weighted, the weights (float32); zeros up to a multiple of 8 bytes.

Legend: W ranks, S slots of all ranks, S_r a rank's slots of one router, P parts of a message.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from shardwright.contracts.lookup import Bags
from shardwright.planning.layouts.blocks import Ints
from shardwright.runtime.routed.routing import Bucketed, Router
from shardwright.runtime.step.executor import PeerHeaders
from shardwright.runtime.step.kernel_groups import KernelGroup
from shardwright.runtime.step.segments import filled_up, interleave, places_of, sums, take

_BAGS = 32
_IDS = (1 << _BAGS) - 1
_WORDS = {torch.int64: 2, torch.int32: 1, torch.float32: 1}
"""Words of 4 bytes in an element of each dtype; messages are counted in words."""


@frozen(eq=False)
class Incoming:
    """Sizes of the messages that arrive for this rank's slots, read from the headers.

    Args:
        batch_sizes: ``B_w`` of each rank, ``[W]``.
        num_ids: number of ids from each rank for each slot, ``[W, S_r]`` for each router.
        num_bags: number of bags from each rank for each slot, ``[W, S_r]`` for each router.
        words: 4-byte words of each part of each rank's message, ``[P, W]``.
        splits: 8-byte words of each rank's message, ``[W]``.
    """

    batch_sizes: Ints
    num_ids: Sequence[Ints]
    num_bags: Sequence[Ints]
    words: Ints
    splits: list[int]


class PayloadFormat:
    """Format of one rank's headers and messages.

    Args:
        routers: routers of all slots.
        groups: this rank's kernel groups.
        rank: this rank.
        is_weighted: ids carry weights.
        is_pooled: bags have lengths.

    Attributes:
        header_size: number of fields for each rank: the most slots of any rank.
    """

    def __init__(
        self,
        routers: Sequence[Router],
        groups: Sequence[KernelGroup],
        *,
        rank: int,
        is_weighted: bool,
        is_pooled: bool,
    ) -> None:
        self._routers, self._groups = routers, groups
        self._is_weighted, self._is_pooled = is_weighted, is_pooled
        per_rank = np.stack([router.slots.per_rank for router in routers])
        self.header_size = int(per_rank.sum(0).max())
        before = np.cumsum(per_rank, axis=0) - per_rank  # a rank's slots stand router after router
        # Place of each router's slots in the flat [W, header_size]: the row of the slot's rank, the slots of routers
        # before this one, and the slot's number among its rank's.
        rows = np.arange(per_rank.shape[1]) * self.header_size
        self._fields = [
            np.repeat(rows + first - router.slots.first[:-1], own) + np.arange(own.sum())
            for router, own, first in zip(routers, per_rank, before, strict=True)
        ]
        stops = before[:, rank] + per_rank[:, rank]
        self._own = [slice(*span) for span in zip(before[:, rank].tolist(), stops.tolist(), strict=True)]

    def headers(self, routed: Sequence[Bucketed]) -> Ints:
        """Write the header fields for each rank, filled up with zeros: ``[W, header_size]``."""
        world_size = self._routers[0].slots.world_size
        fields = np.zeros(world_size * self.header_size, dtype=np.int64)
        for places, own in zip(self._fields, routed, strict=True):
            fields[places] = own.num_ids | own.num_bags << _BAGS
        return fields.reshape(world_size, -1)

    def pack(self, routed: Sequence[Bucketed]) -> tuple[Tensor, list[int]]:
        """Pack the messages to all ranks: flat int64, and the number of elements for each rank."""
        firsts = [router.slots.first for router in self._routers]
        num_ids = [sums(own.num_ids, first) for own, first in zip(routed, firsts, strict=True)]
        num_bags = [sums(own.num_bags, first) for own, first in zip(routed, firsts, strict=True)]
        parts = [own.ids for own in routed]
        parts += [own.lengths for own in routed if own.lengths is not None]
        parts += [own.weights for own in routed if own.weights is not None]
        words = self._words(num_ids, num_bags)
        missing = int(words[-1].sum())
        pieces = [part.view(torch.int32) for part in parts]
        if missing:
            pieces.append(torch.zeros(missing, dtype=torch.int32, device=parts[0].device))
        packed = interleave(pieces, words[: len(pieces)])
        return packed.view(torch.int64), (words.sum(0) // 2).tolist()

    def _words(self, num_ids: Sequence[Ints], num_bags: Sequence[Ints]) -> Ints:
        """Count the words of each part of the message to (or from) each rank, ``[P, W]``; the last part is padding."""
        words = [own * _WORDS[torch.int64] for own in num_ids]
        words += num_bags if self._is_pooled else []
        words += num_ids if self._is_weighted else []
        odd = sum(words[1:], words[0]) & 1  # one word of padding makes a multiple of 8 bytes
        return np.array([*words, odd])

    def incoming(self, peers: PeerHeaders) -> Incoming:
        """Read the sizes of the arriving messages from the headers."""
        fields = [peers.fields[:, own] for own in self._own]
        num_ids = [own & _IDS for own in fields]
        num_bags = [own >> _BAGS for own in fields]
        words = self._words([own.sum(1) for own in num_ids], [own.sum(1) for own in num_bags])
        return Incoming(peers.batch_sizes, num_ids, num_bags, words, (words.sum(0) // 2).tolist())

    def sizes_back(self, routed: Sequence[Bucketed], incoming: Incoming) -> tuple[Ints, Ints]:
        """Count the values of ids on the way back from where they were looked up.

        Args:
            routed: ids that this rank sent.
            incoming: sizes of those that it was sent.

        Returns:
            Values that leave to each rank, of each local group, ``[G, W]``; values that arrive from each rank, of each
            router, ``[R, W]``.
        """
        leaving = [
            incoming.num_ids[number][
                :, slice(group.slots.start - own.start, group.slots.stop - own.start)
            ].sum(1)
            for number, own in enumerate(self._own)
            for group in self._groups
            if own.start <= group.slots.start < own.stop
        ]
        pairs = zip(routed, self._routers, strict=True)
        arriving = [sums(own.num_ids, router.slots.first) for own, router in pairs]
        no_group = np.zeros((0, len(incoming.batch_sizes)), dtype=np.int64)
        return np.concatenate([no_group, *(own[None] for own in leaving)]), np.stack(arriving)

    def unpack(self, received: Tensor, incoming: Incoming) -> list[Bags]:
        """Read the bags of each of this rank's groups from the messages."""
        return [
            bags
            for number in range(len(self._routers))
            for bags in self._unpacked(number, received, incoming)
        ]

    def _unpacked(self, number: int, received: Tensor, incoming: Incoming) -> Iterator[Bags]:
        """Yield the bags of the groups of one router.

        A group's slots are a run of the router's slots, so its elements are a run of each part of each message.
        """
        num_routers = len(self._routers)
        starts = places_of(incoming.words)
        num_ids, num_bags = incoming.num_ids[number], incoming.num_bags[number]
        own = self._own[number]
        for group in self._groups:
            if not own.start <= group.slots.start < own.stop:
                continue
            slots = slice(group.slots.start - own.start, group.slots.stop - own.start)
            part_of_lengths = num_routers + number
            part_of_weights = num_routers * (1 + self._is_pooled) + number
            own_bags = Bags(
                ids=_run(received, starts[number], num_ids, slots),
                lengths=_run(received.view(torch.int32), starts[part_of_lengths], num_bags, slots)
                if self._is_pooled
                else None,
                weights=_run(received.view(torch.float32), starts[part_of_weights], num_ids, slots)
                if self._is_weighted
                else None,
                counts=num_bags[:, slots],
                is_ragged=group.kind.is_ragged,
            )
            has_all = group.kind.is_ragged or not self._is_pooled
            yield own_bags if has_all else _with_all_bags(own_bags, incoming.batch_sizes)


def _with_all_bags(bags: Bags, batch_sizes: Ints) -> Bags:
    """Fill up the slots with empty bags to the batch size of their source, as kernels want them."""
    wanted = np.broadcast_to(batch_sizes[:, None], bags.table.shape)
    if np.array_equal(bags.table, wanted):
        return bags
    assert bags.lengths is not None  # sequences have a bag for each id
    lengths = filled_up(bags.lengths, bags.table.reshape(-1), wanted.reshape(-1))
    return Bags(bags.ids, lengths, bags.weights, wanted)


def _run(message: Tensor, starts: Ints, sizes: Ints, slots: slice) -> Tensor:
    """Take the elements of a run of slots from a part of each rank's message.

    Args:
        message: messages of all ranks, in the part's dtype.
        starts: first word of the part in each rank's message, ``[W]``.
        sizes: number of elements of each slot, ``[W, S_r]``.
        slots: the run of slots.
    """
    first = starts // _WORDS[message.dtype] + sizes[:, : slots.start].sum(1)
    return take(message, first, sizes[:, slots].sum(1))
