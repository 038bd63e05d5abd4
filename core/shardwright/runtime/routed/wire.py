"""The wire: messages between ranks, made of segments that travel as float32 or by a codec.

Legend: P segments, W ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from shardwright.contracts.codec import Codec
from shardwright.contracts.comm_backend import Communicator, Work
from shardwright.planning.arrays import Ints
from shardwright.runtime.step.segments import Dealing, Interleaving, LastResult, total

_FLOAT_BYTES = 4
_ALIGNMENT = 8
"""Bytes to whose multiples the buffers of codecs are aligned."""
_UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
"""Dtype by which bytes are copied, by its size: the largest that divides all pieces."""


@frozen(eq=False)
class WireSegment:
    """A segment of every message: rows of one width, which one codec writes.

    Args:
        codec: codec that writes the rows; ``None`` if they travel as float32.
        width: columns of a row; any number if the codec writes each value by itself.
    """

    codec: Codec | None
    width: int

    @property
    def row_bytes(self) -> int:
        """Bytes of a row on the wire."""
        return self.width * _FLOAT_BYTES if self.codec is None else self.codec.row_bytes(self.width)

    def encoded(self, values: Tensor) -> Tensor:
        """Encode rows, contiguous or not, as bytes."""
        values = values.contiguous()
        if self.codec is None:
            return _aligned(values.view(torch.uint8))
        rows = values.view(values.numel() // self.width, self.width)
        encoded = torch.empty(len(rows), self.row_bytes, dtype=torch.uint8, device=values.device)
        self.codec.encode(rows, encoded)
        return encoded.view(-1)

    def decoded(self, encoded: Tensor) -> Tensor:
        """Decode bytes of :meth:`encoded` to flat float32 values."""
        encoded = _aligned(encoded)
        if self.codec is None:
            return encoded.view(torch.float32)
        rows = encoded.view(encoded.numel() // self.row_bytes, self.row_bytes)
        values = torch.empty(len(rows), self.width, dtype=torch.float32, device=encoded.device)
        self.codec.decode(rows, values)
        return values.view(-1)


def _aligned(encoded: Tensor) -> Tensor:
    """Bytes that may be viewed as numbers: a copy where they are a part of others that begins anywhere."""
    return encoded.clone() if encoded.storage_offset() % _ALIGNMENT else encoded


class Transfer:
    """Messages under way.

    Args:
        work: the collective under way.
        received: buffer that the messages arrive in.
        parts: the segments of the messages of all ranks.
        segments: segments to decode; ``None`` if all values are float32.
        unit: dtype by whose elements the segments are counted, if they are to be decoded.
    """

    def __init__(
        self,
        work: Work,
        received: Tensor,
        parts: Dealing,
        segments: Sequence[WireSegment] | None,
        unit: torch.dtype,
    ) -> None:
        self._work, self._received, self._parts = work, received, parts
        self._segments, self._unit = segments, unit

    def wait(self) -> list[Tensor]:
        """Wait, and return the values of each segment, flat float32, rank after rank; called once."""
        self._work.wait()
        if self._segments is None:
            return self._parts.of(self._received)
        parts = self._parts.of(self._received.view(self._unit))
        return [
            segment.decoded(own.view(torch.uint8)) for segment, own in zip(self._segments, parts, strict=True)
        ]


class Wire:
    """A sender of messages of some segments.

    Args:
        communicator: communicator that makes the collectives.
        segments: segments of each message, in order.
    """

    def __init__(self, communicator: Communicator, segments: Sequence[WireSegment]) -> None:
        self._communicator, self._segments = communicator, segments
        self._is_plain = all(segment.codec is None for segment in segments)
        self.sends_as_it_is = self._is_plain and len(segments) == 1
        # Maker of memory for a part: such as it is sent from without a copy, where the part is all that is sent.
        self.room: Callable[..., Tensor] = (
            communicator.room if self.sends_as_it_is else partial(torch.empty, dtype=torch.float32)
        )
        self._widths = np.array([[segment.width] for segment in segments])
        self._row_bytes = np.array([[segment.row_bytes] for segment in segments])
        self._last = LastResult()

    def exchange(self, sent: Sequence[Tensor], leaving: Ints, arriving: Ints, *, label: str) -> Transfer:
        """Start one all-to-all.

        Args:
            sent: values of each segment, flat float32, rank after rank.
            leaving: number of values of each segment to each rank, ``[P, W]``.
            arriving: number of values of each segment from each rank, ``[P, W]``.
            label: name of the exchange in errors and traces.
        """
        order, send_splits, parts, splits, unit = self._last.of(self._loads, leaving, arriving)
        segments = None if self._is_plain else self._segments
        if segments is None:
            packed = order.of(sent)
        else:
            coded = [segment.encoded(own).view(unit) for segment, own in zip(segments, sent, strict=True)]
            packed = order.of(coded).view(torch.uint8)
        received = packed.new_empty(sum(splits))
        work = self._communicator.all_to_all(received, packed, splits, send_splits, label=label)
        return Transfer(work, received, parts, segments, unit)

    def _loads(
        self, leaving: Ints, arriving: Ints
    ) -> tuple[Interleaving, tuple[int, ...], Dealing, tuple[int, ...], torch.dtype]:
        """Order and length of each message that leaves, then of those that arrive; and the dtype that is ordered.

        Lengths are numbers of values, or bytes of codecs, which are ordered in the largest units that divide them.
        """
        both, unit = np.stack([leaving, arriving]), 1
        if not self._is_plain:  # rows of each segment times its bytes per row
            both = both // self._widths * self._row_bytes
            unit = int(np.gcd.reduce(both.reshape(-1), initial=_ALIGNMENT))
        splits = [tuple(own) for own in total(both, axis=1).tolist()]
        leaving, arriving = both // unit
        return Interleaving(leaving), splits[0], Dealing(arriving), splits[1], _UNITS[unit]
