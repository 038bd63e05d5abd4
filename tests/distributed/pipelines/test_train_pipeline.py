"""Train pipelines on real processes: overlap in a profile, equality, one end of data, one error on all."""

from __future__ import annotations

import pytest
import torch
from tests.distributed.pipelines import pipeline_workers
from tests.pairs import in_turns

from shardwright.contracts.comm_backend import EXCHANGE_EVENT
from shardwright_testing.ranks import RankPool

pytestmark = pytest.mark.distributed


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(actual) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(
            actual[name], value, rtol=1e-6, atol=1e-7, msg=lambda text, n=name: f"{n}: {text}"
        )


ENDS = [
    ("first_rank", [5, 3]),
    ("last_rank", [2, 4]),
    ("last_rank", [1, 0, 3]),
]
KINDS = ["base", "sparse_dist", "lockstep_batches"]


@pytest.mark.parametrize(("kind", "end"), in_turns(KINDS, ENDS))  # simulated ranks meet all kinds of each end
def test_loop_equals_the_plain_one_and_ends_for_all_ranks_at_one_step(
    pool: RankPool, kind: str, end: tuple[str, list[int]]
) -> None:
    end_of_data, counts = end
    world_size, num_steps = len(counts), (min if end_of_data == "first_rank" else max)(counts)
    results = pool.run(pipeline_workers.train_by_loop, world_size, kind, counts, end_of_data)
    expected = pool.run(pipeline_workers.train_rectangular, world_size, counts, num_steps)
    for (steps, actual), wanted in zip(results, expected, strict=True):
        assert steps == num_steps
        assert_same(actual, wanted)


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
