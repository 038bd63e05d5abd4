"""Requests are answered together, in order, and none fails for another's sake."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

pytest.importorskip("fastapi", reason="shardwright-serving needs FastAPI")

from shardwright_serving.server.batcher import Batcher, PredictionError
from shardwright_serving.server.metrics import Metrics
from shardwright_serving.server.samples import Samples
from shardwright_serving.server.settings import Settings

LONG_MS = 60_000.0
"""A wait that no test lasts."""


class Model:
    """A program that tells which requests came together, and fails on a request for user 13."""

    def __init__(self) -> None:
        self.batches: list[list[list[int]]] = []
        self.may_go = threading.Event()
        self.may_go.set()

    def predict(self, requests: Sequence[Samples]) -> list[list[int]]:
        assert self.may_go.wait(30)
        users = [request.ids[0].tolist() for request in requests]
        self.batches.append(users)
        if any(13 in own for own in users):
            raise ValueError("unlucky")
        return users


def request(*users: int) -> Samples:
    ids = np.array(users, dtype=np.int64)
    return Samples(np.ones((1, len(users)), dtype=np.int64), (ids,))


def run(test: Callable[[Model, Batcher], Coroutine[Any, Any, None]], **settings: Any) -> Model:
    """Run a test with a batcher, which must end."""
    model = Model()

    async def within() -> None:
        with ThreadPoolExecutor(1) as executor:
            batcher = Batcher(model.predict, executor, Settings("", **settings), Metrics())
            await test(model, batcher)
            await batcher.close()

    asyncio.run(asyncio.wait_for(within(), 60))
    return model


def test_requests_are_joined_up_to_the_size_in_order() -> None:
    async def test(model: Model, batcher: Batcher) -> None:
        waiting = [batcher.submit(request(*users)) for users in ((1, 2), (3,), (4, 5, 6), (7,))]
        assert await asyncio.gather(*waiting[:2]) == [[1, 2], [3]]
        await batcher.close()  # does not wait for more
        assert await asyncio.gather(*waiting[2:]) == [[4, 5, 6], [7]]

    model = run(test, max_batch=5, max_wait_ms=LONG_MS)
    assert model.batches == [[[1, 2], [3]], [[4, 5, 6], [7]]]


def test_request_on_which_the_program_fails_fails_alone() -> None:
    async def test(model: Model, batcher: Batcher) -> None:
        waiting = [batcher.submit(request(user)) for user in (1, 13, 2)]
        one, bad, two = await asyncio.gather(*waiting, return_exceptions=True)
        assert (one, two) == ([1], [2])
        assert isinstance(bad, PredictionError)
        assert str(bad) == "the program failed on this request: ValueError"
        assert await batcher.submit(request(3)) == [3]

    run(test, max_batch=3)


def test_request_whose_client_has_gone_disturbs_no_other() -> None:
    async def test(model: Model, batcher: Batcher) -> None:
        gone, other = batcher.submit(request(1)), batcher.submit(request(2))
        gone.cancel()
        assert await other == [2]

    run(test, max_batch=2)
