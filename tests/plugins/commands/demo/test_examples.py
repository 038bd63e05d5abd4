"""The model that clicks are drawn from: draws follow from seed and number alone, and its logits are the true ones."""

from __future__ import annotations

from itertools import islice

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright_plugins.commands.demo.examples import (
    MAX_BAG,
    MULTI_HOT_TABLES,
    NUM_DENSE,
    Clicks,
    Examples,
)

CLICKS = Clicks(seed=3, batch_size=20_000)
(HELD_OUT,) = CLICKS.held_out_batches(20_000, 0, 1)


def bags_of(drawn: Examples) -> list[list[list[int]]]:
    """[table][example] -> its ids."""
    ids = iter(drawn.ids.tolist())
    return [[list(islice(ids, length)) for length in table] for table in drawn.lengths]


def ids_of_tables(drawn: Examples) -> list[np.ndarray]:
    """[table] -> the ids of all its bags."""
    return np.split(drawn.ids, np.cumsum(drawn.lengths.sum(axis=1))[:-1])


def assert_same(actual: Examples, expected: Examples) -> None:
    np.testing.assert_array_equal(actual.dense, expected.dense)
    np.testing.assert_array_equal(actual.labels, expected.labels)
    np.testing.assert_array_equal(actual.true_logits, expected.true_logits)
    assert bags_of(actual) == bags_of(expected)


def joined(parts: list[Examples]) -> Examples:
    """The examples of all parts in a row, put together with plain lists."""
    bags = [[bag for bags in tables for bag in bags] for tables in zip(*map(bags_of, parts), strict=True)]
    return Examples(
        dense=np.concatenate([part.dense for part in parts]),
        lengths=np.array([[len(bag) for bag in table] for table in bags], dtype=np.int32),
        ids=np.array([id_ for table in bags for bag in table for id_ in bag], dtype=np.int64),
        labels=np.concatenate([part.labels for part in parts]),
        true_logits=np.concatenate([part.true_logits for part in parts]),
    )


def test_examples_shapes_are_those_of_criteo_with_multi_hot() -> None:
    assert HELD_OUT.dense.shape == (20_000, NUM_DENSE)
    assert HELD_OUT.lengths.shape == (len(CLICKS.tables), 20_000)
    assert set(np.unique(HELD_OUT.labels)) == {0.0, 1.0}
    for index, lengths in enumerate(HELD_OUT.lengths):
        assert set(lengths) == (set(range(MAX_BAG + 1)) if index in MULTI_HOT_TABLES else {1})
    for table, ids in zip(CLICKS.tables, ids_of_tables(HELD_OUT), strict=True):
        assert 0 <= ids.min() <= ids.max() < table.num_rows


def test_examples_ids_follow_zipf_law() -> None:
    index = 9
    ids = ids_of_tables(HELD_OUT)[index]
    shares = np.sort(np.bincount(ids))[::-1] / len(ids)
    weights = np.arange(1.0, CLICKS.tables[index].num_rows + 1) ** -1.3
    np.testing.assert_allclose(shares[:5], weights[:5] / weights.sum(), atol=0.01)


@settings(max_examples=20, deadline=None)
@given(batch_size=st.integers(1, 40), world_size=st.integers(1, 5), step=st.integers(0, 3))
def test_shares_of_ranks_joined_are_the_batch(batch_size: int, world_size: int, step: int) -> None:
    clicks = Clicks(3, batch_size)
    parts = [
        next(islice(clicks.training_batches(rank, world_size), step, None)) for rank in range(world_size)
    ]
    sizes = [len(part.labels) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert_same(joined(parts), next(islice(clicks.training_batches(0, 1), step, None)))


def test_true_logits_are_those_that_drew_the_labels() -> None:
    # In each tenth of the examples by predicted probability, as many clicks as predicted: within 4 deviations.
    probabilities = 1 / (1 + np.exp(-HELD_OUT.true_logits))
    order = np.argsort(probabilities)
    for tenth in np.array_split(order, 10):
        expected = probabilities[tenth]
        deviation = np.sqrt((expected * (1 - expected)).sum())
        assert abs(HELD_OUT.labels[tenth].sum() - expected.sum()) < 4 * deviation
