"""A check that all ranks make the same calls in the same order.

Otherwise ranks would exchange one collection's ids or gradients for another's. So each header names its collection, and
carries a checksum of the calls that its rank made before. That costs no collective.
"""

from __future__ import annotations

import zlib
from collections import Counter, deque
from collections.abc import Sequence

from shardwright.contracts.comm_backend import Communicator
from shardwright.errors import DistributedError
from shardwright.runtime.ranks.gradient_order import GradientOrder

_TAG = 0x53_48_52_44 << 24
"""Tag before the collection's number in a header, by which other messages are told from headers."""

_WITHOUT_GRADIENTS = 1 << 23
"""Flag beside the number in headers of a forward pass that no backward pass will follow."""

_NUM_RECENT = 8


class Lockstep:
    """The record of one rank's calls, in order, shared by all collections over the same ranks.

    Attributes:
        header_size: number of integers in every header: the most that any collection needs.
        gradients: the order in which gradients of all collections are sent.
    """

    def __init__(self) -> None:
        self.header_size = 0
        self.gradients = GradientOrder()
        self._names: list[str] = []
        self._named: Counter[str] = Counter()
        self._checksum = 0
        self._recent: deque[str] = deque(maxlen=_NUM_RECENT)

    def join(self, name: str, header_size: int) -> int:
        """Add a collection; return its number, by which headers name it."""
        self.header_size = max(self.header_size, header_size)
        self._named[name] += 1
        self._names.append(name if self._named[name] == 1 else f"{name} (no. {self._named[name]})")
        return len(self._names) - 1

    def rejoin(self, number: int, header_size: int) -> int:
        """Go on with a collection that is sharded otherwise from now on, under its number."""
        self.header_size = max(self.header_size, header_size)
        return number

    def note(self, what: str, number: int) -> None:
        """Record a call: ``what`` of the collection of that number."""
        call = f"{what} of {self._names[number]}"
        self._checksum = zlib.crc32(call.encode(), self._checksum)
        self._recent.append(call)

    def name(self, number: int) -> str:
        """Name of the collection of that number."""
        return self._names[number]

    @property
    def checksum(self) -> int:
        """Checksum of the calls until now."""
        return self._checksum

    def words(self, number: int, *, with_gradients: bool = True) -> tuple[int, int]:
        """The collection's number, tagged, and the checksum of the calls until now.

        Args:
            number: number of the collection.
            with_gradients: results will be differentiable, so that a backward pass may follow.
        """
        return _TAG | number | (0 if with_gradients else _WITHOUT_GRADIENTS), self._checksum

    def check_collections(self, tagged: Sequence[int], names: Sequence[int] | None = None) -> None:
        """Check that all ranks' headers are for one collection.

        Args:
            tagged: first word of each rank's header, in rank order.
            names: numbers that errors name the ranks by; their places in ``tagged`` by default.

        Raises:
            DistributedError: they are not; the text is the same on every rank whose header is here.
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
        """Describe the call that a header's number stands for."""
        name = self._names[number & ~_WITHOUT_GRADIENTS]
        return f"{name} without gradients" if number & _WITHOUT_GRADIENTS else name

    def check_calls(self, checksums: Sequence[int], communicator: Communicator) -> None:
        """Check that all ranks made the same calls before their headers.

        Args:
            checksums: second word of each rank's header, in rank order.
            communicator: communicator that exchanges the last calls, if checksums differ.

        Raises:
            DistributedError: they did not; the text is the same on every rank.
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
    """Join the ranks' texts as ``ranks 0, 1: text; rank 2: another``.

    Args:
        texts: text of each rank, in rank order.
        names: numbers to name the ranks by; their places in ``texts`` by default.
    """
    ranks: dict[str, list[int]] = {}
    for rank, text in zip(names or range(len(texts)), texts, strict=True):
        ranks.setdefault(text, []).append(rank)
    return "; ".join(f"{name_ranks(own)}: {text}" for text, own in ranks.items())


def name_ranks(ranks: Sequence[int]) -> str:
    """Name ranks in a text: ``rank 1``, ``ranks 0, 2``."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
