"""A tensor of which each rank has some blocks, as ``torch.distributed.checkpoint`` (DCP) writes and reads it.

It implements the protocol that DCP calls ``_Checkpointable``: write items, a list of chunks, a shard by its offsets.
DCP looks shards up only in tensors, so this is one, but without elements of its own and without arithmetic.

Legend: R rows and C columns of the whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from attrs import frozen
from torch import Tensor

from shardwright.errors import InvalidInputError, UnsupportedError
from shardwright.planning.layouts.stored_rows import rows_between
from shardwright.runtime.ranks.devices import is_host

if TYPE_CHECKING:  # importing DCP takes a second, and only who saves or loads has it imported
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

PIECE_BYTES = 8 << 20
"""Bytes of the largest piece that is written: a reader holds some of them beside its own blocks."""

_ATEN = torch.ops.aten


@frozen(eq=False)
class RowNumbers:
    """Numbers of a run of a part's rows, made when they are written: int64 ``[count, 1]``.

    Args:
        rows: all rows of the part.
        start: local row of the first.
        count: number of rows.
        num_rows: ``R``.
    """

    rows: Any
    start: int
    count: int
    num_rows: int

    def tensor(self) -> Tensor:
        """The numbers."""
        some = rows_between(self.rows, self.start, self.start + self.count, self.num_rows)
        return torch.from_numpy(some).unsqueeze(1)


@frozen(eq=False)
class Piece:
    """A box of the whole tensor that is here.

    Args:
        offsets: first row and first column.
        sizes: rows and columns.
        values: the elements, shared storage; or numbers to be made.
        is_written: this rank writes it; of copies one rank does.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    values: Tensor | RowNumbers
    is_written: bool = True

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """The box in DCP's words."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return ChunkStorageMetadata(torch.Size(self.offsets), torch.Size(self.sizes))


class BlockedTensor(torch.Tensor):
    """A tensor of which this rank has some blocks, each in pieces of bounded size.

    Args:
        shape: shape of the whole tensor.
        dtype: dtype of its elements.
        pieces: pieces on this rank; none on a rank without a block.
        refusal: reason why boxes cannot be read straight into it; empty if they can.

    Attributes:
        blocks: blocks of a table that the pieces are cut from, each with its values, shared storage.
        owner: prefix of errors that names the table.
    """

    _pieces: list[Piece]
    _refusal: str
    blocks: Sequence[tuple[Any, Tensor]] = ()
    owner: str = ""

    @staticmethod
    def __new__(  # noqa: D102 - described by its class
        cls: type[BlockedTensor],
        shape: Sequence[int],
        dtype: torch.dtype,
        pieces: Iterable[Piece] = (),
        refusal: str = "",
    ) -> BlockedTensor:
        made = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=dtype, device=torch.device("cpu")
        )
        made._pieces, made._refusal = list(pieces), refusal
        return made

    @property
    def pieces(self) -> Sequence[Piece]:
        """The pieces on this rank."""
        return self._pieces

    @property
    def refusal(self) -> str:
        """Reason why boxes cannot be read straight into it; empty if they can."""
        return self._refusal

    def shares_storage_with(self, other: BlockedTensor) -> bool:
        """True if both are the same blocks in the same memory."""
        return len(self._pieces) == len(other._pieces) and all(
            mine.offsets == theirs.offsets and _address(mine) == _address(theirs)
            for mine, theirs in zip(self._pieces, other._pieces, strict=True)
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"BlockedTensor({list(self.shape)}, {self.dtype}, pieces here: {len(self._pieces)})"

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, piece.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(piece.chunk, properties, torch.Size(self.shape)),
            )
            for piece in self._pieces
            if piece.is_written
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        if self._refusal:
            raise UnsupportedError(self._refusal)
        return [piece.chunk for piece in self._pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        offsets = tuple(index.offset or ())
        values = next((piece.values for piece in self._pieces if piece.offsets == offsets), None)
        if values is None:
            raise InvalidInputError(f"{index.fqn!r} has no piece at {list(offsets)} on this rank")
        return values.tensor() if isinstance(values, RowNumbers) else values

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch documents it
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None or not isinstance(args[0], BlockedTensor):
            raise UnsupportedError(
                f"{func} of a {args[0]!r}: a value of sharded_state_dict() is for torch.distributed.checkpoint alone, "
                "which saves and loads it in shards. state_dict() and unshard() give whole tensors"
            )
        return handler(*args, **(kwargs or {}))


def _address(piece: Piece) -> int:
    return 0 if isinstance(piece.values, RowNumbers) else piece.values.data_ptr()


def _mapped(value: BlockedTensor, change: Callable[[Tensor], Tensor]) -> BlockedTensor:
    pieces = [
        Piece(
            piece.offsets,
            piece.sizes,
            piece.values if isinstance(piece.values, RowNumbers) else change(piece.values),
            piece.is_written,
        )
        for piece in value.pieces
    ]
    return BlockedTensor(value.shape, value.dtype, pieces, value.refusal)


def _empty(value: BlockedTensor, *_: Any, **__: Any) -> BlockedTensor:
    """A new one without pieces: DCP's stager copies attributes into it."""
    return BlockedTensor(value.shape, value.dtype)


def _copy(own: BlockedTensor, other: Any, non_blocking: bool = False) -> BlockedTensor:
    """Take over the pieces of another of the same blocks."""
    if not isinstance(other, BlockedTensor) or len(other.pieces) != len(own.pieces):
        raise UnsupportedError(f"{other!r} cannot be copied into {own!r}: its blocks are others")
    for mine, theirs in zip(own.pieces, other.pieces, strict=True):
        if isinstance(mine.values, Tensor):
            assert isinstance(theirs.values, Tensor)  # pieces of one table
            mine.values.copy_(theirs.values)
    return own


# What DCP's two stagers do with tensors before they are written by another thread.
_HANDLERS: Mapping[Any, Callable[..., BlockedTensor]] = {
    _ATEN.detach.default: lambda value: _mapped(value, lambda values: values),
    _ATEN.clone.default: lambda value, **_: _mapped(value, torch.clone),
    _ATEN.zeros_like.default: lambda value, **_: _mapped(value, lambda v: torch.zeros_like(v, device="cpu")),
    _ATEN._to_copy.default: lambda value, **_: _mapped(value, lambda v: v.detach().to("cpu", copy=True)),
    _ATEN.new_empty.default: _empty,
    _ATEN.copy_.default: _copy,
}


def own_storage(values: Tensor) -> Tensor:
    """A tensor of the same elements whose storage has no others; a copy only if they share a larger storage.

    DCP copies tensors that are parts of larger storages before it writes them, and keeps these copies.
    """
    whole = values.untyped_storage().nbytes()
    if (
        not is_host(values.device)
        or whole == values.nbytes
        or not values.is_contiguous()
        or not values.numel()
    ):
        return values
    return torch.from_numpy(values.view(torch.uint8).numpy()).view(values.dtype)
