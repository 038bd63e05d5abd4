"""Ranks simulated by threads of one process, so that a sharded module can be tested without a cluster."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from shardwright.contracts.comm_backend import Communicator, Work
from shardwright.errors import DistributedError
from shardwright.runtime.ranks.alone import CompletedWork
from shardwright.runtime.ranks.environment import ShardingEnv

T = TypeVar("T")

_TIMEOUT_S = 60.0


class _LeftAlone(DistributedError):
    """What a rank gets because another one failed."""


class _Board:
    """Where the ranks of one world meet: each posts a value, all read all."""

    def __init__(self, world_size: int, timeout_s: float) -> None:
        self._values: list[Any] = [None] * world_size
        self._barrier = threading.Barrier(world_size, timeout=timeout_s)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        self._values[rank] = value
        try:
            self._barrier.wait()
            values = list(self._values)
            self._barrier.wait()
        except threading.BrokenBarrierError:
            raise _LeftAlone(
                f"simulated rank {rank}: another rank failed or did not come to this collective"
            ) from None
        return values

    def abort(self) -> None:
        self._barrier.abort()


class SimulatedCommunicator(Communicator):
    """The collectives of one simulated rank; counts them and the bytes they carry.

    Attributes:
        labels: the label of every all-to-all, in order; others are noted as ``"object"``, ``"tensor"``, ``"barrier"``.
        sent_bytes: for every all-to-all, in order, its label and the bytes sent to each rank (this one included).
    """

    def __init__(self, board: _Board, rank: int, world_size: int) -> None:
        self.rank, self.world_size = rank, world_size
        self.labels: list[str] = []
        self.sent_bytes: list[tuple[str, list[int]]] = []
        self._board = board

    def all_to_all(  # noqa: D102 - described in the base class
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        *,
        label: str = "",
    ) -> Work:
        self.labels.append(label)
        self.sent_bytes.append((label, [count * input.element_size() for count in input_splits]))
        sent = [piece.clone() for piece in torch.split(input, list(input_splits))]
        posted = self._board.exchange(self.rank, (label, sent))
        if len({other for other, _ in posted}) != 1:
            raise DistributedError(f"ranks are in different collectives: {[other for other, _ in posted]}")
        pieces = [sent_by[self.rank] for _, sent_by in posted]
        sizes = [piece.numel() for piece in pieces]
        if sizes != list(output_splits):
            raise DistributedError(
                f"rank {self.rank}, {label}: expects {list(output_splits)}, was sent {sizes}"
            )
        if pieces:
            torch.cat(pieces, out=output)
        return CompletedWork()

    def broadcast(self, tensor: Tensor, source: int) -> None:  # noqa: D102
        self.labels.append("tensor")
        values = self._board.exchange(self.rank, tensor.clone() if self.rank == source else None)
        tensor.copy_(values[source])

    def all_gather(self, tensor: Tensor) -> list[Tensor]:  # noqa: D102
        self.labels.append("tensor")
        return self._board.exchange(self.rank, tensor.clone())

    def all_gather_objects(self, value: Any) -> list[Any]:  # noqa: D102
        self.labels.append("object")
        return self._board.exchange(self.rank, value)

    def broadcast_object(self, value: Any, source: int = 0) -> Any:  # noqa: D102
        return self.all_gather_objects(value)[source]

    def barrier(self) -> None:  # noqa: D102
        self.labels.append("barrier")
        self._board.exchange(self.rank, None)


def run_simulated(
    function: Callable[[ShardingEnv], T],
    world_size: int,
    *,
    local_world_size: int | None = None,
    timeout_s: float = _TIMEOUT_S,
) -> list[T]:
    """Call ``function(env)`` on each of ``world_size`` simulated ranks at once.

    Args:
        function: what each rank does; called in a thread of its own with that rank's environment.
        world_size: how many ranks.
        local_world_size: ranks on one simulated host; all by default.
        timeout_s: how long a rank waits for another in a collective.

    Returns:
        Each rank's result, in rank order.

    Raises:
        Exception: the first rank's error that is no consequence of another's.
    """
    board = _Board(world_size, timeout_s)
    results: list[Any] = [None] * world_size
    errors: list[BaseException | None] = [None] * world_size
    grad = torch.is_grad_enabled()

    def run(rank: int) -> None:
        communicator = SimulatedCommunicator(board, rank, world_size)
        env = ShardingEnv(communicator, local_world_size=local_world_size or world_size)
        try:
            with torch.set_grad_enabled(grad):
                results[rank] = function(env)
        except BaseException as error:
            errors[rank] = error
            board.abort()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}") for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    raised = [error for error in errors if error is not None]
    if raised:
        raise min(raised, key=_remoteness)
    return results


def _remoteness(error: BaseException) -> int:
    """How far an error is from the cause: a rank's own, what ranks say of each other, what a lone rank gets."""
    return 2 if isinstance(error, _LeftAlone) else int(isinstance(error, DistributedError))
