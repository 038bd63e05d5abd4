"""Groups of shards of about one size."""

from __future__ import annotations

import numpy as np
import pytest

from shardwright.planning.groups import groups


def test_groups_of_few_kinds_are_each_their_own():
    assert groups(np.random.default_rng(0).uniform(size=(5, 2)), 5).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("most", [1, 3, 20, 99])
def test_groups_are_as_few_as_asked_and_alike_where_many_may_be(most):
    size = np.exp(np.random.default_rng(1).uniform(-4, 0, size=(100, 2)))
    group = groups(size, most)
    assert 1 <= len(set(group.tolist())) <= most
    if most == 99:
        for number in set(group.tolist()):
            members = size[group == number]
            assert (members.max(axis=0) <= 1.5 * members.min(axis=0)).all()


def test_groups_count_all_that_is_next_to_nothing_as_one_size():
    size = np.array([[0.5, 1e-6], [0.5, 0.0], [0.5, 1e-4], [0.2, 0.3]])
    assert len(set(groups(size, 2)[:3].tolist())) == 1
