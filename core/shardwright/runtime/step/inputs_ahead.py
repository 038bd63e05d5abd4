"""Input exchanges that were begun before the forward pass they are for."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, TypeAlias

import torch
from attrs import frozen

from shardwright.errors import DistributedError
from shardwright.runtime.ranks.devices import is_host
from shardwright.runtime.ranks.lockstep import name_ranks
from shardwright.runtime.step.batch_tree import is_same
from shardwright.runtime.step.inputs import Status
from shardwright.sparse import KeyedJaggedTensor

if TYPE_CHECKING:
    from shardwright.runtime.step.engine import EngineStep


def who_ended(statuses: Sequence[Status], names: Sequence[int] | None = None) -> str:
    """Which ranks do not go on, and why.

    Args:
        statuses: what each rank says.
        names: by what the ranks are named; their places in ``statuses`` by default.
    """
    names = names or range(len(statuses))
    stopped = [rank for rank, status in zip(names, statuses, strict=True) if status is Status.STOPPED]
    if stopped:
        return f"{name_ranks(stopped)} failed in the forward pass of this step or the last; the error there says why"
    ended = [
        rank
        for rank, status in zip(names, statuses, strict=True)
        if status in (Status.NO_BATCH, Status.EMPTY_BATCH)
    ]
    return f"the data of {name_ranks(ended)} has ended"


Observer: TypeAlias = Callable[[KeyedJaggedTensor], None]


@frozen(eq=False)
class SideStream:
    """A stream of the accelerator on which inputs come while the main one computes; on a CPU nothing.

    Args:
        device: of the inputs.
        stream: ``None`` on a CPU.
    """

    device: torch.device
    stream: torch.Stream | None

    @classmethod
    def on(cls, device: torch.device) -> SideStream:
        """A stream of its own on ``device``, where there are streams."""
        return cls(device, None if is_host(device) else torch.Stream(device))

    def active(self) -> AbstractContextManager[object]:
        """What is done inside, is done there."""
        return nullcontext() if self.stream is None else self.stream

    def follow_main(self) -> None:
        """Let it wait for what the current stream has been given until now."""
        if self.stream is not None:
            self.stream.wait_stream(torch.accelerator.current_stream(self.device))

    def join(self) -> torch.Stream | None:
        """Let the current stream wait for it; returns the current stream."""
        if self.stream is None:
            return None
        current = torch.accelerator.current_stream(self.device)
        current.wait_stream(self.stream)
        return current


@frozen(eq=False)
class Begun:
    """An exchange under way.

    Args:
        features: what it is for.
        step: the engine's.
        side: where it was begun.
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
            for tensor in tensors:
                tensor.record_stream(current)
        return self.step


class InputsAhead:
    """The exchanges of one collection that were begun, in the order of the forward passes they are for.

    Args:
        observer: called with what each forward pass is given.
        is_strict: a forward pass that is given something else than the next of them is an error; else it begins anew.
        looked_up: called when what one of them brought was looked up, and results are on their way.
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
        """The exchange for ``features``, arrived; ``None`` if none was begun.

        Raises:
            DistributedError: another one is next, and the exchanges are strict.
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
        """The collection looked up what it was last given."""
        if self._is_taken:
            self._is_taken = False
            self._looked_up()

    def next(self) -> EngineStep:
        """The next exchange, arrived, whoever it is for."""
        return self._begun.popleft().arrive()

    def discard(self) -> None:
        """Wait for what is under way, and forget it."""
        while self._begun:
            self.next()
