"""Whatever becomes of the ranks' batches, until the data ends: all make the same steps, and train as the plain loop."""

from __future__ import annotations

import datetime
from typing import Any

import pytest
from hypothesis import strategies as st
from tests.drawn import drawn
from tests.errors import error_of
from tests.plugins.pipeline.pipelines import (
    PIPELINES,
    assert_trains_as_the_plain_loop,
    batches,
    dense_optimizer,
    examples,
    on_ranks,
    piped,
    run_out,
)

from shardwright import TrainPipelineBase, TrainPipelineSparseDist
from shardwright.errors import InvalidInputError

KINDS = ["good"] * 5 + ["bad", "raises", "model raises"]


class Loader:
    """One rank's batches, as its schedule says."""

    def __init__(self, schedule: list[str], rank: int, world_size: int) -> None:
        self.schedule, self.rank, self.world_size = schedule, rank, world_size
        self.step = -1

    def __next__(self) -> Any:
        self.step += 1
        if self.step >= len(self.schedule):
            raise StopIteration
        kind = self.schedule[self.step]
        if kind == "raises":
            raise OSError(self.step)
        batch = examples(self.step, self.rank, self.world_size, size=2)
        batch.name = kind
        if kind == "bad":
            batch.sparse["bags"] = batch.sparse["bags"].permute([0])  # a feature is missing
        return batch


def outcomes(schedules: list[list[str]], end_of_data: str, kind: Any) -> list[bool]:
    """Of each step, whether it trains: what is to come out.

    What is wrong in the step where the first rank's data ends is told before the end, if batches are looked at before
    their forward pass: as far as inputs' places are known, from the first step that trained.
    """
    end = (min if end_of_data == "first_rank" else max)(len(schedule) for schedule in schedules)
    steps = [
        all(schedule[step] == "good" for schedule in schedules if step < len(schedule)) for step in range(end)
    ]
    told = {"raises", "bad"} if kind is TrainPipelineSparseDist and any(steps) else {"raises"}
    is_wrong = any(schedule[end] in told for schedule in schedules if end < len(schedule))
    return [*steps, False] if is_wrong else steps


@drawn(
    schedules=st.integers(1, 3).flatmap(
        lambda n: st.lists(st.lists(st.sampled_from(KINDS), max_size=5), min_size=n, max_size=n)
    ),
    end_of_data=st.sampled_from(["first_rank", "last_rank"]),
    kind=st.sampled_from([TrainPipelineSparseDist, TrainPipelineBase]),
    quick=8,
    thorough=150,
)
def test_pipeline_makes_the_steps_that_are_good_on_all_ranks(schedules, end_of_data, kind):
    world_size, expected = len(schedules), outcomes(schedules, end_of_data, kind)

    def train(model, env):
        def forward(batch):
            result = model(batch)
            if batch.name == "model raises":
                raise ArithmeticError
            return result

        def empty_batch():
            return examples(0, env.rank, world_size, size=0)

        pipeline = kind(
            model,
            dense_optimizer(model),
            "cpu",
            end_of_data=end_of_data,
            custom_model_fwd=forward,
            empty_batch=empty_batch,
        )
        loader, seen = Loader(schedules[env.rank], env.rank, world_size), []
        while len(seen) <= len(expected):
            try:
                pipeline.progress(loader)
            except StopIteration:
                return seen
            except Exception:
                seen.append(False)
            else:
                seen.append(True)
        raise AssertionError("it does not end")

    def own(rank):
        return [
            examples(step, rank, world_size, size=2 if step < len(schedules[rank]) else 0)
            for step, trains in enumerate(expected)
            if trains
        ]

    assert assert_trains_as_the_plain_loop(train, own, world_size) == [expected] * world_size


def test_empty_batch_can_be_made_of_any_batch_that_can_be_pickled():
    def train(model, env):
        loader = list(batches(2 * env.rank, env.rank, 2))
        for batch in loader:
            batch.name = datetime.date(2024, 2, 29)
        return [len(output) for output in run_out(piped(model, end_of_data="last_rank"), iter(loader))]

    empty, full = on_ranks(train, 2)
    assert empty == [0, 0]
    assert min(full) > 0


def test_rank_without_data_raises_on_all_where_no_empty_batch_can_be_made():
    def train(model, env, kind):
        loader = list(batches(2 * env.rank, env.rank, 2))
        for batch in loader:
            batch.name = lambda: "does not travel"
        pipeline = piped(model, kind, end_of_data="last_rank")
        iterator = iter(loader)
        return [error_of(pipeline.progress, iterator) for _ in range(2)]

    for kind in PIPELINES:
        first, second = on_ranks(lambda model, env, kind=kind: train(model, env, kind), 2)
        assert [text.split(",")[0] for text in first] == ["InvalidInputError: this rank's data has ended"] * 2
        assert all(text.startswith("DistributedError: rank 0") for text in second)


def test_second_epoch_goes_on_with_another_iterator():
    def train(model, env):
        pipeline = piped(model)
        counts = [len(run_out(pipeline, batches(count, env.rank, 2))) for count in (2 + env.rank, 3)]
        return counts, len(env.communicator.labels)

    (first, labels), (second, others) = on_ranks(train, 2)
    assert first == second == [2, 3]
    assert labels == others


def test_ranks_that_choose_differently_raise_on_all():
    def train(model, env):
        pipeline = piped(model, end_of_data=("first_rank", "last_rank")[env.rank])
        return error_of(pipeline.progress, batches(2, env.rank, 2))

    texts = on_ranks(train, 2)
    (text,) = set(texts)
    assert text.startswith("DistributedError: ")
    assert "end_of_data is rank 0: first_rank; rank 1: last_rank" in text


def test_unknown_end_of_data_raises_with_the_nearest():
    with pytest.raises(
        InvalidInputError, match=r"end_of_data must be .* got 'last_rnk'\. Did you mean 'last_rank'"
    ):
        on_ranks(lambda model, env: piped(model, end_of_data="last_rnk"), 1)
