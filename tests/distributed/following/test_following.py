"""Two ranks measure their steps, and reshard where the data have drifted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.distributed.following import following_workers

from shardwright_plugins.following.times import PHASES
from shardwright_testing.ranks import RankPool

pytestmark = pytest.mark.distributed


def test_training_that_follows_its_data_moves_tables_and_has_the_same_weights(pool: RankPool) -> None:
    steps, now = 12, {"in_background": False, "move_cost": 0.0}
    (looks, weights, ranks), (others, *_) = pool.run(following_workers.follow, 2, steps, 4, now)
    _, expected, before = pool.run(following_workers.follow, 2, steps, None, {})[0]
    assert looks == others
    assert [look.step for look in looks] == [4, 8, 12]
    # Of the first look's data, the plan is the best. Then they drift; after that the plan is near the best again.
    assert [look.is_taken for look in looks] == [False, True, False]
    assert looks[1].found_ms < looks[1].kept_ms
    assert looks[1].moved_bytes > 0
    assert ranks != before
    assert weights.keys() == expected.keys()
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    "arguments",
    [
        {"dry_run": True, "move_cost": 0.0},
        pytest.param(
            {"move_cost": 1e15}, marks=pytest.mark.slow
        ),  # in each run, `plan_near` stays where moves are dear
    ],
)
def test_dry_run_and_dear_moves_leave_the_plan_as_it_is(pool: RankPool, arguments: dict[str, float]) -> None:
    looks, _, ranks = pool.run(following_workers.follow, 2, 8, 4, {"in_background": False, **arguments})[0]
    before = pool.run(following_workers.follow, 2, 1, None, {})[0][-1]
    assert [look.is_taken for look in looks] == [False, False]
    assert (looks[1].moved_bytes > 0) == ("dry_run" in arguments)
    assert ranks == before


def test_search_beside_the_training_is_heard_of_by_all_ranks_in_one_step(pool: RankPool) -> None:
    (look, step), other = pool.run(following_workers.follow_until_a_look, 2)
    assert (look, step) == other
    assert look.is_taken
    assert look.step == step > 2


def test_times_of_all_ranks_are_the_same_everywhere(pool: RankPool) -> None:
    first, second = pool.run(following_workers.measure, 2)
    assert first == second
    assert (first.num_steps, len(first.ranks)) == (3, 2)
    assert sorted(name for rank in first.ranks for group in rank.groups for name in group.tables) == [
        f"t{number}" for number in range(6)
    ]


def test_what_one_rank_refuses_is_an_error_on_all(pool: RankPool, tmp_path: Path) -> None:
    raised = pool.run(following_workers.refuse_together, 2, str(tmp_path))
    assert raised == [["DistributedError", "InvalidInputError"]] * 2


@pytest.mark.parametrize(("every", "steps"), [(9, 1), (2, 2)])
def test_batch_in_progress_on_one_rank_is_refused_on_all(pool: RankPool, every: int, steps: int) -> None:
    raised = pool.run(following_workers.step_with_a_batch_in_progress_on_one_rank, 2, every, steps)
    assert raised == [["nothing was raised"] * (steps - 1) + ["UnsupportedError"]] * 2


def test_steps_of_a_pipeline_are_measured(pool: RankPool) -> None:
    assert pool.run(following_workers.measure_pipeline, 2) == [(4, set(PHASES))] * 2
