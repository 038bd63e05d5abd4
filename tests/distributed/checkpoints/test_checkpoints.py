"""Checkpoints of real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.distributed.checkpoints import checkpoint_workers as workers

from shardwright_plugins.checkpoint.folder import steps_in
from shardwright_testing.ranks import RankPool

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
