"""TorchRec's name `fused` of compute kernels: asked for, said by plans and options, and built."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from shardwright_torchrec.parallel import kernel_names
from shardwright_torchrec.parallel.constraints import ParameterConstraints
from shardwright_torchrec.parallel.kernel_names import EmbeddingComputeKernel, NamedSharding, fused_kernels
from shardwright_torchrec.parallel.model_parallel import DistributedModelParallel
from shardwright_torchrec.parallel.sharders import EmbeddingBagCollectionSharder
from shardwright_torchrec.planner.enumerators import EmbeddingEnumerator
from shardwright_torchrec.planner.planners import EmbeddingShardingPlanner

import shardwright as sw
from shardwright_plugins.compute_kernels.fbgemm.fused import Fused

SHARDER = EmbeddingBagCollectionSharder(fused_params={"optimizer": "sgd", "learning_rate": 0.1})


def bags() -> sw.EmbeddingBagCollection:
    config = sw.EmbeddingBagConfig(name="t", num_embeddings=20, embedding_dim=8, feature_names=["f"])
    return sw.EmbeddingBagCollection([config])


def planned(device: str, kernels: list[str] | None = None, **options: Any) -> sw.ShardingPlan:
    rules = {"t": ParameterConstraints(["table_wise"], kernels)}
    topology = sw.Topology(1, device)
    planner = EmbeddingShardingPlanner(topology, constraints=rules, debug=False, **options)
    return planner.plan(bags(), [SHARDER])


def own(plan: sw.ShardingPlan) -> str:
    """The kernel that a plan stands for."""
    return sw.ShardingPlan.from_json(plan.to_json()).plan[""]["t"].compute_kernel


@pytest.fixture
def without_fbgemm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Fused, "supports", lambda self, request: "FBGEMM is not here")
    kernel_names._fused_kernels.cache_clear()
    yield
    kernel_names._fused_kernels.cache_clear()  # so that no other test finds what held here


@pytest.mark.usefixtures("without_fbgemm")
@pytest.mark.parametrize("asked", [None, ["fused"], ["batched_fused"]])
@pytest.mark.parametrize(("device", "kernel"), [("cpu", "fused_numba"), ("cuda", "fused_triton")])
def test_plan_says_fused_and_stands_for_another_kernel(
    device: str, kernel: str, asked: list[str] | None
) -> None:
    plan = planned(device, asked)
    assert plan.plan[""]["t"].compute_kernel == "fused"
    assert own(plan) == kernel
    assert "fused_" not in str(plan)


def test_kernels_have_the_names_that_tutorials_write() -> None:
    assert EmbeddingComputeKernel.BATCHED_FUSED is EmbeddingComputeKernel.FUSED is sw.ComputeKernel.FUSED
    assert EmbeddingComputeKernel["BATCHED_DENSE"].value == EmbeddingComputeKernel("batched_dense") == "dense"
    assert isinstance(EmbeddingComputeKernel.FUSED, EmbeddingComputeKernel)
    assert list(EmbeddingComputeKernel) == list(sw.ComputeKernel)
    with pytest.raises(AttributeError, match="Did you mean 'fused'"):
        _ = EmbeddingComputeKernel.BATCHED_FUSD


def test_kernel_asked_for_by_its_own_name_keeps_it() -> None:
    assert planned("cpu", ["fused_torch"]).plan[""]["t"].compute_kernel == "fused_torch"


def test_kernels_in_other_memory_are_not_fused() -> None:
    assert set(fused_kernels()) == {"fused", "fused_numba", "fused_torch", "fused_triton"}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_options_of_a_table_have_one_fused_kernel(device: str) -> None:
    options = EmbeddingEnumerator(sw.Topology(1, device), batch_size=8).enumerate(bags(), [SHARDER])
    offered = [option.compute_kernel for option in options if option.sharding_type == "table_wise"]
    assert offered.count("fused") == 1
    assert not {"fused_numba", "fused_torch", "fused_triton"} & set(offered)


@pytest.mark.usefixtures("without_fbgemm")
@pytest.mark.parametrize("form", ["planned", "of shards alone"])
def test_what_a_plan_calls_fused_is_built_and_trained(form: str) -> None:
    module = bags()
    plan = planned("cpu")
    if form == "of shards alone":
        sharding = plan.plan[""]["t"]
        assert isinstance(sharding, NamedSharding)
        given = sw.ParameterSharding("table_wise", "fused", sharding.layout)
        plan = sw.ShardingPlan({"": sw.EmbeddingModuleShardingPlan(t=given)})
    env = sw.ShardingEnv.local(device_type="cpu")
    model = DistributedModelParallel(copy.deepcopy(module), env, torch.device("cpu"), plan, [SHARDER])
    assert model.plan.plan[""]["t"].compute_kernel == "fused"
    batch = sw.KeyedJaggedTensor.from_lists({"f": [[1, 2], [3]]})
    model(batch).values().sum().backward()
    expected = module.table_weight("t").detach().clone()
    expected[[1, 2, 3]] -= 0.1
    torch.testing.assert_close(model.unshard().table_weight("t").detach(), expected)
