"""Sharders, planner and model as TorchRec's scripts expect them on one rank; differences that are kept on purpose."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from attrs import evolve
from shardwright_torchrec.parallel.model_parallel import DistributedModelParallel
from shardwright_torchrec.parallel.sharded_state import blocks_of, sharded_tables
from shardwright_torchrec.parallel.sharders import EmbeddingBagCollectionSharder
from shardwright_torchrec.planner.planners import EmbeddingShardingPlanner
from torch.distributed._shard.sharded_tensor import ShardedTensor

import shardwright as sw
from shardwright_testing import run_simulated

TYPES = ("table_wise", "row_wise", "column_wise", "data_parallel")


def bags() -> sw.EmbeddingBagCollection:
    return sw.EmbeddingBagCollection(
        [
            sw.EmbeddingBagConfig(name=name, num_embeddings=6, embedding_dim=8, feature_names=[name])
            for name in TYPES
        ]
    )


def planned(
    module: sw.EmbeddingBagCollection, sharder: sw.ModuleSharder, **asked: list[str]
) -> sw.ShardingPlan:
    constraints = {
        name: sw.ParameterConstraints(sharding_types=[name], min_partition=4, **asked) for name in TYPES
    }
    planner = EmbeddingShardingPlanner(sw.Topology(2, "cpu"), constraints=constraints, debug=False)
    return planner.plan(module, [sharder])


def kernels(plan: sw.ShardingPlan) -> dict[str, str]:
    return {name: sharding.compute_kernel for name, sharding in plan.plan[""].items()}


@pytest.mark.parametrize(
    "asked", [{}, {"compute_kernels": ["fused_torch"]}], ids=["nothing asked", "fused asked"]
)
def test_sharder_without_optimizer_leaves_copies_to_the_scripts_optimizer(
    asked: dict[str, list[str]],
) -> None:
    found = kernels(planned(bags(), EmbeddingBagCollectionSharder(), **asked))
    assert found.pop("data_parallel") == "dense"
    assert all(sw.host.host().compute_kernels[kernel].fuses_optimizer for kernel in found.values())


def test_sharder_with_optimizer_updates_copies_in_the_backward_pass() -> None:
    sharder = EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.5})
    assert "dense" not in kernels(planned(bags(), sharder)).values()
    module = bags()
    sw.apply_optimizer_in_backward(torch.optim.SGD, list(module.parameters()), {"lr": 0.5})
    assert "dense" not in kernels(planned(module, EmbeddingBagCollectionSharder())).values()


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("given", ["fused_params", "apply_optimizer_in_backward"])
def test_table_that_is_planned_dense_is_left_to_the_scripts_optimizer(given: str) -> None:
    module = bags()
    constraints = {
        "row_wise": sw.ParameterConstraints(compute_kernels=["dense"]),
        "*": sw.ParameterConstraints(sharding_types=["table_wise"]),
    }
    planner = EmbeddingShardingPlanner(sw.Topology(1, "cpu"), constraints=constraints, debug=False)
    plan = planner.plan(module, [EmbeddingBagCollectionSharder()])
    sharder = EmbeddingBagCollectionSharder({"learning_rate": 0.5} if given == "fused_params" else None)
    if given != "fused_params":
        sw.apply_optimizer_in_backward(torch.optim.SGD, list(module.parameters()), {"lr": 0.5})
    before = {name: value.detach().clone() for name, value in module.state_dict().items()}
    with pytest.warns(RuntimeWarning, match="'row_wise': the plan gives it the kernel 'dense'"):
        model = DistributedModelParallel(module, plan=plan, sharders=[sharder])
    left = {name: value for name, value in model.named_parameters() if type(value) is torch.nn.Parameter}
    assert list(left) == ["embedding_bags.row_wise.weight"]
    optimizer = torch.optim.SGD(left.values(), lr=0.25)
    model(sw.KeyedJaggedTensor.from_lists({name: [[1]] for name in TYPES})).values().sum().backward()
    optimizer.step()
    for name, value in model.unshard().state_dict().items():
        expected = before[name]
        expected[1] -= 0.25 if "row_wise" in name else 0.5
        torch.testing.assert_close(value, expected)


def test_model_keeps_its_plan_where_scripts_print_it(group: None) -> None:
    """`--print_sharding_plan` of DLRM's reference reads `model._plan.plan`."""
    model = DistributedModelParallel(bags(), device=torch.device("cpu"))
    printed = {name for tables in model._plan.plan.values() for name, _ in tables.items()}
    assert printed == set(TYPES)
    assert model._plan is model.plan


@pytest.mark.usefixtures("group")
def test_state_dict_has_sharded_tensors_of_shared_storage() -> None:
    module = bags()
    expected = {name: value.clone() for name, value in module.state_dict().items()}
    constraints = {name: sw.ParameterConstraints(sharding_types=[name]) for name in TYPES}
    plan = EmbeddingShardingPlanner(sw.Topology(1, "cpu"), constraints=constraints, debug=False).plan(
        module, [EmbeddingBagCollectionSharder()]
    )
    model = DistributedModelParallel(module, plan=plan)
    state = model.state_dict()
    assert state.keys() == expected.keys()
    for name, value in state.items():
        if "data_parallel" in name:
            assert torch.equal(value, expected[name])
            continue
        assert isinstance(value, ShardedTensor)
        assert value.metadata().size == expected[name].shape
        for shard in value.local_shards():
            (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
            assert torch.equal(shard.tensor, expected[name][row : row + rows, column : column + columns])
    state["embedding_bags.row_wise.weight"].local_shards()[0].tensor.fill_(2.0)
    assert model.unshard().state_dict()["embedding_bags.row_wise.weight"].eq(2.0).all()


@pytest.mark.usefixtures("group")
def test_shards_are_on_the_devices_that_their_hosts_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan says `cuda:0`, the tensors are on the CPU, as they would be on another host's first device."""
    monkeypatch.setattr("shardwright_torchrec.parallel.sharded_state.get_local_size", lambda: 2)
    module = bags()
    constraints = {name: sw.ParameterConstraints(sharding_types=["row_wise"]) for name in TYPES}
    plan = EmbeddingShardingPlanner(sw.Topology(1, "cpu"), constraints=constraints, debug=False).plan(
        module, [EmbeddingBagCollectionSharder()]
    )
    model = DistributedModelParallel(module, plan=plan)
    table, *_ = sharded_tables(model.module, model.plan, blocks_of(model.module))
    planned = evolve(table, sharding=evolve(table.sharding, device="cuda"))
    (shard,) = planned.state(is_distributed=True).local_shards()
    assert str(shard.metadata.placement) == "rank:0/cpu"
    assert planned._place(3) == "rank:3/cuda:1"


@pytest.mark.usefixtures("group")
def test_load_state_dict_takes_shards_and_whole_tables() -> None:
    source, target = (DistributedModelParallel(bags()) for _ in range(2))
    for state in (source.state_dict(), source.unshard().state_dict()):
        with torch.no_grad():
            for parameter in target.parameters():
                parameter.zero_()
        target.load_state_dict(state)
        expected = source.unshard().state_dict()
        torch.testing.assert_close(target.unshard().state_dict(), expected, rtol=0, atol=0)


@pytest.mark.usefixtures("group")
def test_load_state_dict_leaves_other_prefixes_out() -> None:
    source, target = (DistributedModelParallel(bags()) for _ in range(2))
    state = {**source.state_dict(prefix="alpha."), "beta.weight": torch.ones(1)}
    target.load_state_dict(state, prefix="alpha.")
    expected = source.unshard().state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in target.unshard().state_dict().items())


@pytest.mark.usefixtures("group")
def test_model_without_tables_is_wrapped_alone() -> None:
    model = DistributedModelParallel(torch.nn.Linear(3, 2, device="meta"), device="cpu")
    assert model(torch.ones(1, 3)).shape == (1, 2)


def test_load_state_dict_of_other_shards_is_an_error() -> None:
    model = DistributedModelParallel(bags(), env=sw.ShardingEnv.local(device_type="cpu"))
    state = blocks_of(model.module)
    state["embedding_bags.row_wise.weight"] = torch.zeros(5, 8)
    with pytest.raises(sw.InvalidInputError, match=r"row_wise.*\[5, 8\].*\[6, 8\]"):
        model.load_state_dict(state)


def test_state_dict_of_the_fused_optimizer_has_whole_tensors_on_every_rank() -> None:
    """As tools take them that know no sharded tensors of ours, such as torchsnapshot."""
    tables = [sw.EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=4, feature_names=["f"])]
    module = sw.EmbeddingBagCollection(tables)
    sharders = [EmbeddingBagCollectionSharder(fused_params={"optimizer": "adam", "learning_rate": 0.1})]
    rules = {"t": sw.ParameterConstraints(sharding_types=["row_wise"])}
    planner = EmbeddingShardingPlanner(sw.Topology(2, "cpu"), constraints=rules, debug=False)
    plan = planner.plan(module, sharders)
    features = sw.KeyedJaggedTensor.from_lists({"f": [[1, 9], [4]]})

    def run(env: sw.ShardingEnv) -> dict[str, torch.Tensor]:
        model = DistributedModelParallel(copy.deepcopy(module), env, "cpu", plan, sharders)
        model(features).values().sum().backward()
        own: dict[str, torch.Tensor] = model.fused_optimizer.state_dict()["state"]["embedding_bags.t.weight"]
        model.fused_optimizer.load_state_dict(model.fused_optimizer.state_dict())
        return own

    for state in run_simulated(run, 2):
        assert {type(value) for value in state.values()} == {torch.Tensor}
        assert torch.equal(state["exp_avg"].any(1).nonzero().flatten(), torch.tensor([1, 4, 9]))


README = Path(__file__).parents[3] / "contrib" / "torchrec" / "README.md"
IDS, LENGTHS = torch.arange(3), torch.tensor([1, 2])


def refused(*calls: Callable[[], object]) -> None:
    for call in calls:
        with pytest.raises(sw.ShardwrightError):
            call()


def check_batches() -> None:
    batch = sw.KeyedJaggedTensor(["a"], IDS, lengths=torch.tensor([2, 2]))
    refused(
        lambda: collection()(batch),
        lambda: batch.permute([0]),
        lambda: sw.KeyedJaggedTensor.concat([batch]),
        lambda: sw.KeyedJaggedTensor(["a"], IDS, torch.ones(4), LENGTHS),
        lambda: sw.KeyedJaggedTensor(["a"], IDS.view(3, 1), lengths=LENGTHS),
        lambda: sw.KeyedJaggedTensor(["a"], IDS, lengths=LENGTHS, stride_per_key_per_rank=[[1], [1]]),
    )


def check_bags_of_keys() -> None:
    parts = {
        "a": sw.JaggedTensor(IDS, lengths=LENGTHS),
        "b": sw.JaggedTensor(IDS, lengths=torch.ones(3).int()),
    }
    refused(lambda: sw.KeyedJaggedTensor.from_jt_dict(parts))


def collection() -> sw.EmbeddingBagCollection:
    torch.manual_seed(0)
    return sw.EmbeddingBagCollection(
        [sw.EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=4, feature_names=["a"])]
    )


PURPOSES = {
    "A batch must be one": check_batches,
    "`force_variable_stride=True`": check_bags_of_keys,
}


@pytest.mark.parametrize("told", PURPOSES)
def test_difference_is_told_and_kept(told: str) -> None:
    _, _, kept = README.read_text().partition("Kept on purpose:")
    assert told in kept
    PURPOSES[told]()
