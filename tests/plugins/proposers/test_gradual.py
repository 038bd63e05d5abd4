"""A plan brought down a little at a time: each is better than the one before, and fits."""

from __future__ import annotations

import numpy as np
import pytest
from tests.plugins.partitioners.test_neighbourhoods import uneven

from shardwright.planning.placement import propose
from shardwright_plugins.proposers._gradual import gradually


@pytest.mark.parametrize("ranks", [4, 8])
def test_gradually_brings_an_uneven_plan_down_step_by_step(ranks):
    plan = uneven(ranks)
    found = list(gradually(plan, 0.0))
    values = [plan.value_ms, *(each.value_ms for each in found)]
    assert (np.diff(values) < 0).all()
    assert values[-1] < 0.6 * values[0]
    for each in found:
        shards = propose(plan.space, each.proposal)
        load = shards.fixed_ms.copy()
        np.add.at(load, each.ranks, shards.cost_ms)
        assert load.max() == pytest.approx(each.value_ms)
        assert (each.bins.used[:, 1:] <= plan.space.capacity_bytes).all()


def test_gradually_asks_for_no_time_below_the_bound():
    plan = uneven()
    assert list(gradually(plan, plan.value_ms * 0.999)) == []
