"""The protection of each step: all ranks make the same calls, and send gradients, in one order.

Otherwise ranks would exchange one collection's ids or gradients for another's. Each header carries a checksum of the
calls that its rank made, this one among them. That costs no collective, and no request to the store.

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

_TAG, _BITS = 0x53_48_52_44, 32
"""Tag before the checksum in a header, by which other messages are told from headers; bits of the checksum."""

_NUM_RECENT = 8


class Lockstep:
    """The record of one rank's calls, in order, shared by all collections over the same ranks.

    Attributes:
        header_size: number of integers in every header: the most that any collection needs.
        gradients: the order in which gradients of all collections are sent.
        word: checksum of the calls until now, tagged; the first word of every header.
    """

    def __init__(self) -> None:
        self.header_size = 0
        self.gradients = GradientOrder()
        self._named: Counter[str] = Counter()
        self.word = _TAG << _BITS
        self._recent: deque[str] = deque(maxlen=_NUM_RECENT)

    def join(self, name: str, header_size: int, known: str | None = None) -> str:
        """Add a collection, or go on with one after resharding; return the name by which calls name it.

        Args:
            name: name of the collection, which others may have, too.
            header_size: number of integers of its headers.
            known: name that was returned before resharding.
        """
        self.header_size = max(self.header_size, header_size)
        if known is not None:
            return known
        self._named[name] += 1
        return name if self._named[name] == 1 else f"{name} (no. {self._named[name]})"

    def note(self, call: str) -> tuple[int, str]:
        """Record a call, such as ``"headers of ..."``; return the word before it, and the call."""
        before = self.word
        self.word = _TAG << _BITS | zlib.crc32(call.encode(), self.word & (1 << _BITS) - 1)
        self._recent.append(call)
        return before, call

    def check(self, words: Sequence[int], noted: tuple[int, str], communicator: Communicator) -> None:
        """Check that all ranks' headers are for one collection, and that they made the same calls before.

        Args:
            words: first word of each rank's header, in rank order.
            noted: the result of :meth:`note` for this rank's header.
            communicator: communicator of the ranks, which exchanges the last calls if words differ.

        Raises:
            DistributedError: they are not, or did not; the text is the same on every rank whose header is here.
        """
        if words.count(words[0]) == len(words) and words[0] >> _BITS == _TAG:
            return
        names = communicator.global_ranks
        for rank, word in zip(names, words, strict=True):
            if word >> _BITS != _TAG:
                raise DistributedError(
                    f"what arrived from rank {rank} in the exchange of headers is no header: it makes another call. "
                    f"The last calls here: {', '.join(self._recent)}. {_SAME_ORDER}"
                )
        told = communicator.all_gather_objects((*noted, ", ".join(self._recent)))
        if len({before for before, _, _ in told}) == 1:
            calls = by_rank([call for _, call, _ in told], names)
            raise DistributedError(f"the ranks make different calls: {calls}. {_SAME_ORDER}, {_ALL_OR_NONE}")
        raise DistributedError(
            "the ranks made different calls before this batch, so that they exchanged one's gradients for another's "
            f"and the weights are wrong: {by_rank([recent for _, _, recent in told], names)}. {_SAME_ORDER}"
        )


_SAME_ORDER = "Every rank must call the same collections, and go back through them, in the same order"
_ALL_OR_NONE = "and all with gradients or none"


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
