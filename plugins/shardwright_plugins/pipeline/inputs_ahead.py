"""Exchanges of inputs that begin before their forward pass."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TypeAlias

import torch
from attrs import frozen

from shardwright.errors import DistributedError
from shardwright.runtime.ranks.devices import has_streams
from shardwright.sparse import KeyedJaggedTensor
from shardwright_plugins.pipeline.batch_tree import is_same, record_stream

if TYPE_CHECKING:
    from shardwright.runtime.step.engine import EngineStep


Observer: TypeAlias = Callable[[KeyedJaggedTensor], None]


@frozen(eq=False)
class SideStream:
    """A second stream of the accelerator, for inputs that arrive while the main stream computes.

    Args:
        device: device of the inputs.
        stream: the stream; ``None`` on a device without streams, where all methods do nothing.
    """

    device: torch.device
    stream: torch.Stream | None

    @classmethod
    def on(cls, device: torch.device) -> SideStream:
        """Make a side stream on ``device``, if it has streams."""
        return cls(device, torch.Stream(device) if has_streams(device) else None)

    def active(self) -> AbstractContextManager[object]:
        """A context in which work is queued on this stream."""
        return nullcontext() if self.stream is None else self.stream

    def follow_main(self) -> None:
        """Make this stream wait for all work queued so far on the current stream."""
        if self.stream is not None:
            self.stream.wait_stream(torch.accelerator.current_stream(self.device))

    def join(self) -> torch.Stream | None:
        """Make the current stream wait for this one; return the current stream, or ``None`` if there are none."""
        if self.stream is None:
            return None
        current = torch.accelerator.current_stream(self.device)
        current.wait_stream(self.stream)
        return current


@frozen(eq=False)
class Begun:
    """An exchange under way.

    Args:
        features: the batch whose ids are exchanged.
        step: the engine's step of that batch.
        side: the stream on which the exchange began.
    """

    features: KeyedJaggedTensor
    step: EngineStep
    side: SideStream

    def arrive(self) -> EngineStep:
        """Wait for the ids, so that the current stream may look them up."""
        with self.side.active():
            tensors = self.step.receive()
        current = self.side.join()
        if current is not None:
            record_stream(tensors, current)
        return self.step

    def prefetch(self) -> None:
        """Have kernels bring the rows of its ids near, beside the current stream; see :meth:`EngineStep.prefetch`."""
        with self.side.active():
            self.step.prefetch()


class InputsAhead:
    """The exchanges of one collection that were begun, in the order of the forward passes they are for.

    Args:
        observer: function called with the features that each forward pass is given.
        is_strict: a forward pass with other features than the next exchange's is an error; else it begins its own.
        looked_up: function called after the ids of an exchange were looked up and results are on their way.
    """

    def __init__(
        self, observer: Observer, *, is_strict: bool, looked_up: Callable[[], None] = lambda: None
    ) -> None:
        self._observer, self._is_strict, self._looked_up = observer, is_strict, looked_up
        self._is_taken = False
        self._begun: deque[Begun] = deque()

    def __len__(self) -> int:
        return len(self._begun)

    def put(self, begun: Begun) -> None:
        """Keep an exchange whose payload is under way."""
        self._begun.append(begun)

    def take(self, features: KeyedJaggedTensor) -> EngineStep | None:
        """Take the exchange of ``features`` and wait for its ids; ``None`` if none was begun.

        Raises:
            DistributedError: the next exchange has other features, and the exchanges are strict.
        """
        is_next = bool(self._begun) and is_same(self._begun[0].features, features)
        if self._begun and not is_next and self._is_strict:
            raise DistributedError(
                "the exchange of the ids that stand where the first batch had this collection's input was begun before "
                "the forward pass, which now gives the collection others: give it the KeyedJaggedTensor of the batch "
                "that stands there, or train with TrainPipelineBase"
            )
        self._observer(features)
        self._is_taken = is_next
        return self.next() if is_next else None

    def has_looked_up(self) -> None:
        """Note that the collection looked up the features it was last given."""
        if self._is_taken:
            self._is_taken = False
            self._looked_up()

    def next(self) -> EngineStep:
        """Take the next exchange, of any features, and wait for its ids."""
        return self._begun.popleft().arrive()

    def discard(self) -> None:
        """Wait for all exchanges under way, and forget them."""
        while self._begun:
            self.next()


def call_weakly(method: weakref.WeakMethod[Callable[[], None]]) -> None:
    """Call a method if its object still lives."""
    own = method()
    if own is not None:
        own()
