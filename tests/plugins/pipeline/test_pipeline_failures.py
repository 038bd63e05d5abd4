"""What fails on one rank of a train pipeline fails on all in that step, and the next trains; simulated ranks."""

from __future__ import annotations

import gc
from itertools import product

import pytest
from tests.errors import error_of
from tests.pairs import pairwise
from tests.plugins.pipeline.pipelines import (
    PIPELINES,
    Fails,
    assert_trains_as_the_plain_loop,
    batches,
    examples,
    on_ranks,
    piped,
    run_out,
    towers,
)

from shardwright.errors import InvalidInputError
from shardwright.runtime.step.batches.rank_problems import Status
from shardwright_plugins.pipeline.status_word import exchange_statuses
from shardwright_testing.simulated import run_simulated


@pytest.mark.parametrize(
    ("kind", "where", "bad_step"), pairwise(product(PIPELINES, ["before", "between", "after"], [0, 1, 3]))
)
def test_model_that_raises_on_one_rank_raises_on_all_in_that_step_and_no_batch_is_lost(kind, where, bad_step):
    def train(model, env):
        model.module.when = f"{bad_step} of 1"
        pipeline, loader = piped(model, kind), batches(5, env.rank, 2)
        texts = [error_of(pipeline.progress, loader) for _ in range(5)]
        return texts, error_of(pipeline.progress, loader)

    def good(rank):
        return [examples(step, rank, 2) for step in range(5) if step != bad_step]

    results = assert_trains_as_the_plain_loop(train, good, 2, Fails(towers(2), where))
    assert results[1][0].pop(bad_step) == f"ArithmeticError: in {bad_step} of 1"
    assert results[0][0].pop(bad_step).startswith("DistributedError: rank 1 failed in the forward pass")
    for texts, end in results:
        assert texts == ["nothing was raised"] * 4
        assert end.startswith("StopIteration")


def test_errors_of_several_ranks_are_each_told_once():
    def work(env):
        raised = [ValueError("a"), ValueError("b"), ValueError("a"), heard, None][env.rank]
        return exchange_statuses(env, Status.FAILED, raised, is_shared=raised is heard)[1]

    had = "its batch could not be had: ValueError:"
    heard = InvalidInputError(f"rank 1: {had} b")  # by a rank of the same sharding group
    found = run_simulated(work, 5)
    assert str(found[4]) == f"rank 1: {had} b; ranks 0, 2: {had} a"
    assert list(map(str, found[:3])) == ["a", "b", "a"]


def test_model_that_raises_on_all_ranks_raises_its_own_error_on_each():
    class Always(Fails):
        def _maybe(self, batch, where):
            if where == "after" and batch.name.startswith("1 "):
                raise ArithmeticError(batch.name)

    def train(model, env):
        pipeline, loader = piped(model), batches(3, env.rank, 2)
        return [error_of(pipeline.progress, loader) for _ in range(3)]

    fine = "nothing was raised"
    assert on_ranks(train, 2, Always(towers(2), "")) == [
        [fine, f"ArithmeticError: 1 of {rank}", fine] for rank in range(2)
    ]


def test_update_that_raises_closes_the_pipeline_until_it_is_reset():
    def train(model, env):
        pipeline, loader = piped(model), batches(6, env.rank, 2)
        pipeline.progress(loader)
        step, pipeline._optimizer.step = pipeline._optimizer.step, lambda: 1 / 0
        texts = [error_of(pipeline.progress, loader) for _ in range(2)]
        pipeline._optimizer.step = step
        pipeline.reset()
        return [*texts, error_of(pipeline.progress, loader), len(run_out(pipeline, loader))]

    for texts in on_ranks(train, 2):
        assert texts[0] == "ZeroDivisionError: division by zero"
        assert texts[1].startswith(
            "DistributedError: this pipeline was closed by ZeroDivisionError in the update"
        )
        assert texts[2:] == ["nothing was raised", 2]  # the third batch was under way


def test_model_that_returns_no_pair_raises_on_all_with_what_it_returned():
    def train(model, env):
        pipeline = piped(model, custom_model_fwd=lambda batch: model(batch)[0])
        return error_of(pipeline.progress, batches(2, env.rank, 2))

    for text in on_ranks(train, 2):
        assert text.startswith(
            "InvalidInputError: the model returned a Tensor; a pipeline wants (losses, output)"
        )


@pytest.mark.parametrize("is_piped", [True, False])
def test_wrong_batch_of_one_collection_leaves_nothing_in_progress_in_another(is_piped):
    def steps(model, env):
        good, wrong = (examples(step, env.rank, 2, size=2) for step in range(2))
        if env.rank:
            wrong.sparse["rows"] = wrong.sparse["rows"].permute([])  # its feature is missing
        if not is_piped:
            return [error_of(model, wrong)]
        pipeline, loader = piped(model), iter([good, wrong])
        return [error_of(pipeline.progress, loader) for _ in range(3)]

    def work(model, env):
        texts = steps(model, env)
        assert any(text.startswith("InvalidInputError: ") for text in texts)
        return model.module.bags.engine.unfinished(), model.module.sequences.engine.unfinished()

    gc.disable()  # which would find, at any time, what only errors keep
    try:
        assert on_ranks(work, 2) == [("", "")] * 2
    finally:
        gc.enable()
