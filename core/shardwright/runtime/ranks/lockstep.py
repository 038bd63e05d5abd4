"""The protection of each step: all ranks make the same calls, and send gradients, in one order.

Otherwise ranks would exchange one collection's ids or gradients for another's. Each header names its collection, and
carries a checksum of the calls that its rank made before. That costs no collective, and no request to the store.

Ranks may use the outputs of their lookups in different orders, and so get their gradients in different orders. All send
them in one order: the reverse order of the lookups.
"""

from __future__ import annotations

import weakref
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence

import torch

from shardwright.contracts.comm_backend import Communicator
from shardwright.errors import DistributedError
from shardwright.runtime.ranks.together import by_rank

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
        checksum: checksum of the calls until now.
    """

    def __init__(self) -> None:
        self.header_size = 0
        self.gradients = GradientOrder()
        self._names: list[str] = []
        self._named: Counter[str] = Counter()
        self.checksum = 0
        self._recent: deque[str] = deque(maxlen=_NUM_RECENT)

    def join(self, name: str, header_size: int, number: int | None = None) -> int:
        """Add a collection, or go on with one after resharding; return its number, by which headers name it.

        Args:
            name: name of the collection.
            header_size: number of integers of its headers.
            number: number of the collection before resharding.
        """
        self.header_size = max(self.header_size, header_size)
        if number is not None:
            return number
        self._named[name] += 1
        self._names.append(name if self._named[name] == 1 else f"{name} (no. {self._named[name]})")
        return len(self._names) - 1

    def note(self, what: str, number: int) -> None:
        """Record a call: ``what`` of the collection of that number."""
        call = f"{what} of {self._names[number]}"
        self.checksum = zlib.crc32(call.encode(), self.checksum)
        self._recent.append(call)

    def name(self, number: int) -> str:
        """Name of the collection of that number."""
        return self._names[number]

    def words(self, number: int, *, with_gradients: bool = True) -> tuple[int, int]:
        """The collection's number, tagged, and the checksum of the calls until now.

        Args:
            number: number of the collection.
            with_gradients: results will be differentiable, so that a backward pass may follow.
        """
        return _TAG | number | (0 if with_gradients else _WITHOUT_GRADIENTS), self.checksum

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


_NO_PASS = -1


class GradientOrder:
    """The lookups of one process whose gradients were not sent yet, by number.

    Each has its owner, an object that lives as long as gradients may come, the backward pass in which they came, and
    the function that sends them.
    """

    def __init__(self) -> None:
        self._last = 0
        self._open: dict[int, tuple[weakref.ref[object], int, Callable[[], None] | None]] = {}

    def number(self) -> int:
        """Give a lookup its number; numbers rise."""
        if (
            torch._C._current_graph_task_id() == _NO_PASS
        ):  # a pass that failed left gradients unsent: drop them
            self._open = {number: own for number, own in self._open.items() if own[2] is None}
        self._last += 1
        return self._last

    def expect(self, number: int, owner: object) -> None:
        """Note that a lookup's outputs are used: gradients will come, unless ``owner`` is freed before."""
        self._open[number] = weakref.ref(owner), _NO_PASS, None

    def are_there(self, number: int, owner: object, send: Callable[[], None]) -> None:
        """Note that a lookup's gradients are there, and send them once those of all later lookups in use were sent."""
        this_pass = torch._C._current_graph_task_id()
        self._open[number] = weakref.ref(owner), this_pass, send
        for other in sorted(self._open, reverse=True):
            alive, backward_pass, _ = self._open[other]
            if alive() is None:
                del self._open[other]
            elif backward_pass != this_pass:
                return  # its gradients belong to another pass, which may be still to come
            else:
                self.need(other)

    def need(self, number: int) -> None:
        """Send a lookup's gradients now if they are there, because they are about to be waited for."""
        _, _, send = self._open.pop(number, (None, _NO_PASS, None))
        if send is not None:
            send()
