"""The contract of a codec: how vectors are compressed to be sent between ranks, and read again."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from shardwright.contracts.names import OpenNames

if TYPE_CHECKING:
    from torch import Tensor


class Codec(ABC, metaclass=OpenNames):
    """Writes blocks of float32 vectors ``[n, D]`` as bytes ``[n, row_bytes(D)]``, and reads them again.

    Results of lookups are sent encoded, and so are gradients; each direction has a codec of
    its own, for each table. A codec object has no state, and what one rank encodes every other must decode: the bytes
    must not depend on the device or on what else is installed.

    ``TorchRec``'s ``CommType.FP16`` is ``Codec.FP16`` here: the name of a registered codec.
    """

    name: ClassVar[str]
    api: ClassVar[int] = 1
    aliases: ClassVar[tuple[str, ...]] = ()
    is_identity: ClassVar[bool] = False
    """True if the bytes are those of the float32 values: such blocks are sent from where they lie."""
    is_elementwise: ClassVar[bool] = False
    """True if each value is written by itself, ``row_bytes(D) == D * row_bytes(1)``: neighbouring blocks of whatever
    shape are then encoded in one call."""
    carries_partial_sums: ClassVar[bool] = True
    """True if partial sums may travel by it: those of row parts are decoded and added at float32, and where sums are
    made inside a host they are encoded once more, so that each leg adds its error."""

    @abstractmethod
    def row_bytes(self, num_columns: int) -> int:
        """The bytes of one encoded vector; asked by planner and engine, so without torch."""

    @abstractmethod
    def encode(self, values: Tensor, encoded: Tensor) -> None:
        """Write ``values`` into ``encoded``.

        Args:
            values: ``[n, D]`` float32, rows perhaps not side by side in memory; ``n`` may be 0. Not to be changed.
            encoded: ``[n, row_bytes(D)]`` uint8, contiguous, beginning at a multiple of 8 bytes.
        """

    @abstractmethod
    def decode(self, encoded: Tensor, values: Tensor) -> None:
        """Read ``encoded`` into ``values``; shapes and dtypes as in :meth:`encode`."""

    @abstractmethod
    def error_bound(self, values: Tensor) -> Tensor:
        """Bound the error of each value after a round trip: ``[n, D]`` float32, infinite where nothing is promised.

        Args:
            values: ``[n, D]`` float32, as given to :meth:`encode`.
        """


CommType = Codec
"""TorchRec's name: ``CommType.FP16`` names a registered codec."""
