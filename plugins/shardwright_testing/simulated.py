"""Ranks simulated by threads of one process, so that a sharded module can be tested without a cluster."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, TypeVar, final

import torch
from torch import Tensor

from shardwright.contracts.comm_backend import Communicator, Work
from shardwright.errors import DistributedError
from shardwright.runtime.ranks.alone import CompletedWork
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.ranks.together import Failure, Ranks

T = TypeVar("T")

_TIMEOUT_S = 60.0  # seconds that a rank waits for the others at a collective


class _LeftAlone(DistributedError):
    """Error of a rank that waited for another that failed."""


class _Board:
    """Meeting of the ranks of one world: each posts a value, or its failure, and all read all."""

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
        failed = next((other for other in values if isinstance(other, Failure)), None)
        if failed is not None and not isinstance(value, Failure):
            error = failed.error(rank, "work that is done together")
            error.add_note(_HEARD)
            raise error
        return values

    def abort(self) -> None:
        self._barrier.abort()


class SimulatedCommunicator(Communicator):
    """The collectives of one simulated rank; counts them and the bytes they carry.

    Attributes:
        labels: the label of every all-to-all, in order; others are noted as ``"object"``, ``"tensor"``, ``"barrier"``.
        sent_bytes: label of every all-to-all, in order, and the bytes sent to each rank (this one included).
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
        if not input.is_contiguous() or input.is_neg():
            raise ValueError(f"{label}: a backend sends memory as it is, and this is a view of other values")
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

    def on_cpu(self) -> Communicator:  # noqa: D102
        return self  # it sends tensors of any device

    def broadcast(self, tensor: Tensor, source: int) -> None:  # noqa: D102
        self.labels.append("tensor")
        values = self._board.exchange(self.rank, tensor.clone() if self.rank == source else None)
        tensor.copy_(values[source])

    def all_gather_objects(self, value: Any) -> list[Any]:  # noqa: D102
        self.labels.append("object")
        return self._board.exchange(self.rank, value)

    def broadcast_object(self, value: Any, source: int = 0) -> Any:  # noqa: D102
        return self.all_gather_objects(value)[source]

    def barrier(self) -> None:  # noqa: D102
        self.labels.append("barrier")
        self._board.exchange(self.rank, None)


_HEARD = "another simulated rank failed"


@final
class SimulatedRanks(Ranks):
    """Meetings of the simulated ranks, as one of them sees them.

    Args:
        board: board of the ranks.
        rank: this rank.
    """

    def __init__(self, board: _Board, rank: int) -> None:
        self._board, self._rank, self._is_in = board, rank, False

    def meet(self, what: str, word: str = "") -> bool:  # noqa: D102 - described in the base class
        return len(set(self._board.exchange(self._rank, (what, word)))) == 1

    @contextmanager
    def together(self, what: str) -> Iterator[bool]:  # noqa: D102
        if self._is_in:
            yield False
            return
        self._is_in = True
        try:
            yield True
            self.meet(what)
        except Exception as error:
            if _HEARD not in getattr(error, "__notes__", ()):
                with suppress(_LeftAlone):  # they have failed, too
                    self._board.exchange(self._rank, Failure.of(self._rank, error))
            raise
        finally:
            self._is_in = False

    def busy(self) -> AbstractContextManager[None]:  # noqa: D102
        return nullcontext()


class _Boards:
    """The boards of all groups of ranks.

    Args:
        world_size: all ranks.
        local_world_size: ranks of a host.
        sharding_group_size: ranks of a sharding group; ``None``: there are no groups.
        timeout_s: longest wait of a rank for another, s.
        device_type: type of the ranks' devices.
    """

    def __init__(
        self,
        world_size: int,
        local_world_size: int,
        sharding_group_size: int | None,
        timeout_s: float,
        device_type: str,
    ) -> None:
        from shardwright_plugins.sharding_groups.grid import RankGrid

        self._device_type = device_type
        self._world_size, self._local_world_size, self._timeout_s = world_size, local_world_size, timeout_s
        self._grid = (
            None
            if sharding_group_size is None
            else RankGrid(world_size, sharding_group_size, local_world_size)
        )
        self._boards: dict[tuple[str, int], _Board] = {}
        self._lock = threading.Lock()

    def env(self, rank: int) -> ShardingEnv:
        """The environment of a rank."""
        everyone = self._env("everyone", range(self._world_size), rank)
        if self._grid is None:
            return everyone
        sharding = self._env("sharding", self._grid.sharding_group(rank), rank)
        replicas = self._env("replicas", self._grid.replica_group(rank), rank)
        from shardwright_plugins.sharding_groups import ShardingEnv2D

        return ShardingEnv2D.of(sharding, replicas, everyone, self._grid)

    def _env(self, kind: str, ranks: range, rank: int) -> ShardingEnv:
        with self._lock:
            board = self._boards.setdefault((kind, ranks[0]), _Board(len(ranks), self._timeout_s))
        communicator = SimulatedCommunicator(board, ranks.index(rank), len(ranks))
        local = self._local_world_size if self._grid is None else self._grid.local_size(ranks)
        return ShardingEnv(
            communicator,
            self._device_type,
            local_world_size=local,
            ranks=SimulatedRanks(board, communicator.rank),
        )

    def abort(self) -> None:
        """End all waiting."""
        with self._lock:
            for board in self._boards.values():
                board.abort()


def run_simulated(
    function: Callable[[ShardingEnv], T],
    world_size: int,
    *,
    local_world_size: int | None = None,
    sharding_group_size: int | None = None,
    timeout_s: float = _TIMEOUT_S,
    device_type: str = "cpu",
) -> list[T]:
    """Call ``function(env)`` on each of ``world_size`` simulated ranks at once.

    Args:
        function: function that each rank runs, in a thread of its own with that rank's environment.
        world_size: number of ranks.
        local_world_size: ranks on one simulated host; all by default.
        sharding_group_size: ranks of a sharding group; environments then are those of ``DMPCollection``.
        timeout_s: longest wait of a rank for another in a collective, s.
        device_type: type of the ranks' devices; they share one device of that type.

    Returns:
        Each rank's result, in rank order.

    Raises:
        Exception: the first rank's error that is no consequence of another's.
    """
    boards = _Boards(world_size, local_world_size or world_size, sharding_group_size, timeout_s, device_type)
    results: list[Any] = [None] * world_size
    errors: list[BaseException | None] = [None] * world_size
    grad = torch.is_grad_enabled()

    def run(rank: int) -> None:
        try:
            # A device's backward passes else share one thread, in which one rank would wait for the other in vain.
            with torch.set_grad_enabled(grad), torch.autograd.set_multithreading_enabled(False):
                results[rank] = function(boards.env(rank))
        except BaseException as error:
            errors[rank] = error
            boards.abort()

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
    """Rank an error by distance from its cause: a rank's own, what ranks say of others, what a lone rank gets."""
    return 2 if isinstance(error, _LeftAlone) else int(isinstance(error, DistributedError))
