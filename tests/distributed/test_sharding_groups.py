"""Two sharding groups of two real ranks: what training gives, in any loop, and what a lost rank raises."""

from __future__ import annotations

import pytest
import torch
from tests.distributed import group_workers, workers
from tests.distributed.group_workers import GROUP, VICTIM
from tests.distributed.pipelines.pipeline_workers import WithLoss, examples
from tests.distributed.test_training import assert_same_state, of_ranks, trained_by_sgd
from tests.pairs import in_turns

from shardwright_testing.ranks import RankError, RankPool

pytestmark = pytest.mark.distributed

WORLD = 4


def unsharded(steps: int) -> dict[str, torch.Tensor]:
    """One process on the batches of all ranks, with the mean of their losses, by SGD."""
    return trained_by_sgd(workers.clicks(), (of_ranks(step, WORLD) for step in range(steps)), WORLD)


@pytest.mark.parametrize("is_inter_host", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_sgd_averaged_after_each_step_equals_one_process(pool: RankPool, is_inter_host: bool) -> None:
    results = pool.run(group_workers.train_with_sync, WORLD, 4, is_inter_host=is_inter_host)
    expected = unsharded(4)
    for rank, (state, replicas) in enumerate(results):
        assert_same_state(state, expected)
        first = rank % GROUP if is_inter_host else rank - rank % 2
        assert replicas == [first, first + (GROUP if is_inter_host else 1)]


def test_norm_of_gradients_is_the_mean_over_groups_on_all_ranks(pool: RankPool) -> None:
    squares = {"tables": 0.0, "dense": 0.0}
    for part, groups in (("tables", [[0, 2], [1, 3]]), ("dense", [range(WORLD)])):
        for ranks in groups:
            model = workers.clicks()
            for rank in ranks:
                (model(workers.batch(0, rank)).square().mean() / len(ranks)).backward()
            module = model.sparse if part == "tables" else model.over
            squares[part] += sum(float(own.grad.norm() ** 2) for own in module.parameters()) / len(groups)
    expected = sum(squares.values()) ** 0.5
    for norms in pool.run(group_workers.clipped, WORLD):
        assert norms == pytest.approx([expected] * 2, rel=1e-5)


def of_loop(skipped: int | None, counts: list[int], steps: int) -> dict[str, torch.Tensor]:
    """One process on the examples that the ranks of a loop have; ranks without one have none."""
    model = WithLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=workers.LEARNING_RATE)
    of_ranks = [list(examples(count, rank)) for rank, count in enumerate(counts)]
    for step in range(steps):
        if step == skipped:
            continue
        optimizer.zero_grad()
        for batches in of_ranks:
            if step < len(batches):
                (model(batches[step])[0] / WORLD).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize(
    ("end_of_data", "loop"),
    in_turns(["first_rank", "last_rank"], ["sparse_dist", "lockstep_batches", "base"]),
)
def test_all_groups_end_with_one_step(pool: RankPool, loop: str, end_of_data: str) -> None:
    """With the first rank, whichever group it is in; or with the last, when all data of a group have ended."""
    counts = [5, 3, 6, 2]  # ranks 1 and 3 are a group
    results = pool.run(group_workers.train_loop, WORLD, loop, counts, end_of_data)
    expected = min(counts) if end_of_data == "first_rank" else max(counts)
    for steps, state in results:
        assert steps == expected
        assert_same_state(state, of_loop(None, counts, expected))


@pytest.mark.parametrize("loop", ["sparse_dist", "base"])
def test_wrong_batch_of_one_group_is_an_error_of_all_and_the_next_trains(pool: RankPool, loop: str) -> None:
    results = pool.run(group_workers.train_past_a_wrong_batch, WORLD, loop, 5)
    for rank, (raised, state) in enumerate(results):
        (text,) = raised
        if loop == "sparse_dist" or rank % 2 == VICTIM % 2:
            assert text.startswith(f"IdRangeError: rank {VICTIM}: feature 'user'"), text
        assert_same_state(state, of_loop(2, [5] * WORLD, 5))


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["kill", "kill between parts and means"])
def test_rank_that_is_killed_is_named_by_its_replica(pool: RankPool, fault: str) -> None:
    with pytest.raises(RankError) as raised:
        pool.run(group_workers.lose_a_rank, WORLD, fault)
    texts = raised.value.results
    assert set(texts) == {0, 1, 2}
    what = "the exchange of sums of replicas to average" if "means" in fault else "a gathering of objects"
    assert texts[2].startswith(f"rank 2: {what} failed: "), texts[2]
    assert f"rank {VICTIM}" in texts[2], texts[2]
    assert texts[0] == texts[1] == "averaged"  # they hold other shards


@pytest.mark.slow
def test_rank_that_does_not_come_is_named_within_the_time_out(pool: RankPool) -> None:
    texts = pool.run(group_workers.lose_a_rank, WORLD, "stall")
    assert texts[VICTIM] == "stuck"
    expected = f"rank 2: a gathering of objects failed: no word from rank {VICTIM} in "
    assert texts[2].startswith(expected), texts[2]


def test_ranks_that_ask_for_different_groups_are_one_error(pool: RankPool) -> None:
    (text,) = set(pool.run(group_workers.ask_for_different_groups, WORLD))
    assert "sharding_group_size is rank 0: 4; ranks 1, 2, 3: 2" in text, text


def test_ranks_that_average_after_different_steps_are_one_error(pool: RankPool) -> None:
    (text,) = set(pool.run(group_workers.average_after_different_steps, WORLD))
    assert "sync_every is ranks 0, 2: 1; ranks 1, 3: 2" in text, text
