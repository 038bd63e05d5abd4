"""Whatever becomes of the ranks' batches: all ranks make the same steps, train as the plain loop does, and end."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from tests.drawn import drawn
from tests.plugins.pipeline.pipelines import (
    assert_trains_as_the_plain_loop,
    dense_optimizer,
    examples,
)

from shardwright import TrainPipelineBase, TrainPipelineSparseDist

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
