"""A table of which each rank has some blocks, as sharded state dicts have it.

To torch it is a ``DTensor``, which has the global shape and a part of the elements here. Unlike torch's, its blocks may
be any rows and columns. It implements the protocol that ``torch.distributed.checkpoint`` (DCP) calls
``_Checkpointable``: write items, a list of chunks, a shard by its offsets. It has no arithmetic.

Legend: R rows and C columns of the whole tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from attrs import define, evolve, frozen
from torch import Tensor

from shardwright.errors import InvalidInputError, UnsupportedError
from shardwright.runtime.ranks.devices import is_host

if TYPE_CHECKING:  # importing DCP takes a second, and only who saves or loads has it imported
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem

PIECE_BYTES = 8 << 20
"""Bytes of the largest piece that is written: a reader holds some of them beside its own blocks."""

_ATEN = torch.ops.aten
_WHOLE = (
    "The whole comes from full_state_dict(), and from torch.distributed.checkpoint.state_dict.get_model_state_dict("
    "model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)); every rank makes these calls"
)


@frozen(eq=False)
class Piece:
    """A box of the whole tensor that is here.

    Args:
        offsets: first row and first column.
        sizes: rows and columns.
        values: the elements, shared storage; or a function that makes them when they are written.
        is_written: this rank writes it; of copies one rank does.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    values: Tensor | Callable[[], Tensor]
    is_written: bool = True

    @property
    def chunk(self) -> ChunkStorageMetadata:
        """The box in DCP's words."""
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return ChunkStorageMetadata(torch.Size(self.offsets), torch.Size(self.sizes))


@frozen(eq=False)
class BlockForm:
    """The relation of blocks to the whole tensor.

    Args:
        pieces: cuts the values of the blocks here into pieces.
        whole: gathers the whole tensor in host memory; a collective.
        places: the blocks here.
        layout: hash of the layout: under an equal one each rank has the same blocks.
        memory: table whose memory the values are; none of copies.
        owner: prefix of errors that names the table.
        no_reading: reason why DCP alone cannot read into it; empty if it can.
        no_writing: reason why DCP alone cannot write it; empty if it can.
    """

    pieces: Callable[[Sequence[Tensor]], Iterable[Piece]] = lambda values: ()
    whole: Callable[[Sequence[Tensor]], Tensor] | None = None
    places: Sequence[Any] = ()
    layout: Any = None
    memory: Any = None
    owner: str = ""
    no_reading: str = ""
    no_writing: str = ""

    def __deepcopy__(self, memo: Any) -> BlockForm:
        return self


@define(eq=False)
class _Cut:
    """The pieces of some values, once they were asked for; a copy of the values has others."""

    made: Sequence[Piece] | None = None

    def __deepcopy__(self, memo: Any) -> _Cut:
        return _Cut()


class BlockedTensor(torch.Tensor):
    """A tensor of which this rank has some blocks.

    Args:
        shape: shape of the whole tensor.
        dtype: dtype of its elements.
        device: device of the blocks; the CPU by default.
        values: values of the blocks here, shared storage; none on a rank without one.
        form: relation of the blocks to the whole tensor.
    """

    _here: Sequence[Tensor]
    form: BlockForm
    _pieces: _Cut

    @staticmethod
    def __new__(  # noqa: D102 - described by its class
        cls: type[BlockedTensor],
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | None = None,
        values: Sequence[Tensor] = (),
        form: BlockForm = BlockForm(),
    ) -> BlockedTensor:
        made: BlockedTensor = torch.Tensor._make_wrapper_subclass(
            _as_dtensor(), torch.Size(shape), dtype=dtype, device=device or torch.device("cpu")
        )
        made._here, made.form, made._pieces = list(values), form, _Cut()
        return made

    @property
    def blocks(self) -> Sequence[tuple[Any, Tensor]]:
        """The blocks on this rank, each with its values."""
        return list(zip(self.form.places, self._here, strict=True))

    @property
    def pieces(self) -> Sequence[Piece]:
        """The blocks in pieces of bounded size."""
        if self._pieces.made is None:
            self._pieces.made = list(self.form.pieces(self._here))
        return self._pieces.made

    def full_tensor(self, *, grad_placements: Any = None) -> Tensor:
        """The whole tensor, in host memory; a collective, every rank makes this call.

        Raises:
            DistributedError: a rank does not make it within the time-out.
        """
        if self.form.whole is None:
            raise UnsupportedError(f"{self!r} is a part of a checkpoint, which is not gathered")
        return self.form.whole(self._here)

    def with_form(self, form: BlockForm) -> BlockedTensor:
        """The same values, under another relation to the whole."""
        return BlockedTensor(self.shape, self.dtype, self.device, self._here, form)

    def mapped(self, change: Callable[[Tensor], Tensor], device: torch.device | None = None) -> BlockedTensor:
        """The same blocks with other values.

        Args:
            change: makes the other values of a block.
            device: device of the other values.
        """
        values = [change(own) for own in self._here]
        return BlockedTensor(
            self.shape, self.dtype, device or self.device, values, evolve(self.form, memory=None)
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"BlockedTensor({list(self.shape)}, {self.dtype}, blocks here: {len(self._here)})"

    def __deepcopy__(self, memo: Any) -> BlockedTensor:
        copied: BlockedTensor = memo.setdefault(id(self), self.mapped(torch.clone))
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise UnsupportedError(
            f"a {self!r} has the blocks of one rank, and is not pickled, as torch.save would. Blocks are saved by "
            "shardwright.save_checkpoint(folder, model), or by torch.distributed.checkpoint.save(state_dict, "
            f"checkpoint_id=folder). {_WHOLE}"
        )

    # What torch's functions over state dicts ask of a DTensor.

    @property
    def device_mesh(self) -> Any:
        """The device type, and that this rank takes part."""
        return SimpleNamespace(device_type=self.device.type, get_coordinate=lambda: ())

    @property
    def placements(self) -> tuple[()]:
        """None of torch's kinds."""
        return ()

    def redistribute(self, *args: Any, **kwargs: Any) -> Any:
        """An object whose ``to_local()`` is the whole tensor: what torch redistributes for; a collective."""
        whole = self.full_tensor()
        return SimpleNamespace(to_local=lambda: whole)

    def to_local(self, *args: Any, **kwargs: Any) -> Tensor:
        """A local tensor, which several blocks are not.

        Raises:
            UnsupportedError: always.
        """
        raise UnsupportedError(f"a {self!r} is no one tensor here: blocks has its blocks. {_WHOLE}")

    @property
    def _local_tensor(self) -> BlockedTensor:
        return self

    @_local_tensor.setter
    def _local_tensor(self, value: BlockedTensor) -> None:
        self._here, self._pieces = value._here, _Cut()

    # What DCP's planners ask.

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        if self.form.no_writing:
            raise UnsupportedError(self.form.no_writing)
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, piece.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(piece.chunk, properties, torch.Size(self.shape)),
            )
            for piece in self.pieces
            if piece.is_written
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        if self.form.no_reading:
            raise UnsupportedError(self.form.no_reading)
        return [piece.chunk for piece in self.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        offsets = tuple(index.offset or ())
        values = next((piece.values for piece in self.pieces if piece.offsets == offsets), None)
        if values is None:
            raise InvalidInputError(f"{index.fqn!r} has no piece at {list(offsets)} on this rank")
        return values if isinstance(values, Tensor) else values()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # as torch documents it
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler is None or not isinstance(args[0], BlockedTensor):
            given = next((own for own in args if isinstance(own, BlockedTensor)), "BlockedTensor")
            raise UnsupportedError(f"{func} of a {given}: a rank has blocks of it alone. {_WHOLE}")
        return handler(*args, **(kwargs or {}))


def _copy(own: BlockedTensor, other: Any, non_blocking: bool = False) -> BlockedTensor:
    """Take over the values of another of the same blocks."""
    if not copied_blocks(own, other):
        raise UnsupportedError(
            f"a {type(other).__name__} {list(other.shape)} cannot be copied into a {own!r}: its blocks are others. "
            "load_state_dict() takes whole tensors, and blocks of any layout"
        )
    return own


def _to(
    value: BlockedTensor, *, device: Any = None, dtype: torch.dtype | None = None, **_: Any
) -> BlockedTensor:
    """The same blocks on another device."""
    if dtype not in (None, value.dtype):
        raise UnsupportedError(f"{value!r} cannot be converted to {dtype}. {_WHOLE}")
    place = value.device if device is None else torch.device(device)
    return value.mapped(lambda own: own.detach().to(place, copy=True), place)


# What torch's functions over state dicts do with tensors, DCP's stagers before another thread writes them.
_HANDLERS: Mapping[Any, Callable[..., BlockedTensor]] = {
    _ATEN.detach.default: lambda value: value.with_form(value.form),
    _ATEN.clone.default: lambda value, **_: value.mapped(torch.clone),
    _ATEN.zeros_like.default: lambda value, **_: value.mapped(
        lambda own: torch.zeros_like(own, device="cpu"), torch.device("cpu")
    ),
    _ATEN._to_copy.default: _to,
    _ATEN.new_empty.default: lambda value, *_, **__: BlockedTensor(value.shape, value.dtype, form=value.form),
    _ATEN.copy_.default: _copy,
}


@cache
def _as_dtensor() -> type[BlockedTensor]:
    """The class as one of ``DTensor``s, made when it is first needed: the import takes 0.7 s."""
    if torch.__version__ < "2.13":  # whose core handles all kinds of DTensors as its own
        return BlockedTensor
    from torch.distributed.tensor import DTensor

    return type(BlockedTensor.__name__, (BlockedTensor, DTensor), {"__doc__": BlockedTensor.__doc__})


def whole_tensor(value: Any) -> Any:
    """The whole of a sharded tensor, by a collective; other values as they are."""
    return value.full_tensor() if isinstance(value, BlockedTensor) else value


def is_live(value: Any, own: Any) -> bool:
    """True if a sharded tensor is ``own`` itself, in the same memory; the same on every rank."""
    is_blocked = isinstance(value, BlockedTensor) and isinstance(own, BlockedTensor)
    return is_blocked and value.form.memory is not None and value.form.memory is own.form.memory


def copied_blocks(own: Any, value: Any) -> bool:
    """Copy the values of a sharded tensor if its blocks are those of ``own``; the same on every rank.

    Returns:
        False if they are others, or one of both is whole.
    """
    if not (isinstance(value, BlockedTensor) and isinstance(own, BlockedTensor)):
        return False
    if value.form.layout != own.form.layout or value.shape != own.shape:
        return False
    for (_, mine), (_, theirs) in zip(own.blocks, value.blocks, strict=True):
        mine.copy_(theirs)
    return True


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
