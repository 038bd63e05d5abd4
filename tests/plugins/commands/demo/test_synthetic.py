"""The generative model: what it draws depends on seed and number alone, and its best AUC is what it says."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.linear_model import LogisticRegression

from shardwright_plugins.commands.demo.examples import NUM_CATEGORICAL, NUM_DENSE, Examples, share
from shardwright_plugins.commands.demo.result import area_under_curve
from shardwright_plugins.commands.demo.synthetic import (
    MAX_BAG,
    MULTI_HOT_TABLES,
    GenerativeModel,
    SyntheticSource,
)

MODEL = GenerativeModel(seed=3)
HELD_OUT = MODEL.held_out_examples(range(20_000))


def bags_of(examples: Examples) -> list[list[list[int]]]:
    """[table][example] -> its ids."""
    ids = iter(examples.ids.tolist())
    return [[list(islice(ids, length)) for length in table] for table in examples.lengths]


def assert_same(actual: Examples, expected: Examples) -> None:
    np.testing.assert_array_equal(actual.dense, expected.dense)
    np.testing.assert_array_equal(actual.labels, expected.labels)
    np.testing.assert_array_equal(actual.true_logits, expected.true_logits)
    assert bags_of(actual) == bags_of(expected)


def joined(parts: list[Examples]) -> Examples:
    """The examples of all parts in a row, put together with plain lists."""
    bags = [[bag for bags in tables for bag in bags] for tables in zip(*map(bags_of, parts), strict=True)]
    logits = [part.true_logits for part in parts if part.true_logits is not None]
    return Examples(
        dense=np.concatenate([part.dense for part in parts]),
        lengths=np.array([[len(bag) for bag in table] for table in bags], dtype=np.int32),
        ids=np.array([id_ for table in bags for bag in table for id_ in bag], dtype=np.int64),
        labels=np.concatenate([part.labels for part in parts]),
        true_logits=np.concatenate(logits),
    )


def test_examples_shapes_are_those_of_criteo_with_multi_hot() -> None:
    assert HELD_OUT.dense.shape == (20_000, NUM_DENSE)
    assert HELD_OUT.lengths.shape == (NUM_CATEGORICAL, 20_000)
    assert set(np.unique(HELD_OUT.labels)) == {0.0, 1.0}
    for index, lengths in enumerate(HELD_OUT.lengths):
        expected = set(range(MAX_BAG + 1)) if index in MULTI_HOT_TABLES else {1}
        assert set(lengths) == expected
    for table, bags in zip(MODEL.tables, bags_of(HELD_OUT), strict=True):
        assert all(0 <= id_ < table.num_rows for bag in bags for id_ in bag)


def test_examples_ids_follow_zipf_law() -> None:
    index = 9
    ids = [id_ for bag in bags_of(HELD_OUT)[index] for id_ in bag]
    shares = np.sort(np.bincount(ids))[::-1] / len(ids)
    weights = np.arange(1.0, MODEL.tables[index].num_rows + 1) ** -1.3
    np.testing.assert_allclose(shares[:5], weights[:5] / weights.sum(), atol=0.01)


def test_model_same_seed_draws_same_examples() -> None:
    assert_same(
        GenerativeModel(3).training_examples(range(100, 150)), MODEL.training_examples(range(100, 150))
    )


def test_model_other_seed_or_stream_draws_other_examples() -> None:
    numbers = range(50)
    drawn = MODEL.training_examples(numbers)
    for other in (GenerativeModel(4).training_examples(numbers), MODEL.held_out_examples(numbers)):
        assert not np.isin(other.dense, drawn.dense).any()


def test_model_no_examples_gives_empty_arrays() -> None:
    none = MODEL.training_examples(range(7, 7))
    assert len(none) == 0
    assert none.ids.size == 0
    assert none.lengths.shape == (NUM_CATEGORICAL, 0)


@settings(max_examples=40, deadline=None)
@given(
    batch_size=st.integers(1, 40),
    world_size=st.integers(1, 5),
    step=st.integers(0, 3),
)
def test_source_shares_of_ranks_joined_are_global_batch(batch_size: int, world_size: int, step: int) -> None:
    source = SyntheticSource(3, batch_size, num_held_out=8, held_out_batch_size=4)
    parts = [
        next(islice(source.training_batches(rank, world_size), step, None)) for rank in range(world_size)
    ]
    numbers = range(step * batch_size, (step + 1) * batch_size)
    assert_same(joined(parts), MODEL.training_examples(numbers))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_source_held_out_batches_cover_each_example_once(world_size: int) -> None:
    source = SyntheticSource(3, batch_size=2, num_held_out=50, held_out_batch_size=16)
    steps = list(zip(*(source.held_out_batches(rank, world_size) for rank in range(world_size)), strict=True))
    assert len(steps) == 4
    assert_same(joined([part for parts in steps for part in parts]), MODEL.held_out_examples(range(50)))


@settings(max_examples=200)
@given(count=st.integers(0, 100), world_size=st.integers(1, 20))
def test_share_parts_are_disjoint_complete_and_even(count: int, world_size: int) -> None:
    parts = [share(count, rank, world_size) for rank in range(world_size)]
    assert [number for part in parts for number in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_area_under_curve_equals_share_of_pairs_in_order() -> None:
    labels, scores = HELD_OUT.labels[:2000], np.round(HELD_OUT.true_logits[:2000], 1)
    of_clicks, of_others = scores[labels == 1, None], scores[labels == 0]
    pairs = (of_clicks > of_others).mean() + (of_clicks == of_others).mean() / 2
    assert area_under_curve(labels, scores) == pytest.approx(pairs, abs=1e-12)


def test_area_under_curve_one_label_is_none() -> None:
    assert area_under_curve(np.ones(3), np.arange(3.0)) is None


def test_true_logits_are_those_that_drew_the_labels() -> None:
    # In each tenth of the examples by predicted probability, as many clicks as predicted: within 4 deviations.
    probabilities = 1 / (1 + np.exp(-HELD_OUT.true_logits))
    order = np.argsort(probabilities)
    for tenth in np.array_split(order, 10):
        expected = probabilities[tenth]
        deviation = np.sqrt((expected * (1 - expected)).sum())
        assert abs(HELD_OUT.labels[tenth].sum() - expected.sum()) < 4 * deviation


def test_best_area_no_disturbed_score_reaches_it() -> None:
    best = area_under_curve(HELD_OUT.labels, HELD_OUT.true_logits)
    noise = np.random.default_rng(0).standard_normal((5, len(HELD_OUT)))
    for scale in (0.3, 1.0):
        for disturbed in HELD_OUT.true_logits + scale * noise:
            assert area_under_curve(HELD_OUT.labels, disturbed) < best


@pytest.mark.slow
def test_dense_features_alone_stay_far_below_best() -> None:
    # The dense effects are a linear function of these columns: no model of dense features alone does better.
    train = MODEL.training_examples(range(40_000))
    columns = [np.hstack([part.dense, part.dense**2]) for part in (train, HELD_OUT)]
    fitted = LogisticRegression(max_iter=1000).fit(columns[0], train.labels)
    reached = area_under_curve(HELD_OUT.labels, fitted.decision_function(columns[1]))
    best = area_under_curve(HELD_OUT.labels, HELD_OUT.true_logits)
    assert reached is not None
    assert best is not None
    assert 0.52 < reached < best - 0.18
