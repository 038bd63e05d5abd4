"""Train pipelines on simulated ranks: equal to the plain loop, in any order of use."""

from __future__ import annotations

import pytest
import torch
from tests.plugins.pipeline.pipelines import (
    PIPELINES,
    Watched,
    assert_same,
    assert_trains_as_the_plain_loop,
    batches,
    examples,
    on_ranks,
    piped,
    run_out,
    train_plainly,
)
from torch import nn

from shardwright import DistributedModelParallel, ShardingPlan
from shardwright.runtime.ranks import devices, environment
from shardwright.runtime.routed import tables
from shardwright.runtime.step import segments
from shardwright.runtime.step.batches import inputs
from shardwright_plugins.pipeline import batch_tree, fetching
from shardwright_testing.simulated import run_simulated


def test_next_ids_are_sent_before_results_and_gradients_and_all_before_any_is_waited_for():
    def train(model, env):
        watched = Watched(env.communicator)
        pipeline, loader = piped(model), batches(4, env.rank, 2)
        for _ in range(2):
            pipeline.progress(loader)
        watched.clear()
        pipeline.progress(loader)
        return watched.events

    for events in on_ranks(train, 2, local_world_size=1):
        starts = [label for event, label in events if event == "start"]
        first_gradient = next(i for i, label in enumerate(starts) if "gradients" in label)
        assert starts[:first_gradient].count("ids") == 2  # of both collections
        assert "ids" not in starts[first_gradient:]
        headers = [event for event in events if event[1] == "headers"]
        assert headers == [("start", "headers")] * 2 + [("wait", "headers")] * 2
        waits_for_ids = [i for i, event in enumerate(events) if event == ("wait", "ids")]
        assert max(waits_for_ids) < events.index(("start", "ids"))  # those of this batch, sent a step before
        # The second collection's results, which the model waits for last, travel beside the next batch's ids.
        last_wait = max(place for place, event in enumerate(events) if event == ("wait", "results"))
        assert max(place for place, event in enumerate(events) if event == ("start", "ids")) < last_wait
        assert ("start", "status") in events[last_wait:]


def test_step_takes_the_collectives_of_the_plain_loop_and_a_status_word():
    def count(model, env, loop):
        loader = batches(6, env.rank, 2)
        step = loop(model, loader)
        for _ in range(2):
            step()
        before = len(env.communicator.labels)
        step()
        return sorted(env.communicator.labels[before:])

    def pipeline_step(model, loader):
        pipeline = piped(model)
        return lambda: pipeline.progress(loader)

    def plain_step(model, loader):
        return lambda: train_plainly(model, iter([next(loader)]))

    counts = [
        on_ranks(lambda model, env, loop=loop: count(model, env, loop), 2)
        for loop in (pipeline_step, plain_step)
    ]
    assert counts[0] == [sorted([*labels, "status"]) for labels in counts[1]]


@pytest.mark.parametrize("kind", PIPELINES)
def test_same_batch_again_and_again_trains_as_in_the_plain_loop(kind):
    def train(model, env):
        run_out(piped(model, kind), iter([examples(0, env.rank, 2)] * 3))

    assert_trains_as_the_plain_loop(train, lambda rank: [examples(0, rank, 2)] * 3)


def test_batch_under_way_that_one_rank_evaluates_is_exchanged_again_for_it():
    def train(model, env):
        own = list(batches(4, env.rank, 2))
        pipeline, loader = piped(model), iter(own)
        for step in range(4):
            pipeline.progress(loader)
            with torch.no_grad():  # on rank 0 the next batch, whose ids are under way, on rank 1 another
                model(own[min(step + 1, 3)] if env.rank == 0 else examples(90, 1, 2))

    assert_trains_as_the_plain_loop(train, lambda rank: batches(4, rank, 2))


def test_two_pipelines_of_one_model_take_turns():
    def train(model, env, loop):
        training, others = batches(5, env.rank, 2), batches(5, env.rank, 2, start=50)
        return loop(model, training, others), model.full_state_dict()

    def pipelines(model, training, others):
        first, second = piped(model), piped(model, end_of_data="last_rank")
        outputs = []
        for _ in range(5):
            model.train()
            outputs.append(first.progress(training))
            model.eval()
            outputs.append(second.progress(others))
        return outputs

    def plainly(model, training, others):
        outputs = []
        for batch, other in zip(training, others, strict=True):
            outputs += train_plainly(model, iter([batch]))
            outputs.append(model(other)[1])
        return outputs

    for actual, expected in zip(
        on_ranks(lambda model, env: train(model, env, pipelines), 2),
        on_ranks(lambda model, env: train(model, env, plainly), 2),
        strict=True,
    ):
        assert all(torch.equal(*pair) for pair in zip(actual[0], expected[0], strict=True))
        assert_same(actual[1], expected[1])


def test_model_without_collections_ends_in_step():
    class Dense(nn.Module):
        def __init__(self):
            super().__init__()
            self.over = nn.Linear(2, 1)

        def forward(self, batch):
            return self.over(batch), batch

    def train(env):
        model = DistributedModelParallel(Dense(), env=env, device="cpu", plan=ShardingPlan({}))
        return len(run_out(piped(model), iter([torch.ones(3, 2)] * (2 + env.rank))))

    assert run_simulated(train, 2) == [2, 2]


@pytest.mark.parametrize("kind", PIPELINES)
def test_pipeline_on_a_device_without_streams_equals_that_on_the_host(monkeypatch, kind):
    """A stranger's device, as far as a step and its batches go: memory of its own, and nothing beside the calls."""

    def train(model, env):
        return run_out(piped(model, kind), batches(5, env.rank, 2)), model.full_state_dict()

    expected = on_ranks(train, 2)
    for owner, name in ((torch.cpu, "Stream"), (torch, "Stream"), (torch.accelerator, "current_stream")):
        monkeypatch.delattr(owner, name)
    monkeypatch.setattr(torch.Tensor, "pin_memory", None, raising=False)
    monkeypatch.setattr(environment, "with_index", lambda device: device)
    for module in (batch_tree, devices, fetching, inputs, segments, tables):
        monkeypatch.setattr(module, "is_host", lambda device: False)
    for actual, on_host in zip(on_ranks(train, 2), expected, strict=True):
        assert all(torch.equal(*pair) for pair in zip(actual[0], on_host[0], strict=True))
        assert_same(actual[1], on_host[1])
