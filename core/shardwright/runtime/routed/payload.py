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
    FALSE,
    Dealing,
    Interleaving,
    LastResult,
    filled_up,
    run_or_places,
    sums,
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
        of_groups: number of bags of each slot of each local kernel group, for each rank, ``[W, S]``; and the number
            with the empty ones with which slots are filled up to the batch size of their source, as kernels want them,
            or ``None`` if they are filled up, or are not to be.
        are_full: slots have as many bags as their source has samples, except where bags without ids are left out.
        parts: order of the parts in the messages: for each column, and then for the lengths, those of each group.
        splits: 8-byte words of each rank's message, ``[W]``.
    """

    batch_sizes: Ints
    fields: Sequence[Ints]
    num_bags: Sequence[Ints]
    of_groups: Sequence[tuple[Ints, Ints | None]]
    are_full: bool
    parts: Dealing
    splits: tuple[int, ...]


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
        self._dtypes = (torch.int64, *self._columns.values())
        per_id = [_WORDS[dtype] for dtype in self._dtypes]
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
        self._last_incoming, self._last_outgoing = LastResult(), LastResult()

    def headers(self, routed: Sequence[Bucketed]) -> Ints:
        """Write the header fields for each rank, filled up with zeros: ``[W, header_size]``; only zeros of no ids."""
        fields = np.zeros(self._world_size * self.header_size, dtype=np.int64)
        for places, own in zip(self._fields, routed, strict=False):
            fields[places] = own.num_ids | own.num_bags << _BAGS
        return fields.reshape(self._world_size, -1)

    def pack(self, routed: Sequence[Bucketed], fields: Ints) -> tuple[Tensor, tuple[int, ...]]:
        """Pack the messages to all ranks: flat int64, and the number of elements for each rank.

        Args:
            routed: ids and bags by router.
            fields: header fields of these, from :meth:`headers`.
        """
        order, padding, splits = self._last_outgoing.of(self._outgoing, fields)
        pieces = [own.ids.view(torch.int32) for own in routed]
        for name in self._columns:
            pieces += [own.columns[name].view(torch.int32) for own in routed]
        if self._is_pooled:
            pieces += [own.lengths for own in routed if own.lengths is not None]
        if padding:
            pieces.append(pieces[0].new_zeros(padding))
        return order.of(pieces).view(torch.int64), splits

    def _outgoing(self, fields: Ints) -> tuple[Interleaving, int, tuple[int, ...]]:
        """The order of the parts of messages; words of the last, which is zeros; and 8-byte words for each rank."""
        pairs = zip(self._fields, self._routers, strict=True)
        words = self._words(
            np.array([sums(fields.reshape(-1)[places], router.slots.first) for places, router in pairs])
        )
        padding = int(total(words[-1]))
        return Interleaving(words if padding else words[:-1]), padding, tuple((total(words) // 2).tolist())

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
        return self._last_incoming.of(self._incoming, peers.batch_sizes, peers.fields)

    def _incoming(self, batch_sizes: Ints, fields: Ints) -> Incoming:
        own = [fields[:, slots] for slots in self._own]
        # The slots of each group are a run of its router's, so that each part of a router is one of each group in turn.
        by_group = [own[number][:, slots] for number, slots in self._of_group]
        sizes = np.array([total(each, axis=1) for each in by_group], dtype=np.int64)
        words = self._words(sizes.reshape(-1, len(batch_sizes)))
        parts = Dealing(words if total(words[-1]) else words[:-1])
        of_groups = [self._bags(*each, batch_sizes) for each in zip(self._groups, by_group, strict=True)]
        bags = [each >> _BAGS for each in own]
        are_full = all(filled is None for _, filled in of_groups)
        return Incoming(
            batch_sizes, own, bags, of_groups, are_full, parts, tuple((total(words) // 2).tolist())
        )

    def _bags(self, group: KernelGroup, fields: Ints, batch_sizes: Ints) -> tuple[Ints, Ints | None]:
        """Count the bags of a group with these header fields, as :class:`Incoming` has them."""
        num_bags, filled = fields >> _BAGS, None
        are_filled = self._is_pooled and not group.kind.is_ragged
        if are_filled and FALSE in (num_bags == batch_sizes[:, None]).tobytes():
            filled = np.broadcast_to(batch_sizes[:, None], num_bags.shape)
        return num_bags, filled

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
        """Read the bags of each of this rank's groups from the messages."""
        found, num_groups, num_columns = [], len(self._groups), len(self._dtypes)
        parts = incoming.parts.of(received.view(torch.int32))
        for number, (group, own_bags) in enumerate(zip(self._groups, incoming.of_groups, strict=True)):
            own, (counts, filled) = parts[number::num_groups], own_bags
            ids, *columns = map(Tensor.view, own, self._dtypes)
            by_name = dict(zip(self._columns, columns, strict=True))
            lengths = own[num_columns] if self._is_pooled else None
            if lengths is not None and filled is not None:
                lengths, counts = filled_up(lengths, counts.reshape(-1), filled.reshape(-1)), filled
            weights = by_name.pop(WEIGHTS, None) if columns else None
            found.append(Bags(ids, lengths, weights, counts, group.kind.is_ragged, by_name))
        return found
