"""One rank of a world that is not there: what a step costs a rank among many, measured in one process.

Every other rank is pretended to have a batch of the same form as this one: headers and ids that come from it are those
that this rank sends to itself, and results and gradients are zeros. So sizes, bytes, messages and the rank's own work
are those of a world whose ranks all do the same; the numbers that come out mean nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor

from shardwright.contracts.comm_backend import Communicator, Work
from shardwright.runtime.ranks.alone import CompletedWork
from shardwright.runtime.ranks.environment import ShardingEnv

T = TypeVar("T")


class PretendedCommunicator(Communicator):
    """The collectives of one rank of a pretended world.

    Args:
        rank: this rank.
        world_size: the number of ranks that are pretended, this one included.

    Attributes:
        labels: the label of every all-to-all, in order.
        sent_bytes: bytes that left this rank, by label.
        messages: pieces that are not empty and left this rank, by label.
        gathered_bytes: bytes that gathering objects would have brought here.
        own_seconds: processor time that pretending took, which is none of the rank's.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.own_seconds = 0.0
        self.forget()

    def forget(self) -> None:
        """Begin counting anew."""
        self.labels: list[str] = []
        self.sent_bytes: dict[str, int] = {}
        self.messages: dict[str, int] = {}
        self.gathered_bytes = 0

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        *,
        label: str = "",
    ) -> Work:
        started = time.process_time()
        self._count(label, input.element_size(), input_splits)
        self._answer(output, input, output_splits, input_splits)
        self.own_seconds += time.process_time() - started
        return CompletedWork()

    def _count(self, label: str, element_size: int, input_splits: Sequence[int]) -> None:
        others = [size for rank, size in enumerate(input_splits) if rank != self.rank]
        self.labels.append(label)
        self.sent_bytes[label] = self.sent_bytes.get(label, 0) + element_size * sum(others)
        self.messages[label] = self.messages.get(label, 0) + sum(1 for size in others if size)

    def _answer(
        self, output: Tensor, input: Tensor, output_splits: Sequence[int], input_splits: Sequence[int]
    ) -> None:
        """Fill what arrives: this rank's own piece where it has the size that is expected, else zeros."""
        start = sum(input_splits[: self.rank])
        size_of_mine = input_splits[self.rank]
        mine = input[start : start + size_of_mine]
        if all(size == size_of_mine for size in output_splits):
            output.view(self.world_size, -1).copy_(mine)
            return
        start = 0
        output.zero_()
        for size in output_splits:
            if size == size_of_mine:
                output[start : start + size] = mine
            start += size

    def broadcast(self, tensor: Tensor, source: int) -> None:
        """Nothing: this rank's values are everybody's."""

    def all_gather_objects(self, value: Any) -> list[Any]:
        import pickle

        self.gathered_bytes += len(pickle.dumps(value)) * self.world_size
        return [value] * self.world_size

    def broadcast_object(self, value: Any, source: int = 0) -> Any:
        return value

    def barrier(self) -> None:
        """Nobody else is to come."""


def pretended_env(
    world_size: int, *, rank: int = 0, local_world_size: int | None = None
) -> tuple[ShardingEnv, PretendedCommunicator]:
    """The environment of one rank of a pretended world, and its communicator.

    Args:
        world_size: the number of ranks.
        rank: number of this rank.
        local_world_size: ranks on one host; all by default.
    """
    communicator = PretendedCommunicator(rank, world_size)
    return ShardingEnv(communicator, local_world_size=local_world_size or world_size), communicator


def timed(communicator: PretendedCommunicator, work: Callable[..., T], *arguments: Any) -> tuple[float, T]:
    """Processor seconds of this process that a call takes, without those of pretending; and what it returns."""
    pretended, started = communicator.own_seconds, time.process_time()
    result = work(*arguments)
    return time.process_time() - started - (communicator.own_seconds - pretended), result
