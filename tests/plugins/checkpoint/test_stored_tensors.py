"""Checkpoints read otherwise than into a sharded model: as tensors, and as unsharded modules."""

from __future__ import annotations

import pytest
import torch
from tests.core.runtime.mixed_cuts import case_of
from tests.plugins.checkpoint.stored import save_of_ranks
from tests.plugins.checkpoint.test_save_and_load import BY_INDEX, IN_RUNS, save

import shardwright as sw
from shardwright_testing.simulated import run_simulated

NAME = "model.embedding_bags.t0.weight"


@pytest.mark.parametrize("case", [BY_INDEX, IN_RUNS], ids=["by an index", "in runs"])
def test_rows_from_any_number_on_are_those_of_the_whole_table_however_it_was_cut(case, tmp_path):
    save(case, tmp_path)
    stored = sw.open_checkpoint(tmp_path)
    for name, weight in case.module().state_dict().items():
        found = stored.tensor(f"model.{name}")
        assert (found.shape, found.dtype) == (tuple(weight.shape), torch.float32)
        for start, stop in ((0, len(weight)), (700, 800), (len(weight) - 1, len(weight))):
            rows = torch.empty(stop - start, weight.shape[1])
            found.read(rows, start)
            assert torch.equal(rows, weight[start:stop])


def test_tensor_that_dcp_alone_wrote_is_read(tmp_path):
    save_of_ranks([{"model": {"weight": torch.arange(6.0).view(3, 2)}}], tmp_path)
    rows = torch.empty(2, 2)
    sw.open_checkpoint(tmp_path, dcp_only=True).tensor("model.weight").read(rows, 1)
    assert rows.tolist() == [[2.0, 3.0], [4.0, 5.0]]


def test_name_that_is_not_there_is_an_error_with_the_nearest(tmp_path):
    save(IN_RUNS, tmp_path)
    with pytest.raises(sw.CheckpointError, match=rf"no tensor '{NAME}s'.* Did you mean '{NAME}'"):
        sw.open_checkpoint(tmp_path).tensor(f"{NAME}s")
    with pytest.raises(sw.CheckpointError, match="no checkpoint"):
        sw.open_checkpoint(tmp_path / "nowhere")


def test_unshard_gives_the_module_that_was_sharded():
    case = case_of()

    def work(env):
        sharded = case.shard(env, case.module())
        return sharded.unshard()

    batch = case.batch(3)
    for module in run_simulated(work, case.world_size):
        assert type(module) is sw.EmbeddingBagCollection
        assert torch.equal(module(batch).values(), case.module()(batch).values())
