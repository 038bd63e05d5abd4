"""The message of ids, and the header fields that tell its sizes.

A slot has one header field. Its low 32 bits are the number of ids, its high 32 bits the number of bags. These are fewer
than the batch size if bags without ids are left out, or if the feature has a batch size of its own.

The message to a rank has these parts in turn: the ids of each router's slots (int64); their int64 columns, then their
float32 columns, as weights; in pooled collections the lengths of their bags (int32); zeros up to a multiple of 8 bytes.

Legend: W ranks, S slots of all ranks, S_r a rank's slots of one router, P parts of a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from shardwright.contracts.lookup import Bags
from shardwright.planning.arrays import Ints
from shardwright.runtime.routed.routing import Bucketed, Router, own_slots, runs_of_groups
from shardwright.runtime.step.executor import PeerHeaders
from shardwright.runtime.step.kernel_groups import KernelGroup
from shardwright.runtime.step.segments import (
    all_true,
    filled_up,
    interleave,
    places_of,
    run_or_places,
    sums,
    take,
    total,
)
from shardwright.sparse import WEIGHTS

_BAGS = 32
_IDS = (1 << _BAGS) - 1
_WORDS = {torch.int64: 2, torch.int32: 1, torch.float32: 1}
"""Words of 4 bytes in an element of each dtype; messages are counted in words."""


@frozen(eq=False)
class Incoming:
    """Sizes of the messages that arrive for this rank's slots, read from the headers.

    Args:
        batch_sizes: ``B_w`` of each rank, ``[W]``.
        fields: header fields of each rank for each slot, ``[W, S_r]`` for each router.
        num_bags: number of bags from each rank for each slot, ``[W, S_r]`` for each router.
        starts: first 4-byte word of each part in the message from each rank, ``[P, W]``.
        splits: 8-byte words of each rank's message, ``[W]``.
    """

    batch_sizes: Ints
    fields: Sequence[Ints]
    num_bags: Sequence[Ints]
    starts: Ints
    splits: list[int]


class PayloadFormat:
    """Format of one rank's headers and messages.

    Args:
        routers: routers of all slots.
        groups: this rank's kernel groups.
        rank: this rank.
        columns: dtype of each column that the ids carry, by name, int64 or float32.
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
        columns: Mapping[str, torch.dtype],
        is_pooled: bool,
    ) -> None:
        self._routers, self._groups = routers, groups
        self._is_pooled = is_pooled
        # Wide columns come first, so that each part begins at a multiple of its elements' size.
        self._columns = dict(sorted(columns.items(), key=lambda column: -_WORDS[column[1]]))
        per_id = [_WORDS[dtype] for dtype in (torch.int64, *self._columns.values())]
        self._words_per_id = np.array(per_id)[:, None, None]
        per_rank = np.stack([router.slots.per_rank for router in routers])
        self.header_size = int(per_rank.sum(0).max())
        before = np.cumsum(per_rank, axis=0) - per_rank  # a rank's slots stand router after router
        # Place of each router's slots in the flat [W, header_size]: the row of the slot's rank, the slots of routers
        # before this one, and the slot's number among its rank's.
        rows = np.arange(per_rank.shape[1]) * self.header_size
        self._fields = [
            run_or_places(np.repeat(rows + first - router.slots.first[:-1], own) + np.arange(own.sum()))
            for router, own, first in zip(routers, per_rank, before, strict=True)
        ]
        self._world_size = per_rank.shape[1]
        self._own = own_slots(routers, rank)
        self._of_group = runs_of_groups(groups, self._own)

    def headers(self, routed: Sequence[Bucketed]) -> Ints:
        """Write the header fields for each rank, filled up with zeros: ``[W, header_size]``; only zeros of no ids."""
        fields = np.zeros(self._world_size * self.header_size, dtype=np.int64)
        for places, own in zip(self._fields, routed, strict=False):
            fields[places] = own.num_ids | own.num_bags << _BAGS
        return fields.reshape(self._world_size, -1)

    def pack(self, routed: Sequence[Bucketed]) -> tuple[Tensor, list[int]]:
        """Pack the messages to all ranks: flat int64, and the number of elements for each rank."""
        pairs = zip(routed, self._routers, strict=True)
        sizes = [sums(own.num_ids | own.num_bags << _BAGS, router.slots.first) for own, router in pairs]
        pieces = [own.ids.view(torch.int32) for own in routed]
        for name in self._columns:
            pieces += [own.columns[name].view(torch.int32) for own in routed]
        if self._is_pooled:
            pieces += [own.lengths for own in routed if own.lengths is not None]
        words = self._words(np.array(sizes))
        missing = int(total(words[-1]))
        if missing:
            pieces.append(pieces[0].new_zeros(missing))
        packed = interleave(pieces, words[: len(pieces)])
        return packed.view(torch.int64), (total(words) // 2).tolist()

    def _words(self, sizes: Ints) -> Ints:
        """Count the words of each part of the message to (or from) each rank, ``[P, W]``; the last part is padding.

        Args:
            sizes: ids and bags of each router's slots together, as a header field has them, ``[routers, W]``.
        """
        ids, bags = sizes & _IDS, sizes >> _BAGS
        per_id = (ids * self._words_per_id).reshape(-1, ids.shape[1])
        words = np.concatenate([per_id, bags if self._is_pooled else ids[:0]])
        odd = total(words) & 1  # one word of padding makes a multiple of 8 bytes
        return np.concatenate([words, odd[None]])

    def incoming(self, peers: PeerHeaders) -> Incoming:
        """Read the sizes of the arriving messages from the headers."""
        fields = [peers.fields[:, own] for own in self._own]
        words = self._words(np.array([total(own, axis=1) for own in fields]))
        bags = [own >> _BAGS for own in fields]
        return Incoming(peers.batch_sizes, fields, bags, places_of(words), (total(words) // 2).tolist())

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
            total(incoming.fields[number][:, slots] & _IDS, axis=1) for number, slots in self._of_group
        ]
        pairs = zip(routed, self._routers, strict=True)
        arriving = [sums(own.num_ids, router.slots.first) for own, router in pairs]
        no_group = np.zeros((0, len(incoming.batch_sizes)), dtype=np.int64)
        return np.concatenate([no_group, *(own[None] for own in leaving)]), np.stack(arriving)

    def unpack(self, received: Tensor, incoming: Incoming) -> list[Bags]:
        """Read the bags of each of this rank's groups from the messages.

        A group's slots are a run of its router's slots, so its elements are a run of each part of each message.
        """
        num_routers, starts = len(self._routers), incoming.starts
        found, lengths = [], None
        for group, (number, slots) in zip(self._groups, self._of_group, strict=True):
            fields, num_bags = incoming.fields[number], incoming.num_bags[number]
            before, own = total(fields[:, : slots.start], axis=1), total(fields[:, slots], axis=1)
            num_ids = before & _IDS, own & _IDS
            ids = _run(received, starts[number], *num_ids)
            if self._is_pooled:
                place = num_routers * (1 + len(self._columns)) + number
                lengths = _run(received.view(torch.int32), starts[place], before >> _BAGS, own >> _BAGS)
            columns = dict[str, Tensor]()
            for part, name in enumerate(self._columns, 1):
                place = num_routers * part + number
                columns[name] = _run(received.view(self._columns[name]), starts[place], *num_ids)
            weights = columns.pop(WEIGHTS, None) if columns else None
            counts, is_ragged = num_bags[:, slots], group.kind.is_ragged
            if lengths is not None and not is_ragged:
                lengths, counts = _with_all_bags(lengths, counts, incoming.batch_sizes)
            found.append(Bags(ids, lengths, weights, counts, is_ragged, columns))
        return found


def _with_all_bags(lengths: Tensor, counts: Ints, batch_sizes: Ints) -> tuple[Tensor, Ints]:
    """Fill up the slots with empty bags to the batch size of their source, as kernels want them."""
    if all_true(counts == batch_sizes[:, None], axis=None):
        return lengths, counts
    wanted = np.broadcast_to(batch_sizes[:, None], counts.shape)
    return filled_up(lengths, counts.reshape(-1), wanted.reshape(-1)), wanted


def _run(message: Tensor, starts: Ints, before: Ints, sizes: Ints) -> Tensor:
    """Take the elements of a run of slots from a part of each rank's message.

    Args:
        message: messages of all ranks, in the part's dtype.
        starts: first word of the part in each rank's message, ``[W]``.
        before: number of the part's elements before the run, ``[W]``.
        sizes: number of elements of the run, ``[W]``.
    """
    return take(message, starts // _WORDS[message.dtype] + before, sizes)
