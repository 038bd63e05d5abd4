"""Dynamic batching: requests that come close together are answered in one call of the program."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

from attrs import frozen

from shardwright_serving.server.metrics import Metrics
from shardwright_serving.server.samples import Samples
from shardwright_serving.server.settings import Settings

LOG = logging.getLogger("uvicorn.error")  # which uvicorn shows
Predict = Callable[[Sequence[Samples]], list[Any]]


class OverloadedError(RuntimeError):
    """More samples wait already than may wait.

    Attributes:
        retry_after: time after which those that wait will have been answered, s.
    """

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class PredictionError(RuntimeError):
    """The program failed on a request."""


@frozen(eq=False)
class _Waiting:
    samples: Samples
    answer: asyncio.Future[Any]
    since: float  # monotonic clock, s


class Batcher:
    """A queue of requests, and the task that answers them batch by batch.

    A batch is as many requests as came until it has ``max_batch`` samples or its first request has waited
    ``max_wait_ms``. While one batch is computed the next gathers.

    Args:
        predict: function that answers requests together, in order; it runs in ``executor``.
        executor: threads that compute.
        settings: sizes and times.
        metrics: place where batches are counted.
    """

    def __init__(self, predict: Predict, executor: Executor, settings: Settings, metrics: Metrics) -> None:
        self._predict = predict
        self._executor = executor
        self._settings = settings
        self._metrics = metrics
        self._waiting: deque[_Waiting] = deque()
        self._queued = 0  # samples in _waiting
        self._last_batch_s = 0.0
        self._is_closing = False
        self._some = asyncio.Event()
        self._enough = asyncio.Event()
        self._task = asyncio.get_running_loop().create_task(self._run())

    @property
    def is_full(self) -> bool:
        """True if not one sample more may wait."""
        return self._queued >= self._settings.max_queue

    def submit(self, samples: Samples) -> asyncio.Future[Any]:
        """Put a request into the queue.

        Raises:
            OverloadedError: too many samples wait already.
        """
        if self._queued + len(samples) > self._settings.max_queue and self._waiting:
            raise OverloadedError(
                f"{self._queued} samples wait in this worker, and at most {self._settings.max_queue} may",
                self._retry_after(),
            )
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(samples, answer, time.monotonic()))
        self._count(len(samples))
        self._some.set()
        if self._queued >= self._settings.max_batch:
            self._enough.set()
        return answer

    async def close(self) -> None:
        """Answer what waits, then end."""
        self._is_closing = True
        self._some.set()
        self._enough.set()
        await self._task

    def _retry_after(self) -> int:
        batches = math.ceil(self._queued / self._settings.max_batch)
        return max(1, math.ceil(batches * self._last_batch_s))

    def _count(self, samples: int) -> None:
        self._queued += samples
        self._metrics.queued_samples.set(self._queued)

    async def _run(self) -> None:
        while batch := await self._next_batch():
            try:
                await self._answer(batch)
            except Exception:  # no batch may end the loop, on which all later ones wait
                LOG.exception("a batch of %d requests was lost", len(batch))
                _fail(batch, PredictionError("the server failed on this batch; its log says why"))

    async def _next_batch(self) -> list[_Waiting]:
        """Wait for the next batch; an empty one is the end."""
        while not self._waiting:
            if self._is_closing:
                return []
            self._some.clear()
            await self._some.wait()
        await self._wait_for_more(self._waiting[0].since + self._settings.max_wait_ms / 1e3)
        return self._take()

    async def _wait_for_more(self, until: float) -> None:
        remaining = until - time.monotonic()
        if self._queued < self._settings.max_batch and remaining > 0 and not self._is_closing:
            self._enough.clear()
            try:
                await asyncio.wait_for(self._enough.wait(), remaining)
            except TimeoutError:
                return

    def _take(self) -> list[_Waiting]:
        """Take the first requests of the queue, at least one, of at most ``max_batch`` samples together."""
        batch = [self._waiting.popleft()]
        size = len(batch[0].samples)
        while self._waiting and size + len(self._waiting[0].samples) <= self._settings.max_batch:
            batch.append(self._waiting.popleft())
            size += len(batch[-1].samples)
        self._count(-size)
        return batch

    async def _answer(self, batch: list[_Waiting]) -> None:
        """Answer a batch. One that fails is tried request by request, so that only the guilty one fails."""
        try:
            answers = await self._computed(batch)
        except Exception as error:
            if len(batch) > 1:
                for waiting in batch:
                    await self._answer([waiting])
                return
            LOG.exception("the program failed on a request")
            _fail(batch, PredictionError(f"the program failed on this request: {type(error).__name__}"))
            return
        for waiting, answer in zip(batch, answers, strict=True):
            if not waiting.answer.done():  # its client may have gone
                waiting.answer.set_result(answer)

    async def _computed(self, batch: list[_Waiting]) -> list[Any]:
        samples = [waiting.samples for waiting in batch]
        begun = time.monotonic()
        answers = await asyncio.get_running_loop().run_in_executor(self._executor, self._predict, samples)
        self._last_batch_s = time.monotonic() - begun
        self._metrics.batch_seconds.observe(self._last_batch_s)
        self._metrics.batch_samples.observe(sum(map(len, samples)))
        return answers


def _fail(batch: Sequence[_Waiting], error: Exception) -> None:
    for waiting in batch:
        if not waiting.answer.done():
            waiting.answer.set_exception(error)
