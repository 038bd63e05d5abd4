"""Checkpoints read otherwise than into a sharded model: as tensors, and as unsharded modules."""

from __future__ import annotations

import pytest
import torch
from tests.core.runtime.mixed_cuts import case_of
from tests.core.runtime.plans import SHARDER
from tests.plugins.checkpoint.stored import save_of_ranks
from tests.plugins.checkpoint.test_save_and_load import BY_INDEX, IN_RUNS, save
from tests.plugins.checkpoint.test_sharded_state_dict import OTHERS

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


def test_newest_step_is_opened_or_the_one_that_is_asked_for(tmp_path):
    for step in (1, 2):
        made = torch.nn.ParameterDict({"step": torch.full((2,), float(step))})
        sw.save_checkpoint(tmp_path, made, step=step)
    read = torch.empty(2)
    for step, value in ((None, 2.0), (1, 1.0)):
        sw.open_checkpoint(tmp_path, step).tensor("model.step").read(read, 0)
        assert read.tolist() == [value] * 2


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


ONE_RANK = OTHERS[0]


def test_unshard_gives_the_module_that_was_sharded():
    case = case_of()

    def work(env):
        sharded = case.shard(env, case.module())
        return sharded.unshard()

    batch = case.batch(3)
    for module in run_simulated(work, case.world_size):
        assert type(module) is sw.EmbeddingBagCollection
        assert torch.equal(module(batch).values(), case.module()(batch).values())


def test_unshard_a_model_leaves_the_sharded_one_as_it_is():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.bags, self.over = ONE_RANK.module(), torch.nn.Linear(19, 1)

        def forward(self, batch):
            return self.over(self.bags(batch).values())

    whole, batch = Model(), ONE_RANK.batch(3)
    expected = whole(batch).detach()
    plan = sw.ShardingPlan({"bags": sw.EmbeddingModuleShardingPlan(ONE_RANK.shardings())})
    env = sw.ShardingEnv.local(device_type="cpu")
    model = sw.DistributedModelParallel(whole, env=env, plan=plan, sharders=[SHARDER])
    out = model.unshard()
    assert torch.equal(out(batch), expected)
    torch.nn.init.zeros_(out.over.weight)
    assert torch.equal(model(batch), expected)
