"""Optimizers, small modules and small functions under TorchRec's names, against independent computations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from shardwright_torchrec.distributed import global_settings
from shardwright_torchrec.distributed.embedding_types import BaseEmbeddingSharder
from shardwright_torchrec.distributed.fused_params import (
    FUSED_PARAM_BOUNDS_CHECK_MODE,
    FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS,
    FUSED_PARAM_REGISTER_TBE_BOOL,
)
from shardwright_torchrec.distributed.interfaces import (
    DataParallelWrapper,
    ShardedModule,
    ShardingPlanner,
)
from shardwright_torchrec.modules.configs import EmbeddingBagConfig, EmbeddingConfig
from shardwright_torchrec.modules.fused_embedding_modules import (
    FusedEmbeddingBagCollection,
    FusedEmbeddingCollection,
    fuse_embedding_optimizer,
)
from shardwright_torchrec.modules.interfaces import (
    EmbeddingBagCollectionInterface,
    EmbeddingCollectionInterface,
    get_embedding_names_by_table,
    reorder_inverse_indices,
)
from shardwright_torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizer, FusedOptimizerModule
from shardwright_torchrec.optim.optimizers import (
    LAMB,
    SGD,
    Adam,
    LarsSGD,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    RowWiseAdagrad,
)
from shardwright_torchrec.parallel.model_parallel import DistributedModelParallel
from shardwright_torchrec.planner.planners import EmbeddingShardingPlanner
from shardwright_torchrec.planner.proposers import EmbeddingOffloadScaleupProposer, GreedyProposer
from shardwright_torchrec.quant.inference import DEFAULT_FUSED_PARAMS
from shardwright_torchrec.types import CacheMixin, ModuleNoCopyMixin

import shardwright as sw

ROWS, D = 10, 8
CPU = torch.device("cpu")


def table(name: str = "t", *features: str) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(ROWS, D, name, feature_names=list(features) or ["f"])


def batch(*keys: str) -> sw.KeyedJaggedTensor:
    return sw.KeyedJaggedTensor(
        keys=list(keys), values=torch.arange(3 * len(keys)) % ROWS, lengths=torch.tensor([2, 1] * len(keys))
    )


KINDS = [
    (LAMB, "lamb", {"weight_decay": 0.1}),
    (LarsSGD, "lars", {"momentum": 0.8, "eta": 0.5}),
    (PartialRowWiseAdam, "partial_row_wise_adam", {"beta1": 0.8}),
    (PartialRowWiseLAMB, "partial_row_wise_lamb", {"eps": 1e-6}),
]


@pytest.mark.parametrize(("kind", "name", "arguments"), KINDS, ids=[name for _, name, _ in KINDS])
def test_optimizer_is_the_one_of_its_name_and_sharding_reads_it(
    kind: Any, name: str, arguments: dict[str, float]
) -> None:
    own, other = (torch.nn.Parameter(torch.linspace(1, 2, ROWS * D).reshape(ROWS, D)) for _ in range(2))
    optimizer = kind([own], lr=0.1, **arguments)
    reference = sw.spec_to_torch(sw.OptimizerSpec(name, 0.1, arguments), [other])
    for step in range(3):
        if step == 2:
            saved = optimizer.state_dict()
            optimizer = kind([own], lr=0.3, **arguments)
            optimizer.load_state_dict(saved)
        for parameter in (own, other):
            parameter.grad = torch.full_like(parameter, step + 1.0)
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
    torch.testing.assert_close(own, other, rtol=0, atol=0)
    fused = torch.nn.Parameter(torch.zeros(ROWS, D))
    sw.apply_optimizer_in_backward(kind, [fused], {"lr": 0.1, **arguments})
    spec = sw.optimizer_spec_of(fused)
    assert spec is not None
    assert (spec.name, spec.learning_rate) == (name, 0.1)
    assert dict(spec.parameters).items() >= arguments.items()


def test_optimizer_takes_torchs_betas_and_refuses_what_it_does_not_know() -> None:
    parameter = torch.nn.Parameter(torch.ones(ROWS, D))
    assert LAMB([parameter], betas=(0.5, 0.6)).param_groups[0]["beta2"] == 0.6
    with pytest.raises(sw.InvalidInputError, match="momentum"):
        LAMB([parameter], momentum=0.5)
    with pytest.raises(sw.InvalidInputError, match="got both"):
        LAMB([parameter], lr=0.5, learning_rate=0.5)


def test_row_wise_adagrads_arguments_stand_in_torchrecs_order() -> None:
    parameter = torch.nn.Parameter(torch.ones(ROWS, D))
    group = RowWiseAdagrad([parameter], 0.5, 0.0, 0.25, 0.125, 1e-3).param_groups[0]
    names = ("lr", "weight_decay", "initial_accumulator_value", "eps")
    assert [group[name] for name in names] == [0.5, 0.25, 0.125, 1e-3]
    with pytest.raises(sw.UnsupportedError, match=r"lr_decay=0\.1.*lr_scheduler"):
        RowWiseAdagrad([parameter], lr_decay=0.1)
    betas = {"beta1": 0.95, "beta2": 0.999}  # of scripts that choose among optimizers
    sw.apply_optimizer_in_backward(RowWiseAdagrad, [parameter], {"lr": 0.5, "eps": 1e-3, **betas})
    spec = sw.optimizer_spec_of(parameter)
    assert spec == sw.OptimizerSpec("row_wise_adagrad", 0.5, {"eps": 1e-3})


@pytest.mark.parametrize("kind", [SGD, Adam])
def test_torchs_optimizers_are_read_by_sharding(kind: Any) -> None:
    parameter = torch.nn.Parameter(torch.zeros(ROWS, D))
    sw.apply_optimizer_in_backward(kind, [parameter], {"lr": 0.25})
    spec = sw.optimizer_spec_of(parameter)
    assert spec is not None
    assert spec.learning_rate == 0.25


def test_fused_collections_update_in_the_backward_pass() -> None:
    bags = FusedEmbeddingBagCollection([table()], torch.optim.SGD, {"lr": 0.5})
    rows = FusedEmbeddingCollection([EmbeddingConfig(ROWS, D, "t", feature_names=["f"])], LAMB, {"lr": 0.5})
    before = bags.embedding_bags["t"].weight.detach().clone()
    bags(batch("f")).values().sum().backward()
    expected = before.clone()
    expected[:3] -= 0.5
    torch.testing.assert_close(bags.embedding_bags["t"].weight.detach(), expected)
    rows(batch("f"))["f"].values().sum().backward()
    saved = rows.fused_optimizer().state_dict()["state"]
    assert list(saved) == ["embeddings.t.weight"]
    assert set(saved["embeddings.t.weight"]) >= {"exp_avg", "exp_avg_sq"}
    assert (bags.optimizer_type(), bags.optimizer_kwargs()) == (torch.optim.SGD, {"lr": 0.5})
    with pytest.raises(sw.UnsupportedError, match="location='managed'"):
        FusedEmbeddingBagCollection([table()], torch.optim.SGD, {"lr": 0.5}, location="managed")


def test_collections_of_a_model_are_fused_with_their_weights() -> None:
    rows = sw.EmbeddingCollection([EmbeddingConfig(ROWS, D, "r", feature_names=["f"])], need_indices=True)
    model = torch.nn.ModuleDict(
        {"bags": torch.nn.Sequential(sw.EmbeddingBagCollection([table()])), "rows": rows}
    )
    before = {name: value.clone() for name, value in model.state_dict().items()}
    names = [name for name, _ in model.named_modules()]
    assert fuse_embedding_optimizer(model, torch.optim.SGD, {"lr": 0.5}, CPU) is model
    assert [name for name, _ in model.named_modules()] == names
    assert isinstance(model["bags"][0], FusedEmbeddingBagCollection)
    assert isinstance(model["rows"], FusedEmbeddingCollection)
    assert model["rows"].need_indices()
    torch.testing.assert_close(model.state_dict(), before)
    model["bags"](batch("f")).values().sum().backward()
    before["bags.0.embedding_bags.t.weight"][:3] -= 0.5
    torch.testing.assert_close(model.state_dict(), before)
    alone = sw.EmbeddingBagCollection([table()], device="meta")
    fused = fuse_embedding_optimizer(alone, torch.optim.SGD, {"lr": 0.5}, CPU)
    assert fuse_embedding_optimizer(fused, torch.optim.SGD, {"lr": 0.1}, CPU) is fused
    assert not any(weight.is_meta for weight in fused.parameters())


@pytest.mark.usefixtures("group")
def test_fused_collections_are_sharded_with_their_optimizer() -> None:
    model = torch.nn.Sequential(FusedEmbeddingBagCollection([table()], SGD, {"lr": 0.5}))
    before = model[0].embedding_bags["t"].weight.detach().clone()
    sharded = DistributedModelParallel(model)
    sharded(batch("f")).values().sum().backward()
    before[:3] -= 0.5
    torch.testing.assert_close(
        sw.DistributedModelParallel.state_dict(sharded)["0.embedding_bags.t.weight"], before
    )
    assert isinstance(sharded.module[0], FusedOptimizerModule)
    assert isinstance(sharded.module[0], ShardedModule)
    assert isinstance(sharded.module[0], EmbeddingBagCollectionInterface)


def test_empty_fused_optimizer_does_nothing() -> None:
    optimizer = EmptyFusedOptimizer()
    optimizer.step()
    optimizer.zero_grad()
    assert optimizer.state_dict() == {"state": {}, "param_groups": []}
    assert isinstance(optimizer, FusedOptimizer)


@pytest.mark.parametrize(
    ("proposer", "scales"),
    [
        (EmbeddingOffloadScaleupProposer(), True),
        ([GreedyProposer(), EmbeddingOffloadScaleupProposer()], True),
        ([GreedyProposer()], False),
    ],
    ids=["alone", "beside another", "without"],
)
def test_scaling_up_caches_is_the_planners(
    monkeypatch: pytest.MonkeyPatch, proposer: Any, scales: bool
) -> None:
    seen: dict[str, Any] = {}
    begin = sw.EmbeddingShardingPlanner.__init__

    def watched(self: Any, *arguments: Any, **further: Any) -> None:
        seen.update(further)
        begin(self, *arguments, **further)

    monkeypatch.setattr(sw.EmbeddingShardingPlanner, "__init__", watched)
    planner = EmbeddingShardingPlanner(sw.Topology(2, "cpu"), proposer=proposer, debug=False)
    assert ("scale_up_caches" in seen["refinements"]) == scales
    assert seen["proposer"] == (
        None if proposer is not None and not isinstance(proposer, list) else ["greedy"]
    )
    plan = planner.plan(sw.EmbeddingBagCollection([table()]), [sw.EmbeddingBagCollectionSharder()])
    assert list(plan.plan[""]) == ["t"]


def test_bases_are_those_of_shardwrights_classes() -> None:
    assert issubclass(sw.EmbeddingShardingPlanner, ShardingPlanner)
    assert issubclass(sw.DefaultDataParallelWrapper, DataParallelWrapper)
    assert issubclass(sw.EmbeddingCollection, EmbeddingCollectionInterface)
    assert not issubclass(sw.EmbeddingCollection, EmbeddingBagCollectionInterface)
    assert BaseEmbeddingSharder is sw.ModuleSharder
    assert set(DEFAULT_FUSED_PARAMS) == {
        FUSED_PARAM_BOUNDS_CHECK_MODE,
        FUSED_PARAM_QUANT_STATE_DICT_SPLIT_SCALE_BIAS,
        FUSED_PARAM_REGISTER_TBE_BOOL,
    }
    global_settings.set_propogate_device(True)
    assert global_settings.get_propogate_device()
    global_settings.set_propogate_device(False)
    CacheMixin().clear_cache()

    class Moved(ModuleNoCopyMixin, torch.nn.Linear):
        pass

    module = Moved(1, 1)
    assert module.copy(CPU) is module


def test_names_of_outputs_and_inverse_indices() -> None:
    tables = [table("a", "x", "y"), table("b", "y")]
    assert get_embedding_names_by_table(tables) == [["x", "y@a"], ["y@b"]]
    values = torch.tensor([[0, 1], [1, 0]])
    assert reorder_inverse_indices((["x", "y"], values), ["y", "x"]).tolist() == [[1, 0], [0, 1]]
    assert reorder_inverse_indices(None, ["x"]).numel() == 0
