"""The wire: flat float32 buffers between ranks, as they are or by the codecs of the tables they come from.

What a rank sends in one collective is a flat buffer, peer after peer. For codecs it is seen as *pieces*: blocks of rows
of one width that one codec encodes in one call. Sender and receiver derive the same pieces from the plan and the batch
sizes, so that nothing is said of them on the wire. A receiver gets a flat float32 buffer again, in the same order.

Legend: B bags, D columns of a slot, n rows of a piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import TypeAlias

import torch
from attrs import frozen
from torch import Tensor

from shardwright.contracts.codec import Codec
from shardwright.contracts.comm_backend import Communicator, Work
from shardwright.errors import UnknownPluginError, UnsupportedError
from shardwright.planning.codecs import QCommsConfig
from shardwright.planning.plan import ParameterSharding
from shardwright.planning.tables import PoolingType, TableSpec
from shardwright.runtime.buffers import padded
from shardwright.runtime.part import PartConfig


@frozen(eq=False)
class Segment:
    """A part of a flat buffer in which slots' blocks lie.

    Args:
        outputs: the output of each slot.
        dims: the columns of each slot's block.
        counts: the bags of each slot.
        batch_major: the blocks stand side by side, ``[B, sum of D]``, else one after the other, ``[B, D]`` each.
    """

    outputs: Sequence[int]
    dims: Sequence[int]
    counts: Sequence[int]
    batch_major: bool


@frozen(eq=False)
class OutputCodecs:
    """The codecs of each output of a collection, ``None`` where values travel as they are.

    Args:
        results: on the way home.
        gradients: on the way back.
    """

    results: Sequence[Codec | None]
    gradients: Sequence[Codec | None]

    @classmethod
    def of(cls, config: PartConfig) -> OutputCodecs:
        """What the plan says of each output's table, and where it says nothing, what the table's sharder says.

        Raises:
            UnknownPluginError: a codec is not known; the text has the nearest.
            UnsupportedError: a table's partial sums are to travel by a codec that does not carry such.
        """
        tables = config.collection.tables
        chosen = [_config_of(table, config.shardings[table.name]) for table in tables]
        for table, own in zip(tables, chosen, strict=True):
            _check_sums(table, config.shardings[table.name], own.forward)
        names = {name for own in chosen for name in (own.forward_precision, own.backward_precision)}
        # One object a name: neighbours with the same codec are encoded in one call.
        codecs = {name: QCommsConfig(forward_precision=name).forward for name in names}
        by_output = [chosen[output.table] for output in config.collection.outputs]
        return cls(
            results=[codecs[own.forward_precision] for own in by_output],
            gradients=[codecs[own.backward_precision] for own in by_output],
        )

    def wires(self, communicator: Communicator, outputs: Iterable[int]) -> tuple[Wire, Wire]:
        """The wires of results and of gradients, for these outputs."""
        return Wire(communicator, self.results, outputs), Wire(communicator, self.gradients, outputs)


def _config_of(table: TableSpec, sharding: ParameterSharding) -> QCommsConfig:
    config = (sharding.qcomms_config or QCommsConfig()).over(table.qcomms_config)
    try:
        return config.resolved()
    except UnknownPluginError as error:
        raise UnknownPluginError(f"the codecs of table {table.describe()}: {error}") from error


def _check_sums(table: TableSpec, sharding: ParameterSharding, codec: Codec | None) -> None:
    sums = table.pooling is not PoolingType.NONE and sharding.layout.cuts_rows
    if codec is not None and sums and not codec.carries_partial_sums:
        raise UnsupportedError(
            f"table {table.describe()} ({sharding.sharding_type}) is to send results by the codec {codec.name!r}, "
            f"which does not carry partial sums, and its {table.num_embeddings:_} rows are cut. Name another codec in "
            f"constraints[{table.name!r}].qcomms_config, or a sharding type that keeps its rows together"
        )


Peers: TypeAlias = Sequence[Sequence[Segment]]
"""The segments for (or from) each rank, as they lie in a flat buffer."""


@frozen(eq=False)
class Piece:
    """Rows of a flat buffer that one codec encodes in one call.

    Args:
        codec: ``None`` where the values travel as they are.
        start: where in the buffer it begins.
        rows: how many.
        columns: of each.
        stride: from the beginning of one to that of the next.
    """

    codec: Codec | None
    start: int
    rows: int
    columns: int
    stride: int

    @property
    def row_bytes(self) -> int:
        """Bytes of an encoded row."""
        return 4 * self.columns if self.codec is None else self.codec.row_bytes(self.columns)

    @property
    def num_bytes(self) -> int:
        """Bytes on the wire, with what aligns the next piece."""
        return padded(self.rows * self.row_bytes)

    def values(self, buffer: Tensor) -> Tensor:
        """Its rows in a flat buffer: a view ``[rows, columns]``."""
        size, stride = (self.rows, self.columns), (self.stride, 1)
        return buffer.as_strided(size, stride, buffer.storage_offset() + self.start)

    def encoded(self, room: Tensor) -> Tensor:
        """The first bytes of ``room`` as ``[rows, row_bytes]``."""
        return room[: self.rows * self.row_bytes].view(self.rows, self.row_bytes)


class Wire:
    """Collectives over float32 buffers whose pieces travel by the codecs of their outputs.

    Args:
        communicator: the collectives.
        codecs: by output; ``None`` where values travel as they are.
        outputs: those that travel by this wire; all by default.
    """

    def __init__(
        self,
        communicator: Communicator,
        codecs: Sequence[Codec | None],
        outputs: Iterable[int] | None = None,
    ) -> None:
        self._communicator, self._codecs = communicator, codecs
        used = range(len(codecs)) if outputs is None else outputs
        self._is_plain = all(codecs[output] is None for output in used)

    def exchange(
        self,
        sent: Tensor,
        splits: Sequence[int],
        send_splits: Sequence[int],
        peers: Callable[[], tuple[Peers, Peers]],
        *,
        label: str,
    ) -> Transfer:
        """Start one all-to-all.

        Args:
            sent: flat float32.
            splits: elements received from each rank.
            send_splits: elements sent to each.
            peers: what ``sent``, and what is received, consists of; only asked if there are codecs.
            label: what is exchanged, for errors and traces.
        """
        if self._is_plain:
            received = sent.new_empty(sum(splits))
            send = self._communicator.all_to_all
            return Transfer(send(received, sent, splits, send_splits, label=label), received)
        leaving, arriving = (lay_out(own, self._codecs) for own in peers())
        encoded = encode(sent, leaving)
        byte_splits, send_byte_splits = (
            [_num_bytes(own) for own in pieces] for pieces in (arriving, leaving)
        )
        received = encoded.new_empty(sum(byte_splits))
        work = self._communicator.all_to_all(received, encoded, byte_splits, send_byte_splits, label=label)
        return Transfer(work, received, arriving, sum(splits))


class Transfer:
    """A buffer under way."""

    def __init__(
        self,
        work: Work,
        received: Tensor,
        pieces: Sequence[Sequence[Piece]] | None = None,
        num_elements: int = 0,
    ) -> None:
        self._work, self._received, self._pieces, self._num_elements = work, received, pieces, num_elements

    def wait(self) -> Tensor:
        """The flat float32 buffer that arrived; called once."""
        self._work.wait()
        if self._pieces is None:
            return self._received
        return decode(self._received, self._pieces, self._num_elements)


def lay_out(peers: Peers, codecs: Sequence[Codec | None]) -> list[list[Piece]]:
    """The pieces of each peer's segments, in a buffer in which those stand one after the other."""
    start = 0
    pieces: list[list[Piece]] = []
    for segments in peers:
        pieces.append([])
        for segment in segments:
            place = _by_sample if segment.batch_major else _by_slot
            pieces[-1] += [piece for piece in place(segment, codecs, start) if piece.rows * piece.columns]
            start += sum(count * dim for count, dim in zip(segment.counts, segment.dims, strict=True))
    return pieces


def _runs(segment: Segment, codecs: Sequence[Codec | None]) -> Iterator[tuple[Codec | None, bool, list[int]]]:
    """Neighbouring slots that may be encoded in one call: their codec, whether it is elementwise, and the slots."""

    def key(slot: int) -> tuple[Codec | None, int | None]:
        codec = codecs[segment.outputs[slot]]
        return codec, None if codec is None or codec.is_elementwise else segment.dims[slot]

    for (codec, dim), slots in groupby(range(len(segment.dims)), key):
        yield codec, dim is None, list(slots)


def _by_slot(segment: Segment, codecs: Sequence[Codec | None], start: int) -> Iterator[Piece]:
    """The pieces of blocks that stand one after the other."""
    for codec, elementwise, slots in _runs(segment, codecs):
        size = sum(segment.counts[slot] * segment.dims[slot] for slot in slots)
        columns = size if elementwise else segment.dims[slots[0]]
        yield Piece(codec, start, size // columns if columns else 0, columns, columns)
        start += size


def _by_sample(segment: Segment, codecs: Sequence[Codec | None], start: int) -> Iterator[Piece]:
    """The pieces of blocks that stand side by side."""
    rows, width = segment.counts[0] if segment.counts else 0, sum(segment.dims)
    for codec, elementwise, slots in _runs(segment, codecs):
        dim, columns = segment.dims[slots[0]], sum(segment.dims[slot] for slot in slots)
        if elementwise:
            yield Piece(codec, start, rows, columns, width)
        elif columns == width:  # all of them, so that their rows are one stride apart
            yield Piece(codec, start, rows * len(slots), dim, dim)
        else:
            yield from (Piece(codec, start + index * dim, rows, dim, width) for index in range(len(slots)))
        start += columns


def _num_bytes(pieces: Sequence[Piece]) -> int:
    return sum(piece.num_bytes for piece in pieces)


def _rooms(encoded: Tensor, pieces: Sequence[Sequence[Piece]]) -> Iterator[tuple[Piece, Tensor]]:
    """Each piece with its bytes ``[rows, row_bytes]`` in a buffer."""
    flat = [piece for own in pieces for piece in own]
    rooms = encoded.split([piece.num_bytes for piece in flat])
    for piece, room in zip(flat, rooms, strict=True):
        yield piece, piece.encoded(room)


def encode(values: Tensor, pieces: Sequence[Sequence[Piece]]) -> Tensor:
    """The bytes of a flat float32 buffer, piece after piece."""
    encoded = torch.empty(sum(map(_num_bytes, pieces)), dtype=torch.uint8, device=values.device)
    for piece, room in _rooms(encoded, pieces):
        if piece.codec is None:
            room.view(torch.float32).copy_(piece.values(values))
        else:
            piece.codec.encode(piece.values(values), room)
    return encoded


def decode(encoded: Tensor, pieces: Sequence[Sequence[Piece]], num_elements: int) -> Tensor:
    """The flat float32 buffer of ``num_elements`` in these bytes."""
    values = torch.empty(num_elements, dtype=torch.float32, device=encoded.device)
    for piece, room in _rooms(encoded, pieces):
        if piece.codec is None:
            piece.values(values).copy_(room.view(torch.float32))
        else:
            piece.codec.decode(room, piece.values(values))
    return values
