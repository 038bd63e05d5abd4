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
    Interleaving,
    LastResult,
    Selection,
    filled_up,
    places_of,
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
class _Run:
    """The part of the messages that is one kernel group's.

    Args:
        columns: its elements of each column in the messages of all ranks: first the ids.
        lengths: elements of the lengths of bags in these messages; ``None`` of sequences.
        num_bags: number of bags of each slot, for each rank, ``[W, S]``.
        filled: number of bags with the empty ones with which slots are filled up to the batch size of their source, as
            kernels want them; ``None`` if they are filled up, or are not to be.
    """

    columns: Sequence[Selection]
    lengths: Selection | None
    num_bags: Ints
    filled: Ints | None


@frozen(eq=False)
class Incoming:
    """Sizes of the messages that arrive for this rank's slots, read from the headers.

    Args:
        batch_sizes: ``B_w`` of each rank, ``[W]``.
        fields: header fields of each rank for each slot, ``[W, S_r]`` for each router.
        num_bags: number of bags from each rank for each slot, ``[W, S_r]`` for each router.
        runs: the part of each local kernel group.
        splits: 8-byte words of each rank's message, ``[W]``.
    """

    batch_sizes: Ints
    fields: Sequence[Ints]
    num_bags: Sequence[Ints]
    runs: Sequence[_Run]
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
        words = self._words(np.array([total(each, axis=1) for each in own]))
        starts = places_of(words)
        bags = [each >> _BAGS for each in own]
        runs = [
            self._run(group, number, own[number][:, : slots.stop], slots, starts, batch_sizes)
            for group, (number, slots) in zip(self._groups, self._of_group, strict=True)
        ]
        return Incoming(batch_sizes, own, bags, runs, tuple((total(words) // 2).tolist()))

    def _run(
        self, group: KernelGroup, number: int, fields: Ints, slots: slice, starts: Ints, batch_sizes: Ints
    ) -> _Run:
        """Find a group's part: its slots are a run of its router's slots, and so its elements of each part.

        Args:
            group: the group.
            number: number of its router.
            fields: header fields of that router's slots up to the group's last.
            slots: the group's slots among them.
            starts: first 4-byte word of each part in the message from each rank, ``[P, W]``.
            batch_sizes: ``B_w`` of each rank.
        """
        before, own = total(fields[:, : slots.start], axis=1), total(fields[:, slots], axis=1)
        of_router = starts[number :: len(self._routers)]
        columns = [
            Selection(start // _WORDS[dtype] + (before & _IDS), own & _IDS)
            for start, dtype in zip(of_router, self._dtypes, strict=False)
        ]
        num_bags = fields[:, slots] >> _BAGS
        if not self._is_pooled:
            return _Run(columns, None, num_bags, None)
        lengths = Selection(of_router[len(columns)] + (before >> _BAGS), own >> _BAGS)
        filled = None
        if not group.kind.is_ragged and FALSE in (num_bags == batch_sizes[:, None]).tobytes():
            filled = np.broadcast_to(batch_sizes[:, None], num_bags.shape)
        return _Run(columns, lengths, num_bags, filled)

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
        found, views = [], [received.view(dtype) for dtype in self._dtypes]
        words = received.view(torch.int32)
        for group, run in zip(self._groups, incoming.runs, strict=True):
            ids, *columns = map(Selection.of, run.columns, views)
            by_name = dict(zip(self._columns, columns, strict=True))
            lengths, counts = None if run.lengths is None else run.lengths.of(words), run.num_bags
            if lengths is not None and run.filled is not None:
                lengths = filled_up(lengths, counts.reshape(-1), run.filled.reshape(-1))
                counts = run.filled
            weights = by_name.pop(WEIGHTS, None)
            found.append(Bags(ids, lengths, weights, counts, group.kind.is_ragged, by_name))
        return found
