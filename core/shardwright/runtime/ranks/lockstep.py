"""Whether all ranks make the same calls in the same order.

Ranks that did not would exchange one collection's ids or gradients for another's. So each header says which collection
it is for, and carries a checksum of the calls that its rank made before; that costs no collective.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Sequence

from shardwright.contracts.comm_backend import Communicator
from shardwright.errors import DistributedError
from shardwright.runtime.ranks.gradient_order import GradientOrder

_TAG = 0x53_48_52_44 << 24
"""Stands before the collection's number in a header, so that what is no header is known as such."""

_WITHOUT_GRADIENTS = 1 << 23
"""Stands beside the number in headers of a forward pass that no backward pass will follow."""

_NUM_RECENT = 8


class Lockstep:
    """The calls that one rank makes, in order; shared by all collections over the same ranks.

    Attributes:
        header_size: integers of every header: as many as the collection with the most needs.
        gradients: the order in which those of all collections are sent.
    """

    def __init__(self) -> None:
        self.header_size = 0
        self.gradients = GradientOrder()
        self._names: list[str] = []
        self._named: Counter[str] = Counter()
        self._checksum = 0
        self._recent: deque[str] = deque(maxlen=_NUM_RECENT)
        self._places: Counter[str] = Counter()

    def join(self, name: str, header_size: int) -> int:
        """Take a collection in; returns its number, by which headers call it."""
        self.header_size = max(self.header_size, header_size)
        self._named[name] += 1
        self._names.append(name if self._named[name] == 1 else f"{name} (no. {self._named[name]})")
        return len(self._names) - 1

    def rejoin(self, number: int, header_size: int) -> int:
        """Go on with a collection that is sharded otherwise from now on, under its number."""
        self.header_size = max(self.header_size, header_size)
        return number

    def note(self, what: str, number: int) -> None:
        """Remember a call: ``what`` of the collection of that number."""
        call = f"{what} of {self._names[number]}"
        self._checksum = zlib.crc32(call.encode(), self._checksum)
        self._recent.append(call)

    def place(self, what: str) -> str:
        """Where the ranks meet: a name that no meeting had before, and all give to the same one."""
        self._places[what] += 1
        return f"{what}/{self._places[what]}"

    def name(self, number: int) -> str:
        """What the collection of that number is called."""
        return self._names[number]

    @property
    def checksum(self) -> int:
        """Of the calls until now."""
        return self._checksum

    def words(self, number: int, *, with_gradients: bool = True) -> tuple[int, int]:
        """The collection's number, tagged, and the checksum of the calls until now.

        Args:
            number: the collection's.
            with_gradients: its results will be differentiable, so that a backward pass may follow.
        """
        return _TAG | number | (0 if with_gradients else _WITHOUT_GRADIENTS), self._checksum

    def check_collections(self, tagged: Sequence[int], names: Sequence[int] | None = None) -> None:
        """Check that all ranks' headers are for one collection.

        Args:
            tagged: the first of each rank's words, in rank order.
            names: by what the ranks are named; their places in ``tagged`` by default.

        Raises:
            DistributedError: they are not; the same text on every rank that is in a header.
        """
        if tagged.count(tagged[0]) == len(tagged) and tagged[0] & _TAG == _TAG:
            return
        numbers = [other - _TAG for other in tagged]
        for rank, number in zip(names or range(len(numbers)), numbers, strict=True):
            if number & ~_WITHOUT_GRADIENTS not in range(len(self._names)):
                raise DistributedError(
                    f"what arrived from rank {rank} in the exchange of headers is no header: it makes another call. "
                    f"The last calls here: {', '.join(self._recent)}. {_SAME_ORDER}"
                )
        raise DistributedError(
            f"the ranks called different collections: {by_rank([self._called(number) for number in numbers], names)}. "
            f"{_SAME_ORDER}, and all with gradients or none"
        )

    def _called(self, number: int) -> str:
        """What a header's number says was called."""
        name = self._names[number & ~_WITHOUT_GRADIENTS]
        return f"{name} without gradients" if number & _WITHOUT_GRADIENTS else name

    def check_calls(self, checksums: Sequence[int], communicator: Communicator) -> None:
        """Check that all ranks made the same calls before their headers.

        Args:
            checksums: the second of each rank's words, in rank order.
            communicator: exchanges the last calls where they differ.

        Raises:
            DistributedError: they did not; the same text on every rank.
        """
        if checksums.count(checksums[0]) == len(checksums):
            return
        recent = communicator.all_gather_objects(", ".join(self._recent))
        raise DistributedError(
            "the ranks made different calls before this batch, so that they exchanged one's gradients for another's "
            f"and the weights are wrong: {by_rank(recent, communicator.global_ranks)}. {_SAME_ORDER}"
        )


_SAME_ORDER = "Every rank must call the same collections, and go back through them, in the same order"


def by_rank(texts: Sequence[str], names: Sequence[int] | None = None) -> str:
    """Texts in rank order as ``ranks 0, 1: text; rank 2: another``.

    Args:
        texts: one of each rank.
        names: by what the ranks are named; their places in ``texts`` by default.
    """
    ranks: dict[str, list[int]] = {}
    for rank, text in zip(names or range(len(texts)), texts, strict=True):
        ranks.setdefault(text, []).append(rank)
    return "; ".join(f"{name_ranks(own)}: {text}" for text, own in ranks.items())


def name_ranks(ranks: Sequence[int]) -> str:
    """Ranks for a text: ``rank 1``, ``ranks 0, 2``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
