"""Train pipelines on real processes: overlap in a profile, equality, one end of data, one error on all."""

from __future__ import annotations

import pytest
from tests.distributed.pipelines import pipeline_workers

from shardwright.contracts.comm_backend import EXCHANGE_EVENT
from shardwright_testing.ranks import RankPool

pytestmark = pytest.mark.distributed


def test_profile_shows_the_next_input_exchange_under_way_before_the_backward_pass(pool: RankPool) -> None:
    for events in pool.run(pipeline_workers.profile_steps, 2, 3):
        parts = {
            name: sorted((start, end) for other, start, end in events if other == f"## {name} ##")
            for name in ("forward", "next batch", "backward")
        }
        exchanges = sorted(start for name, start, _ in events if name == EXCHANGE_EVENT)
        assert [len(own) for own in parts.values()] == [3, 3, 3]
        for forward, ahead, backward in zip(*parts.values(), strict=True):
            begun = [start for start in exchanges if ahead[0] <= start <= ahead[1]]
            assert len(begun) == 2  # headers and ids of the next batch
            # They begin while this batch's results travel, which are all that is left to the forward pass to send.
            results = [start for start in exchanges if forward[0] <= start < ahead[0]]
            assert len(results) == 1
            assert ahead[1] <= forward[1] <= backward[0] < backward[1]
            assert len([start for start in exchanges if ahead[1] < start <= forward[1]]) == 0
