"""One order for the gradients of several lookups, on all ranks.

Ranks may use the outputs of their lookups in different orders, and so get their gradients in different orders. But all
must exchange them in one order: the reverse order of the lookups.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from attrs import define

_NO_PASS = -1


@define(eq=False)
class _Open:
    """A lookup whose gradients were not sent yet.

    Args:
        owner: object that lives as long as the gradients may come.
        send: function that sends them, once they are there.
        backward_pass: number of the backward pass in which they came.
    """

    owner: weakref.ref[object]
    send: Callable[[], None] | None = None
    backward_pass: int = _NO_PASS


class GradientOrder:
    """The lookups of one process whose gradients may still come, by number."""

    def __init__(self) -> None:
        self._last, self._open = 0, dict[int, _Open]()

    def number(self) -> int:
        """Give a lookup its number; numbers rise."""
        if (
            torch._C._current_graph_task_id() == _NO_PASS
        ):  # what a pass that failed left unsent is not sent any more
            self._open = {number: own for number, own in self._open.items() if own.send is None}
        self._last += 1
        return self._last

    def expect(self, number: int, owner: object) -> None:
        """Note that a lookup's outputs are used: gradients will come, unless ``owner`` is freed before."""
        self._open[number] = _Open(weakref.ref(owner))

    def are_there(self, number: int, owner: object, send: Callable[[], None]) -> None:
        """Note that a lookup's gradients are there, and send them once those of all later lookups in use were sent."""
        this_pass = torch._C._current_graph_task_id()
        self._open[number] = _Open(weakref.ref(owner), send, this_pass)
        for other in sorted(self._open, reverse=True):
            if self._open[other].owner() is None:
                del self._open[other]
            elif self._open[other].backward_pass != this_pass:
                return  # its gradients belong to another pass, which may be still to come
            else:
                self.need(other)

    def need(self, number: int) -> None:
        """Send a lookup's gradients now if they are there, because they are about to be waited for."""
        found = self._open.pop(number, None)
        if found is not None and found.send is not None:
            found.send()
