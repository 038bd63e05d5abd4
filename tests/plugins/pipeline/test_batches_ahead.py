"""Exchanges begun ahead: several batches by somebody else's loop, in which order streams wait, and what is refused."""

from __future__ import annotations

from collections import deque
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.core.runtime.plans import LoopLookup
from tests.plugins.pipeline.pipelines import (
    assert_trains_as_the_plain_loop,
    batches,
    dense_optimizer,
    examples,
    on_ranks,
)

from shardwright.runtime.ranks.devices import sent_to
from shardwright.runtime.step.batches.rank_problems import Status, who_ended
from shardwright.sparse import KeyedJaggedTensor
from shardwright_plugins.pipeline import batches as batches_module
from shardwright_plugins.pipeline.batch_settings import BatchSettings
from shardwright_plugins.pipeline.batches import BatchesInStep
from shardwright_plugins.pipeline.inputs_ahead import Begun, SideStream

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


def features() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys=["a"], values=torch.arange(2), lengths=torch.tensor([2]))


class Step:
    """Stands for the engine's."""

    def __init__(self, events: list[str], tensors: list[Any]) -> None:
        self.events, self.tensors = events, tensors

    def receive(self) -> list[Any]:
        self.events.append("receive")
        return self.tensors


def test_ids_are_received_on_the_side_stream_which_the_current_one_waits_for_and_is_recorded(monkeypatch):
    events: list[str] = []

    class Stream:
        """An accelerator's stream, as far as it is used."""

        def __init__(self, name: str) -> None:
            self.name = name

        @contextmanager
        def _active(self):
            events.append(f"enter {self.name}")
            yield
            events.append(f"leave {self.name}")

        def __enter__(self):
            self._context = self._active()
            return self._context.__enter__()

        def __exit__(self, *error):
            return self._context.__exit__(*error)

        def wait_stream(self, other):
            events.append(f"{self.name} waits for {other.name}")

    class Recorded(torch.Tensor):
        def record_stream(self, stream):
            events.append(f"recorded on {stream.name}")

    on_device, on_host = (torch.empty(1, device=device).as_subclass(Recorded) for device in ("meta", "cpu"))
    main, side = Stream("main"), SideStream(torch.device("cuda", 0), Stream("side"))  # type: ignore[arg-type]
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: main)
    Begun(features(), Step(events, [on_device, on_host, on_device]), side).arrive()  # type: ignore[arg-type]
    side.follow_main()
    assert events == [
        "enter side",
        "receive",
        "leave side",
        "main waits for side",
        "recorded on main",
        "recorded on main",
        "side waits for main",
    ]  # tensors of a batch that was routed in the host's memory belong to no stream


def test_bags_that_were_read_to_prefetch_are_kept_for_the_stream_that_looks_them_up(monkeypatch):
    def work(model, env):
        collection = model.module.bags
        engine, taken = collection.engine, []
        lookup = engine.executors[0].lookups[0]
        monkeypatch.setattr(type(lookup), "prefetch", lambda self, bags: taken.extend(bags.tensors))
        step = collection.begin_input_dist(examples(0, 0, 1, size=3).sparse["bags"])
        step.send()
        step.prefetch()
        assert taken
        told = {id(tensor) for tensor in step.receive()}
        assert told >= set(map(id, taken))
        step.lookup()

    on_ranks(work, 1)


def test_batch_that_is_taken_is_recorded_on_the_stream_that_computes_with_it(monkeypatch):
    recorded = []
    monkeypatch.setattr(batches_module, "record_stream", lambda *args: recorded.append(args))

    class Side(SideStream):
        """One whose copies the current stream waits for."""

        def join(self):
            return "the current stream"

    def work(model, env):
        monkeypatch.setattr(SideStream, "on", lambda device: Side(device, None))
        batch = examples(0, 0, 1)
        assert BatchesInStep(model, BatchSettings()).take(iter([batch])).batch is batch
        assert recorded == [(batch, "the current stream")]

    on_ranks(work, 1)


def test_headers_are_sent_to_a_device_from_page_locked_memory_without_waiting_for_it():
    class Values:
        device = torch.device("cpu")

        def pin_memory(self):
            return Pinned()

    class Pinned:
        def to(self, device, *, non_blocking):
            return device, non_blocking

    device = torch.device("cuda", 0)
    assert sent_to(device, Values()) == (device, True)
    on_host = torch.ones(2)
    assert sent_to(torch.device("cpu"), on_host) is on_host


@pytest.mark.parametrize(
    ("statuses", "text"),
    [
        ([Status.FINE, Status.NO_BATCH, Status.EMPTY_BATCH], "the data of ranks 1, 2 has ended"),
        ([Status.STOPPED, Status.NO_BATCH], "rank 0 failed in the forward pass of this step or the last"),
    ],
)
def test_who_ended_names_ranks_and_reason(statuses, text):
    assert who_ended(statuses).startswith(text)
