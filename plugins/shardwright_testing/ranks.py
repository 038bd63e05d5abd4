"""A pool of real processes, one a rank, for tests that need a process group; no wait is without a time-out."""

from __future__ import annotations

import multiprocessing as mp
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from shardwright.errors import DistributedError

_START_TIMEOUT_S = 120.0
"""Time in which processes must have started, s. A fresh pair took 13 s on two busy cores."""
_GROUP_TIMEOUT_S = 60.0
"""Time-out of the ranks' process group, s: less than that of a call, so that the collective is named."""
_DIED = "the process died"
# What the server imports that ranks are forked from: torch, what it imports with the first optimizer, and the engine.
# Neither plugins nor FBGEMM, which an initializer may hide.
_PRELOADED = (
    "torch",
    "torch.distributed.checkpoint",
    "torch.profiler",
    "torch._dynamo",
    "shardwright.runtime.sharded.models.model_parallel",
    "shardwright_testing.equality.training",
)


class RankError(DistributedError):
    """A function failed on a rank; the text holds that rank's traceback.

    Attributes:
        errors: rank -> traceback or what became of it, for every rank that failed.
        results: rank -> result, for every rank that did not.
    """

    def __init__(self, errors: dict[int, str], results: dict[int, Any]) -> None:
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, text in sorted(errors.items())))
        self.errors, self.results = errors, results


class RankPool:
    """Processes that wait for work, so that each test does not start (and import torch in) its own.

    Args:
        size: the most ranks a call can use.
        backend: backend of the process groups, one made for each call.
        initializer: a function at the top level of a module, called in each process before anything else.

    Example:
        >>> with RankPool(2) as pool:  # doctest: +SKIP
        ...     pool.run(my_module.train, 2, batch_size=4)
    """

    def __init__(self, size: int, *, backend: str, initializer: Callable[[], Any] | None = None) -> None:
        self._size, self._backend, self._initializer = size, backend, initializer
        self._workers: list[tuple[Any, Connection]] = []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def run(
        self,
        function: Callable[..., Any],
        world_size: int,
        *args: Any,
        timeout_s: float = 180.0,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``function(*args, **kwargs)`` on each of ``world_size`` ranks, inside their process group.

        Args:
            function: a function at the top level of a module that the processes can import.
            world_size: number of ranks.
            args: picklable.
            timeout_s: longest time of the call, s; then the processes are ended, and the call fails.
            kwargs: picklable.

        Returns:
            The results, in rank order.

        Raises:
            RankError: the function raised on a rank, the process died, or did not end in time.
        """
        self._ensure(world_size)
        workers = self._workers[:world_size]
        with tempfile.TemporaryDirectory() as folder:
            store = Path(folder) / "store"
            for rank, (_, connection) in enumerate(workers):
                connection.send((function, args, kwargs, rank, world_size, str(store)))
            replies = self._collect(workers, timeout_s)
        errors = {rank: text for rank, (ok, text) in replies.items() if not ok}
        if errors:
            self._end(
                [w for rank, w in enumerate(workers) if errors.get(rank) == _DIED or not w[0].is_alive()]
            )
            raise RankError(errors, {rank: result for rank, (ok, result) in replies.items() if ok})
        return [replies[rank][1] for rank in range(world_size)]

    def _ensure(self, world_size: int) -> None:
        if world_size > self._size:
            raise ValueError(f"{world_size} ranks asked of a pool of {self._size}")
        # Forked from a process that has imported torch, once for all pools: a rank starts in tenths of a second.
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(list(_PRELOADED))
        started = []
        while len(self._workers) < world_size:
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve,
                args=(theirs, self._backend, self._initializer, dict(os.environ)),
                daemon=True,
            )
            process.start()
            theirs.close()
            self._workers.append((process, ours))
            started.append(ours)
        for connection in started:
            if not connection.poll(_START_TIMEOUT_S):
                self.close()
                raise DistributedError(f"a rank's process did not start within {_START_TIMEOUT_S:.0f} s")
            connection.recv()

    def _collect(
        self, workers: Sequence[tuple[Any, Connection]], timeout_s: float
    ) -> dict[int, tuple[bool, Any]]:
        pending = {rank: connection for rank, (_, connection) in enumerate(workers)}
        replies: dict[int, tuple[bool, Any]] = {}
        deadline = time.monotonic() + timeout_s
        while pending:
            ready = wait(pending.values(), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                self.close()
                late = (False, f"did not end within {timeout_s:.0f} s and was ended")
                return {**replies, **dict.fromkeys(pending, late)}
            for rank in [rank for rank, connection in pending.items() if connection in ready]:
                try:
                    replies[rank] = pending.pop(rank).recv()
                except EOFError:
                    replies[rank] = (False, _DIED)
        return replies

    def close(self) -> None:
        """End the processes."""
        self._end(list(self._workers))

    def _end(self, workers: Sequence[tuple[Any, Connection]]) -> None:
        """End these processes; the next call starts others in their place."""
        for process, connection in workers:
            connection.close()
            process.terminate()
        for process, _ in workers:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
        self._workers = [worker for worker in self._workers if worker not in workers]


def _serve(
    connection: Connection,
    backend: str,
    initializer: Callable[[], Any] | None,
    environment: Mapping[str, str],
) -> None:
    os.environ.clear()  # the server's, of when the first pool was started
    os.environ.update(environment)
    if initializer is not None:
        initializer()
    import torch

    torch.set_num_threads(1)
    connection.send("ready")
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        reply = _run(backend, *job)
        try:
            connection.send(reply)
        except Exception:  # a result that cannot be pickled
            connection.send((False, traceback.format_exc()))


def _run(
    backend: str, function: Callable[..., Any], args: Any, kwargs: Any, rank: int, world_size: int, store: str
) -> tuple[bool, Any]:
    import torch
    import torch.distributed as dist

    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE=str(world_size)
    )
    timeout = timedelta(seconds=_GROUP_TIMEOUT_S)
    try:
        shared = torch.distributed.FileStore(store, world_size)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=shared, rank=rank, world_size=world_size, timeout=timeout)
        # A rank that is done must not hang up on one that is still connecting.
        shared.set(f"connected/{rank}", "")
        shared.wait([f"connected/{other}" for other in range(world_size)], timeout)
        return True, function(*args, **kwargs)
    except BaseException:
        return False, traceback.format_exc()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
