"""Parts of stored tensors that are wanted, and the load planner that asks DCP's readers for them.

Pieces are read one after the other, so that one is in memory beside the blocks, and a copy of the part that is wanted.

Legend: R rows of a whole tensor; N rows of a block.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from attrs import field, frozen
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from shardwright_plugins.checkpoint.entries import MODEL, STATE
from shardwright_plugins.checkpoint.stored_order import STORED_ROWS

Ints: TypeAlias = npt.NDArray[np.int64]


NOWHERE = -1  # place of a row that no file has


@frozen(eq=False)
class PieceRequest:
    """A part of a stored piece that is wanted.

    Args:
        index: the piece.
        offsets: first element in it, by dimension.
        lengths: elements, by dimension.
        take: function that receives the part, whose memory is used again afterwards.
        target: tensor that the part is copied into, in place of ``take``.
    """

    index: MetadataIndex
    offsets: Sequence[int]
    lengths: Sequence[int]
    take: Callable[[Tensor], None] = lambda part: None
    target: Tensor | None = None


class PartPlanner(LoadPlanner):
    """A load planner that asks for the parts of pieces that are wanted, each piece once, in the order of the files.

    Args:
        requests: parts of tensors.
        plain: names of entries that are no tensors.

    Attributes:
        values: entries that are no tensors, by name.
        waiting: what was not read yet, in order.
    """

    def __init__(self, requests: Iterable[PieceRequest] = (), plain: Iterable[str] = ()) -> None:
        self._requests: dict[MetadataIndex, list[PieceRequest]] = {}
        for request in requests:
            self._requests.setdefault(request.index, []).append(request)
        self._plain = list(plain)
        self.values: dict[str, Any] = {}
        self.waiting: dict[MetadataIndex, ReadItem] = {}

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the metadata, which say where pieces are."""
        assert metadata is not None  # as DCP calls it
        self._metadata = metadata

    def create_local_plan(self) -> LoadPlan:
        """Ask for each piece once, in the order of the files."""
        items = [_item(index, _box(own)) for index, own in self._requests.items()]
        items += [_item(MetadataIndex(key)) for key in self._plain]
        places = self._metadata.storage_data or {}

        def order(item: ReadItem) -> tuple[str, int]:
            place = places.get(item.storage_index)
            return getattr(place, "relative_path", ""), getattr(place, "offset", 0)

        self.waiting = {item.storage_index: item for item in sorted(items, key=order)}
        return LoadPlan(list(self.waiting.values()))

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """Leave the plans as they are."""
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Leave the plan as it is."""
        return central_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Read an entry that is no tensor."""
        self.values[read_item.storage_index.fqn] = torch.load(value, map_location="cpu", weights_only=True)
        del self.waiting[read_item.storage_index]

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Memory for the part of a piece that is wanted."""
        own = self._requests[read_item.storage_index]
        if len(own) == 1 and own[0].target is not None:
            return own[0].target
        entry = self._metadata.state_dict_metadata[read_item.storage_index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        return torch.empty(read_item.lengths, dtype=entry.properties.dtype)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Hand out the part of a piece that was read."""
        own = self._requests[read_item.storage_index]
        for request in own:
            if tensor is not request.target:
                spans = zip(request.offsets, read_item.storage_offsets, request.lengths, strict=True)
                part = tensor[tuple(slice(at - first, at - first + count) for at, first, count in spans)]
                if request.target is None:
                    request.take(part)
                else:
                    request.target.copy_(part)
        del self.waiting[read_item.storage_index]


def _item(index: MetadataIndex, box: tuple[torch.Size, torch.Size] | None = None) -> ReadItem:
    offsets, lengths = box or (torch.Size([0]), torch.Size([0]))
    kind = LoadItemType.BYTE_IO if box is None else LoadItemType.TENSOR
    return ReadItem(kind, index, torch.Size([0] * len(offsets)), index, offsets, lengths)


def _box(requests: Sequence[PieceRequest]) -> tuple[torch.Size, torch.Size]:
    """The smallest box of a piece that has all that is wanted of it."""
    first = [min(starts) for starts in zip(*(request.offsets for request in requests), strict=True)]
    last = [
        max(map(sum, spans))
        for spans in zip(*(zip(r.offsets, r.lengths, strict=True) for r in requests), strict=True)
    ]
    return torch.Size(first), torch.Size(end - start for start, end in zip(first, last, strict=True))


def index_of(key: str) -> str:
    """The name of the index by which a table's rows are stored, from that of its weight or a state of it."""
    weight = key if key.startswith(MODEL) else MODEL + key.removeprefix(STATE).rpartition(".")[0]
    return f"{weight}.{STORED_ROWS}"


def box_requests(
    key: str, entry: TensorStorageMetadata, values: Tensor, offsets: Sequence[int]
) -> Iterator[PieceRequest]:
    """The parts of what is stored that fill a box of it.

    Args:
        key: the entry's name.
        entry: metadata of the stored tensor.
        values: the box, filled in place.
        offsets: its first element, by dimension.
    """
    box = ChunkStorageMetadata(torch.Size(offsets), values.shape)
    for item in create_read_items_for_chunk_list(key, entry, [box]):
        target = values
        for dim, (start, length) in enumerate(zip(item.dest_offsets, item.lengths, strict=True)):
            target = target.narrow(dim, start, length)
        yield PieceRequest(item.storage_index, item.storage_offsets, item.lengths, target=target)


def row_requests(
    key: str, entry: TensorStorageMetadata, values: Tensor, rows: Ints, first_column: int
) -> Iterator[PieceRequest]:
    """The parts of what is stored that have some rows, wherever they are.

    Args:
        key: the entry's name.
        entry: metadata of the stored tensor, ``[R, C]``.
        values: ``[N, columns]``, filled in place where a row is stored.
        rows: the stored row of each, or :data:`NOWHERE`: ``[N]``.
        first_column: first of the columns in the stored tensor.
    """
    order = np.argsort(rows, kind="stable")
    ordered = rows[order]
    last_column = first_column + values.shape[1]
    for chunk in entry.chunks:
        row, column = chunk.offsets
        low, high = np.searchsorted(ordered, [row, row + chunk.sizes[0]])
        start, stop = max(column, first_column), min(column + chunk.sizes[1], last_column)
        if low == high or start >= stop:
            continue
        first, last = int(ordered[low]), int(ordered[high - 1]) + 1
        take = partial(
            _deal,
            values[:, start - first_column : stop - first_column],
            torch.from_numpy(order[low:high]),
            torch.from_numpy(ordered[low:high] - first),
        )
        index = MetadataIndex(key, chunk.offsets)
        yield PieceRequest(index, (first - row, start - column), (last - first, stop - start), take)


def _deal(target: Tensor, local: Tensor, source: Tensor, part: Tensor) -> None:
    """Copy the rows ``source`` of a part to the rows ``local`` of a block."""
    target[local.to(target.device)] = part[source].to(target.device, target.dtype)


@frozen(eq=False)
class Found:
    """Collects, from an index of rows or keys that is read piece by piece, where those of one block are.

    Args:
        is_mine: function that tells for each number if it is the block's.
    """

    is_mine: Callable[[Ints], npt.NDArray[np.bool_]]
    _numbers: list[Ints] = field(factory=list, init=False)
    _places: list[Ints] = field(factory=list, init=False)

    def requests(self, key: str, entry: TensorStorageMetadata) -> Iterator[PieceRequest]:
        """All pieces of the index."""
        for chunk in entry.chunks:
            take = partial(self._look, chunk.offsets[0])
            yield PieceRequest(MetadataIndex(key, chunk.offsets), (0, 0), chunk.sizes, take)

    def _look(self, first: int, part: Tensor) -> None:
        """Take those of a piece, whose first has a number in what is stored."""
        numbers = part.reshape(-1).numpy().astype(np.int64, copy=False)
        mine = np.flatnonzero(self.is_mine(numbers))
        self._numbers.append(numbers[mine])
        self._places.append(mine + first)

    @property
    def numbers(self) -> Ints:
        """The block's rows or keys, as they are stored."""
        return np.concatenate([*self._numbers, np.empty(0, np.int64)])

    @property
    def places(self) -> Ints:
        """The stored row of each."""
        return np.concatenate([*self._places, np.empty(0, np.int64)])
