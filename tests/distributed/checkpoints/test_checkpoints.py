"""Checkpoints, and resharding of models in training, on real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.distributed.checkpoints import checkpoint_workers as workers

from shardwright_plugins.checkpoint.folder import steps_in
from shardwright_testing.ranks import RankError, RankPool

pytestmark = pytest.mark.distributed


def assert_same(states, expected):
    for state in states:
        assert state.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(torch.as_tensor(state[name]), torch.as_tensor(value)), name


@pytest.mark.parametrize("asynchronous", [False, True], ids=["waiting", "while training goes on"])
def test_training_that_goes_on_from_a_checkpoint_has_the_bits_of_training_that_did_not_stop(
    asynchronous: bool, pool: RankPool, tmp_path: Path
):
    expected, *_ = pool.run(
        workers.train_on, 2, "row_wise", str(tmp_path / "one"), 0, 6, asynchronous=asynchronous
    )
    pool.run(workers.train_on, 2, "row_wise", str(tmp_path / "two"), 0, 4, asynchronous=asynchronous)
    assert_same(
        pool.run(workers.train_on, 2, "row_wise", str(tmp_path / "two"), 4, 6, asynchronous=asynchronous),
        expected,
    )
    assert list(steps_in(tmp_path / "two")) == [3, 5]


@pytest.mark.parametrize(
    ("fault", "text"),
    [("cut", "were written"), ("flip", "its checksum is another"), ("missing", "cannot be read")],
)
def test_damage_of_one_ranks_file_is_one_error_on_all_ranks_and_no_model_changes(
    fault: str, text: str, pool: RankPool, tmp_path: Path
):
    results = pool.run(workers.load_damaged, 2, str(tmp_path), fault)
    for error, is_unchanged in results:
        assert error.startswith("CheckpointError: ")
        assert text in error
        assert "__1_0.distcp" in error
        assert is_unchanged


@pytest.mark.parametrize(
    ("fault", "subject"),
    [
        ("full disk", "{folder}/.saving-step_0000000002/__1_0.distcp"),
        ("read-only", "/sys/checkpoints/step_0000000002"),
    ],
)
def test_folder_that_cannot_be_written_is_one_error_on_all_ranks_and_leaves_nothing(
    fault: str, subject: str, pool: RankPool, tmp_path: Path
):
    results = pool.run(workers.save_in_vain, 2, str(tmp_path), fault)
    assert {about for about, *_ in results} == {subject.format(folder=tmp_path)}
    for _, is_unchanged, names in results:
        assert is_unchanged
        assert names == [".lock", "step_0000000001"]


@pytest.mark.parametrize(
    ("kernel", "optimizer"),
    [
        ("fused_torch", "row_wise_adagrad"),
        pytest.param("fused_torch", "adam", marks=pytest.mark.slow),
        pytest.param("dense", "adam", marks=pytest.mark.slow),
    ],
)
def test_checkpoints_of_two_three_and_one_ranks_and_reshards_between_them_keep_every_bit(
    kernel: str, optimizer: str, pool: RankPool, tmp_path: Path
):
    how = str(tmp_path), optimizer, kernel
    expected, *_ = pool.run(workers.trained_and_saved, 2, "row_wise", *how)
    path = [
        (3, ["column_wise", "modulo"]),
        (1, ["hashed", "column_wise"]),
        (3, ["modulo", "hashed", "row_wise"]),
        (2, ["hashed", "modulo", "column_wise", "row_wise"]),
    ]
    for world_size, cuts in path:
        for states in pool.run(workers.loaded_and_resharded, world_size, cuts, *how):
            for cut, state in zip(cuts, states, strict=True):
                assert workers.same(state, expected), (world_size, cut)


def test_optimizer_that_was_forgotten_is_asked_for_on_all_ranks(pool: RankPool):
    for text in pool.run(workers.forgotten_optimizer, 2):
        assert "no optimizer that was given has its old ones" in text


def test_exchanges_are_bounded_and_share_their_memory(pool: RankPool):
    for count, most, places in pool.run(workers.counted_exchanges, 2, 1 << 12):
        assert count > 10
        assert most <= 1 << 12
        assert (
            places <= 6
        )  # what is sent and what is received: larger ones where a piece is larger than all before


@pytest.mark.parametrize(
    ("before", "after", "optimizer"),
    [
        ("row_wise", "column_wise", "row_wise_adagrad"),
        ("column_wise", "modulo", "row_wise_adagrad"),
        ("modulo", "data_parallel", "adam"),
        ("data_parallel", "table_wise", "sgd"),
        ("table_wise", "hashed", "adam"),
    ],
)
def test_forecast_bytes_are_those_that_a_reshard_sends(
    before: str, after: str, optimizer: str, pool: RankPool
):
    # Pairs of cuts whose pieces need no filling up to eight bytes.
    each = pool.run(workers.forecast_and_sent, 2, before, after, optimizer)
    assert [forecast for forecast, _ in each] == [sent for _, sent in each]
    assert before == "data_parallel" or sum(sent for _, sent in each) > 0


@pytest.mark.parametrize(
    ("moment", "plan"),
    [pytest.param("rows have come", "old", marks=pytest.mark.slow), ("handed over", "new")],
)
def test_rank_that_is_lost_late_leaves_others_a_plan_and_its_blocks(
    moment: str, plan: str, pool: RankPool
) -> None:
    with pytest.raises(RankError) as error:
        pool.run(workers.lost_late, 3, moment)
    assert set(error.value.errors) == {1}
    assert error.value.results == {0: (plan, True), 2: (plan, True)}
