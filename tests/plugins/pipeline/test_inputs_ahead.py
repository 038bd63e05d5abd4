"""Exchanges begun ahead: what is taken, what is refused, and in which order streams wait."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.plugins.pipeline.pipelines import examples, on_ranks

from shardwright.runtime.ranks.devices import sent_to
from shardwright.runtime.step.batches.rank_problems import Status, who_ended
from shardwright.sparse import KeyedJaggedTensor
from shardwright_plugins.pipeline import batches
from shardwright_plugins.pipeline.batch_settings import BatchSettings
from shardwright_plugins.pipeline.batches import BatchesInStep
from shardwright_plugins.pipeline.inputs_ahead import Begun, SideStream


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
    monkeypatch.setattr(batches, "record_stream", lambda *args: recorded.append(args))

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
