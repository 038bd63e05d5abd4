"""Unsharded modules that come out of sharded ones."""

from __future__ import annotations

import torch
from tests.core.runtime.mixed_cuts import case_of
from tests.core.runtime.plans import SHARDER
from tests.plugins.checkpoint.test_sharded_state_dict import OTHERS

import shardwright as sw
from shardwright_testing.simulated import run_simulated

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
