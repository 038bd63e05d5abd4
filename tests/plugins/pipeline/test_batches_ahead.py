"""A loop of somebody else that sends ids, and brings rows near, several batches ahead."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from tests.core.runtime.plans import LoopLookup
from tests.plugins.pipeline.pipelines import (
    assert_trains_as_the_plain_loop,
    batches,
    dense_optimizer,
)

STEPS = 6


class SeveralAhead:
    """The exchanges of one collection, in the order of their batches."""

    def __init__(self, collection: Any) -> None:
        self._collection, self._begun = collection, deque[Any]()
        collection.inputs_ahead = self

    def begin(self, features: Any) -> None:
        """Send the ids of a batch to come, and have kernels bring their rows near; every rank makes this call."""
        step = self._collection.begin_input_dist(features)
        assert step.send()
        step.prefetch()
        self._begun.append(step)

    def take(self, features: Any) -> Any:
        """The exchange of the batch that is looked up now."""
        step = self._begun.popleft()
        step.receive()
        return step

    def has_looked_up(self) -> None:
        """Nothing waits for that."""


def train_ahead(model: Any, loader: Any, distance: int) -> None:
    """A plain loop, in which the ids of ``distance`` batches have arrived before a batch is looked up."""
    inner, optimizer, coming = model.module, dense_optimizer(model), deque[Any]()
    ahead = {"bags": SeveralAhead(inner.bags), "rows": SeveralAhead(inner.sequences)}

    def begin() -> None:
        batch = next(loader, None)
        if batch is not None:
            for name, exchanges in ahead.items():
                exchanges.begin(batch.sparse[name])
            coming.append(batch)

    for _ in range(distance):
        begin()
    while coming:
        begin()
        optimizer.zero_grad()
        losses, _ = model(coming.popleft())
        losses.sum().backward()
        optimizer.step()
    inner.bags.inputs_ahead = inner.sequences.inputs_ahead = None


@pytest.mark.parametrize("distance", [1, 3])
def test_ids_that_are_sent_several_batches_ahead_train_as_the_plain_loop(
    distance: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = LoopLookup.forward

    def prefetch(self: Any, bags: Any) -> None:
        self.near = [*getattr(self, "near", []), bags.ids.clone()]

    def noting(self: Any, bags: Any, *, training: bool) -> Any:
        if getattr(self, "near", None):
            self.seen = [*getattr(self, "seen", []), (len(self.near), self.near.pop(0).equal(bags.ids))]
        return forward(self, bags, training=training)

    monkeypatch.setattr(LoopLookup, "prefetch", prefetch)
    monkeypatch.setattr(LoopLookup, "forward", noting)

    def ahead(model: Any, env: Any) -> None:
        train_ahead(model, batches(STEPS, env.rank, 2), distance)
        for lookup in model.module.bags.engine.executors[0].lookups:  # those that ids are sent to
            near = [min(distance + 1, STEPS - step) for step in range(STEPS)]  # batches whose rows are near
            assert lookup.seen == [(number, True) for number in near]

    assert_trains_as_the_plain_loop(ahead, lambda rank: batches(STEPS, rank, 2))
