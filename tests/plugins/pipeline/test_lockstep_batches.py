"""A loop of one's own over batches in step, on simulated ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.errors import error_of
from tests.pairs import in_turns
from tests.plugins.pipeline.pipelines import (
    Watched,
    assert_same,
    assert_trains_as_the_plain_loop,
    batches,
    dense_optimizer,
    examples,
    on_ranks,
    train_plainly,
)

from shardwright import InvalidInputError, lockstep_batches


@pytest.mark.parametrize(
    ("end_of_data", "counts"),
    in_turns(["first_rank", "last_rank"], [(3, 5), (5, 1), (0, 2), (2, 0), (0, 0), (3, 3), (4, 2, 3)]),
)
def test_loop_ends_for_all_ranks_at_one_step_with_the_plain_loops_weights(end_of_data, counts):
    world_size = len(counts)
    num_steps = min(counts) if end_of_data == "first_rank" else max(counts)

    def train(model, env):
        loader = batches(counts[env.rank], env.rank, world_size)
        return len(train_plainly(model, lockstep_batches(model, loader, end_of_data=end_of_data)))

    def own(rank):
        found = list(batches(counts[rank], rank, world_size))[:num_steps]
        return found + [examples(0, rank, world_size, size=0)] * (num_steps - len(found))

    assert assert_trains_as_the_plain_loop(train, own, world_size) == [num_steps] * world_size


def test_steps_take_no_collective_of_their_own_once_inputs_are_known():
    def labels_of(model, env, wrap):
        watched, per_step = Watched(env.communicator), []
        optimizer = dense_optimizer(model)
        for batch in wrap(model, batches(6, env.rank, 2)):
            optimizer.zero_grad()
            model(batch)[0].sum().backward()
            per_step.append([label for event, label in watched.events if event == "start"])
            watched.clear()
        return [sorted(labels) for labels in per_step[2:-1]]  # after the last no ids are sent

    in_step = on_ranks(lambda model, env: labels_of(model, env, lockstep_batches), 2)
    plain = on_ranks(lambda model, env: labels_of(model, env, lambda model, loader: loader), 2)
    assert in_step == plain
    assert len(plain[0]) == 3


def test_iterator_that_ended_stays_so_without_asking_others():
    def train(model, env):
        loader = lockstep_batches(model, batches(2, env.rank, 2))
        train_plainly(model, loader)
        return [next(loader, "end") for _ in range(1 + env.rank)]

    assert on_ranks(train, 2) == [["end"], ["end", "end"]]


def test_wrong_batch_raises_on_all_when_it_is_taken_and_the_next_trains():
    def train(model, env):
        own = list(batches(4, env.rank, 2))
        if env.rank == 0:
            own[2] = examples(2, 0, 2, size=3)
            own[2].sparse["bags"].values()[:] = -1
        loader = lockstep_batches(model, own)
        texts = []
        for _ in range(4):
            try:
                train_plainly(model, iter([next(loader)]))
            except InvalidInputError as error:
                texts.append(str(error))
            else:
                texts.append("fine")
        return texts, list(loader)

    (first, rest), (second, others) = on_ranks(train, 2)
    assert first == second
    assert "rank 0: " in first.pop(2)
    assert first == ["fine"] * 3
    assert rest == others == []


def test_batches_that_all_ranks_skip_and_evaluation_between_leave_the_others_alone():
    def train(model, env, *, wrapped):
        loader: Any = batches(6, env.rank, 2)
        loader = lockstep_batches(model, loader) if wrapped else loader
        for batch in loader:
            step = int(batch.name.split()[0])
            if step in (2, 3):
                continue
            with torch.no_grad():
                model(examples(70 + step, env.rank, 2))
            train_plainly(model, iter([batch]))
        return model.full_state_dict()

    for actual, expected in zip(
        on_ranks(lambda model, env: train(model, env, wrapped=True), 2),
        on_ranks(lambda model, env: train(model, env, wrapped=False), 2),
        strict=True,
    ):
        assert_same(actual, expected)


def test_loop_left_early_leaves_nothing_to_the_next():
    def train(model, env):
        for number, batch in enumerate(lockstep_batches(model, batches(5, env.rank, 2))):
            if number == 2:
                break  # its ids were exchanged, and nobody wants them
            train_plainly(model, iter([batch]))
        return len(train_plainly(model, lockstep_batches(model, batches(3, env.rank, 2))))

    assert on_ranks(train, 2) == [3, 3]


def events_of_steps(*, overlap):
    """What is started and waited for in each of the last steps."""

    def watch(model, env):
        watched, per_step = Watched(env.communicator), []
        for batch in lockstep_batches(model, batches(6, env.rank, 2), overlap=overlap):
            model(batch)[0].sum().backward()
            per_step.append(list(watched.events))
            watched.clear()
        return per_step[2:-1]

    return [events for steps in on_ranks(watch, 2) for events in steps]


def test_ids_of_the_next_batch_are_sent_before_results_of_this_one_are_waited_for():
    for events in events_of_steps(overlap=True):
        waits = [place for place, event in enumerate(events) if event == ("wait", "results")]
        sent = [place for place, event in enumerate(events) if event == ("start", "ids")]
        assert len(sent) == 2
        assert max(sent) < max(waits)
        waits_for_ids = [place for place, event in enumerate(events) if event == ("wait", "ids")]
        assert max(waits_for_ids) < min(sent)  # those of this batch were sent a step before


def test_without_overlap_nothing_is_under_way_between_two_batches():
    for events in events_of_steps(overlap=False):
        assert events.index(("start", "headers")) == 0  # of this batch, when it was asked for
        assert events.count(("start", "ids")) == events.count(("wait", "ids")) == 2

    def train(model, env):
        for batch in lockstep_batches(model, batches(4, env.rank, 2), overlap=False):
            train_plainly(model, iter([batch]))
            assert not model.module.bags.engine.unfinished()

    on_ranks(train, 2)


def test_overlap_that_differs_between_ranks_raises_on_all():
    def train(model, env):
        loader = lockstep_batches(model, batches(2, env.rank, 2), overlap=env.rank == 0)
        return error_of(next, loader)

    first, second = on_ranks(train, 2)
    assert first == second
    assert "rank 0: while the batch before computes; rank 1: between two batches" in first
