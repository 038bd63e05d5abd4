"""TorchRec's ways while its names are installed, and shardwright's own before and after."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import shardwright_torchrec
import torch
from shardwright_torchrec.distributed.parameter_sharding import ParameterSharding
from shardwright_torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    row_wise,
    table_wise,
)
from shardwright_torchrec.modules.crossnet import LowRankCrossNet, LowRankMixtureCrossNet
from shardwright_torchrec.optim.keyed import KeyedOptimizerWrapper
from shardwright_torchrec.optim.warmup import WarmupOptimizer, WarmupStage
from shardwright_torchrec.parallel.sharders import EmbeddingBagCollectionSharder
from shardwright_torchrec.planner.proposers import DynamicProgrammingProposer
from shardwright_torchrec.planner.topologies import Topology
from shardwright_torchrec.planner.types import Perf, Shard, ShardingOption, Storage
from shardwright_torchrec.plans import read_plan, write_plan
from torch import nn

import shardwright as sw
from shardwright_testing import run_simulated


@pytest.fixture
def installed() -> Iterator[None]:
    shardwright_torchrec.install()
    yield
    shardwright_torchrec.uninstall()


def uneven() -> sw.KeyedJaggedTensor:
    """Three lengths that add up to 6, and five values."""
    return sw.KeyedJaggedTensor(["a", "b", "c"], torch.arange(5), lengths=torch.tensor([2, 1, 3]))


def table(name: str, **other: Any) -> sw.EmbeddingBagConfig:
    return sw.EmbeddingBagConfig(name=name, embedding_dim=2, num_embeddings=8, feature_names=[name], **other)


def collection() -> sw.EmbeddingBagCollection:
    names = ("a", "b", "c")
    return sw.EmbeddingBagCollection([table(n) for n in names])


def test_ways_are_back_when_names_are_not_installed() -> None:
    shardwright_torchrec.install()
    shardwright_torchrec.uninstall()
    assert not str(sw.JaggedTensor.empty()).endswith("\n")
    with pytest.raises(sw.InvalidInputError, match="add up to 6"):
        uneven()
    assert type(sw.InvalidInputError()) is sw.InvalidInputError


@pytest.mark.usefixtures("installed")
def test_texts_end_with_a_newline() -> None:
    texts = [str(sw.JaggedTensor.empty()), str(sw.KeyedTensor(["a"], [1], torch.ones(1, 1)))]
    assert all(text.endswith("})\n") for text in texts)
    assert str(sw.KeyedJaggedTensor([], torch.tensor([]))) == "KeyedJaggedTensor()\n"


@pytest.mark.usefixtures("installed")
def test_a_batch_that_contradicts_itself_is_refused_where_it_is_used() -> None:
    with pytest.raises(AssertionError, match="add up to 6"):
        collection()(uneven())
    with pytest.raises(AssertionError, match="add up to 6"):
        uneven().permute([1, 0, 2])
    with pytest.raises(AssertionError, match="add up to 6"):
        sw.KeyedJaggedTensor.concat([uneven()])
    with pytest.raises(AssertionError, match="1 weights for 3 values"):
        collection()(sw.KeyedJaggedTensor(["a"], torch.arange(3), torch.ones(1), torch.tensor([3])))
    other = sw.JaggedTensor(torch.arange(4), lengths=torch.tensor([1, 2]))
    with pytest.raises(AssertionError, match="add up to 3"):
        sw.KeyedJaggedTensor.from_jt_dict({"a": other})
    assert other.to_padded_dense().tolist() == [[0, 0], [1, 2]]


@pytest.mark.usefixtures("installed")
def test_offsets_of_no_elements_are_those_of_no_bags() -> None:
    none = torch.tensor([])
    batch = sw.KeyedJaggedTensor(["a"], none, offsets=none)
    assert (batch.stride(), batch.offsets().tolist(), batch["a"].to_dense()) == (0, [0], [])
    assert sw.JaggedTensor(none, offsets=none).to_dense() == []
    with pytest.raises(AssertionError, match="1 dimension"):
        sw.KeyedJaggedTensor(["a"], none, offsets=torch.zeros(0, 1).long())


def test_offsets_have_their_leading_0_in_shardwright() -> None:
    with pytest.raises(sw.InvalidInputError, match="leading 0"):
        sw.JaggedTensor(torch.tensor([]), offsets=torch.tensor([]))


@pytest.mark.usefixtures("installed")
def test_errors_about_arguments_are_assertion_errors_too() -> None:
    with pytest.raises(AssertionError, match="low_rank"):
        LowRankCrossNet(4, 3, low_rank=0)
    with pytest.raises(AssertionError, match=r"num_experts .* got 0 and 1"):
        LowRankMixtureCrossNet(4, 3, num_experts=0)
    with pytest.raises(AssertionError, match="got no tables"):
        sw.EmbeddingBagCollection([])
    assert sw.InvalidInputError.__mro__[1:3] == (sw.ShardwrightError, ValueError)  # it is as ever
    again = pickle.loads(pickle.dumps(sw.InvalidInputError("one", 2)))
    assert isinstance(again, AssertionError)
    assert isinstance(again, sw.InvalidInputError)
    assert again.args == ("one", 2)
    assert not isinstance(sw.UnsupportedError(), AssertionError)


@pytest.mark.usefixtures("installed")
def test_tables_are_drawn_as_torch_draws_them_and_then_as_configured() -> None:
    torch.manual_seed(0)
    one = sw.EmbeddingBagCollection([table("t", init_fn=nn.init.uniform_)])
    torch.manual_seed(0)
    bag = nn.EmbeddingBag(8, 2)
    assert one.table_weight("t").equal(nn.init.uniform_(bag.weight))


def test_init_state_leaves_gradients_of_0_behind() -> None:
    params = {name: nn.Parameter(torch.ones(2, 2)) for name in ("dense", "sparse")}
    KeyedOptimizerWrapper(params, lambda own: torch.optim.SGD(own, lr=0.1)).init_state({"sparse"})
    dense, sparse = (param.grad for param in params.values())
    assert dense is not None
    assert not dense.any()
    assert not dense.is_sparse
    assert sparse is not None
    assert sparse.is_sparse


def _option(table: str, hbm: int, time: float) -> ShardingOption:
    shard = Shard([1, 1], [0, 0], Storage(hbm, 0), perf=Perf(time, 0.0, 0.0, 0.0))
    module = ("m", nn.Linear(1, 1))
    return ShardingOption(table, torch.zeros(1, 1), module, [], 8, "table_wise", "device", "fused", [shard])


def test_dynamic_programming_tells_memory_apart_by_the_devices() -> None:
    proposer = DynamicProgrammingProposer()
    proposer.load([_option(table, *own) for table in ("a", "b") for own in ((1, 2.0), (50, 1.0), (99, 3.0))])
    found = []
    while (proposal := proposer.propose()) is not None:
        found.append([option.total_storage.hbm for option in proposal])
        proposer.feedback(True, storage_constraint=Topology(2, "cuda", hbm_cap=10**6))
    assert found == [[1, 1], [50, 50]]


def test_a_warming_optimizer_has_its_steps_in_its_state() -> None:
    weight = nn.Parameter(torch.ones(2))
    inner = sw.KeyedOptimizerWrapper(
        {"weight": weight}, lambda own: torch.optim.SGD(own, lr=0.1, momentum=0.9)
    )
    warm = WarmupOptimizer(inner, [WarmupStage(max_iters=10)])
    for _ in range(3):
        weight.sum().backward()
        warm.step()
    steps = [own["warmup"][0].item() for own in warm.state.values() if "warmup" in own]
    assert steps == [3]
    assert weight in warm.state
    assert set(sw.OptimizerWrapper(warm).state_dict()["state"]) == {"weight", "__warmup"}


def test_columns_are_cut_into_parts_of_given_widths() -> None:
    own = sw.EmbeddingBagCollection(
        [sw.EmbeddingBagConfig(name="t", embedding_dim=24, num_embeddings=8, feature_names=["f"])]
    )
    cut = {"local_size": 2, "world_size": 2, "device_type": "cpu"}
    plan = construct_module_sharding_plan(own, {"t": column_wise(size_per_rank=[16, 8])}, **cut)
    spec = plan["t"].sharding_spec
    assert spec is not None
    assert [(shard.shard_sizes, shard.shard_offsets) for shard in spec.shards] == [
        ([8, 16], [0, 0]),
        ([8, 8], [0, 16]),
    ]
    assert plan["t"].ranks == [0, 1]
    topology, tables = sw.Topology(2, "cpu"), EmbeddingBagCollectionSharder().tables(own)
    whole = sw.ShardingPlan({"": plan})
    assert read_plan(write_plan(whole), tables, topology).plan[""]["t"].layout == plan["t"].layout
    assert ParameterSharding("column_wise", "fused", [0, 1], spec).layout == plan["t"].layout
    for widths in ([16, 16], [24, 0], [8, 8, 8]):
        with pytest.raises(sw.PlanError, match="24 columns, and there are 2 ranks"):
            construct_module_sharding_plan(own, {"t": column_wise(size_per_rank=widths)}, **cut)
    made = ParameterSharding("column_wise", plan["t"].compute_kernel, [0, 1], spec)
    assert made == plan["t"]
    whole = sw.ShardingPlan({"": plan})
    topology = sw.Topology(2, "cpu")
    tables = [sw.TableSpec("t", 8, 24, feature_names=["f"])]
    assert read_plan(write_plan(whole), tables, topology) == whole


def test_columns_on_ranks_are_equal() -> None:
    own = sw.EmbeddingBagCollection(
        [sw.EmbeddingBagConfig(name="t", embedding_dim=25, num_embeddings=8, feature_names=["f"])]
    )
    cut = {"local_size": 2, "world_size": 2, "device_type": "cpu"}
    with pytest.raises(sw.PlanError, match=r"dim of 25 cannot be evenly divided across \[0, 1\]; .*size_per"):
        construct_module_sharding_plan(own, {"t": column_wise(ranks=[0, 1])}, **cut)


PLACED = {
    "table": (table_wise(1, device="cpu"), [1], ["rank:0/cpu"], [[8, 24]]),
    "columns": (
        column_wise([0, 1], device_types=["cpu", "cuda"]),
        [0, 1],
        ["rank:0/cpu", "rank:0/cuda:0"],
        [[8, 12], [8, 12]],
    ),
    "widths": (
        column_wise(size_per_rank=[16, 8], device_types=["cuda", "cpu"]),
        [0, 1],
        ["rank:0/cuda:0", "rank:0/cpu"],
        [[8, 16], [8, 8]],
    ),
    "rows": (
        row_wise(([5, 2, 9], ["cpu", "cuda", "cuda"])),
        [0, 1, 2],
        ["rank:0/cpu", "rank:1/cuda:0", "rank:2/cuda:1"],
        [[5, 24], [2, 24], [1, 24]],
    ),
}


@pytest.mark.parametrize("form", PLACED)
def test_shards_on_other_devices_than_their_ranks_are_plans_to_read(form: str) -> None:
    generator, ranks, places, sizes = PLACED[form]
    own = sw.EmbeddingBagCollection(
        [sw.EmbeddingBagConfig(name="t", embedding_dim=24, num_embeddings=8, feature_names=["f"])]
    )
    cut = {"local_size": 2, "world_size": 2, "device_type": "cuda"}
    plan = construct_module_sharding_plan(own, {"t": generator}, **cut)
    spec = plan["t"].sharding_spec
    assert spec is not None
    assert plan["t"].ranks == ranks
    assert [str(shard.placement) for shard in spec.shards] == places
    assert [shard.shard_sizes for shard in spec.shards] == sizes
    whole = sw.ShardingPlan({"": plan})
    assert places[-1] in str(whole)
    assert pickle.loads(pickle.dumps(plan)) == plan
    tables = EmbeddingBagCollectionSharder().tables(own)
    assert read_plan(write_plan(whole), tables, sw.Topology(2, "cuda")) == whole
    if len(places) > 1:
        assert ParameterSharding(plan["t"].sharding_type, "dense", ranks, spec) == plan["t"]
    with pytest.raises(sw.UnsupportedError, match="a rank has one device"):
        EmbeddingBagCollectionSharder().shard(own, plan, sw.ShardingEnv.from_local(1, 0))


def test_rows_are_cut_into_parts_of_given_sizes() -> None:
    own = sw.EmbeddingBagCollection(
        [sw.EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=8, feature_names=["f"])]
    )
    cut = {"local_size": 2, "world_size": 2, "device_type": "cpu"}
    batch = sw.KeyedJaggedTensor(["f"], torch.tensor([0, 5, 6, 7, 4]), lengths=torch.tensor([2, 3]))
    expected = own(batch).values()
    for sizes, shards in (([6, 9], [6, 2]), ([0, 8], [0, 8]), ([8, 0], [8, 0])):
        plan = construct_module_sharding_plan(own, {"t": row_wise((sizes, "cpu"))}, **cut)
        spec = plan["t"].sharding_spec
        assert spec is not None
        assert [shard.shard_sizes[0] for shard in spec.shards] == shards
        whole = sw.ShardingPlan({"": plan})
        tables = EmbeddingBagCollectionSharder().tables(own)
        assert read_plan(write_plan(whole), tables, sw.Topology(2, "cpu")) == whole

        def outputs(env: sw.ShardingEnv, plan: sw.EmbeddingModuleShardingPlan = plan) -> torch.Tensor:
            sharded = EmbeddingBagCollectionSharder().shard(copy.deepcopy(own), plan, env, "cpu")
            return sharded(batch).values().detach()

        for found in run_simulated(outputs, 2):
            torch.testing.assert_close(found, expected.detach())
    with pytest.raises(sw.PlanError, match=r"8 rows, and the parts .* have room for 7"):
        construct_module_sharding_plan(own, {"t": row_wise(([4, 3], "cpu"))}, **cut)
    with pytest.raises(sw.PlanError, match="shard on rank 2"):
        construct_module_sharding_plan(own, {"t": row_wise(([4, 3, 1], "cpu"))}, **cut)
    with pytest.raises(sw.InvalidInputError, match="each part has a size and a device"):
        row_wise(([4, 4], ["cpu"]))
