"""The end of data in train pipelines on simulated ranks: one step for all."""

from __future__ import annotations

import datetime

import pytest
from tests.plugins.pipeline.pipelines import (
    PIPELINES,
    batches,
    on_ranks,
    piped,
    raised,
    run_out,
)

from shardwright.errors import InvalidInputError


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
        return [raised(pipeline.progress, iterator) for _ in range(2)]

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
        return raised(pipeline.progress, batches(2, env.rank, 2))

    texts = on_ranks(train, 2)
    (text,) = set(texts)
    assert text.startswith("DistributedError: ")
    assert "end_of_data is rank 0: first_rank; rank 1: last_rank" in text


def test_unknown_end_of_data_raises_with_the_nearest():
    with pytest.raises(
        InvalidInputError, match=r"end_of_data must be .* got 'last_rnk'\. Did you mean 'last_rank'"
    ):
        on_ranks(lambda model, env: piped(model, end_of_data="last_rnk"), 1)
