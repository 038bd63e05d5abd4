"""What is asked of a table is done by the kernel that is taken, or refused by name: all kernels, and all demands."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs
import pytest
import torch
from tests.core.runtime.exact_codecs import WholeOnly
from tests.errors import raises
from tests.plugins.built_in import built_in

import shardwright as sw
from shardwright.contracts.demands import CACHE, OPTIMIZER, UPDATE, Demand, demands_on
from shardwright.host import host
from shardwright.planning.options.enumeration import enumerate_options
from shardwright.planning.tables.constraints import Constraints
from shardwright_testing import installed

LOCAL = sw.ShardingEnv.local(device_type="cpu")
KERNELS = built_in("compute_kernels")

OF_SHAPE = {"name", "num_embeddings", "embedding_dim", "feature_names", "pooling", "is_weighted", "module"}
OF_ENGINE = {"qcomms_config", "max_gradient", "is_frozen"}
OF_REQUEST = {"data_type", "optimizer", "cache"}
OF_PLANNER = {"allowed"}


def test_every_field_of_a_table_has_somebody_who_obeys_it() -> None:
    """A new one is done by the engine, is in what kernels are asked, or is a demand that they are compared with."""
    fields = {field.name for field in attrs.fields(sw.TableSpec)}
    assert fields == OF_SHAPE | OF_ENGINE | OF_REQUEST | OF_PLANNER | {UPDATE.name}
    assert {field.name for field in attrs.fields(sw.KernelRequest)} >= OF_REQUEST


def table(name: str = "t", **asked: Any) -> sw.TableSpec:
    return sw.TableSpec(name, 10, 4, ["f"], **asked)


ASKED: Mapping[str, tuple[Demand, sw.TableSpec, sw.ParameterConstraints]] = {
    "optimizer": (OPTIMIZER, table(optimizer=sw.OptimizerSpec()), sw.ParameterConstraints()),
    "update": (UPDATE, table(update="in_step"), sw.ParameterConstraints()),
    "cache_params": (CACHE, table(), sw.ParameterConstraints(cache_params=sw.CacheParams(0.5))),
}


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("asked", ASKED)
def test_planner_gives_a_table_a_kernel_that_obeys_or_refuses_by_name(asked: str, kernel: str) -> None:
    demand, spec, rule = ASKED[asked]
    made = host().compute_kernels.create(kernel)
    device = "cuda" if made.supports(request_on("cuda")) is True else "cpu"
    topology = sw.Topology(2, device, memory_bytes={"disk": 1 << 30}, memory_bandwidths={"disk": 1e6})

    def plan(tables: sw.TableSpec, constraints: sw.ParameterConstraints) -> Any:
        named = attrs.evolve(constraints, compute_kernels=[kernel])
        planner = sw.EmbeddingShardingPlanner(topology, constraints={"t": named})
        return planner.plan_tables([tables]).plan[""]["t"].compute_kernel

    if demand.is_obeyed_by(made):
        assert plan(spec, rule) == kernel
    else:
        assert plan(table(), sw.ParameterConstraints()) == kernel
        with raises(sw.PlanningError, subject="t", asked=("compute_kernels", asked)):
            plan(spec, rule)


def request_on(device: str) -> sw.KernelRequest:
    return sw.KernelRequest.of(table(), 4, device=device)


def test_cache_is_for_those_kernels_named_that_have_one() -> None:
    """Both are named, so the planner may still take the one without."""
    rule = sw.ParameterConstraints(
        compute_kernels=["fused_torch", "mapped_caching"], cache_params=sw.CacheParams(0.5)
    )
    planner = sw.EmbeddingShardingPlanner(sw.Topology(2, "cpu"), constraints={"t": rule})
    assert planner.plan_tables([table()]).plan[""]["t"].compute_kernel == "fused_torch"


def runs_here(name: str) -> bool:
    kernel = host().compute_kernels.create(name)
    return kernel.supports(attrs.evolve(request_on("cpu"), on_this_machine=True)) is True


def bags_of_zeros(data_type: str = "FP32") -> sw.EmbeddingBagCollection:
    config = sw.EmbeddingBagConfig(
        name="t",
        num_embeddings=10,
        embedding_dim=4,
        feature_names=["f"],
        data_type=data_type,
        init_fn=torch.nn.init.zeros_,
    )
    return sw.EmbeddingBagCollection([config], device="cpu")


def model_of(
    bags: Any, kernel: str, fused_params: dict[str, Any] | None = None, **options: Any
) -> sw.DistributedModelParallel:
    block = sw.Block(table().all_rows, table().all_columns, rank=0)
    sharding = sw.ParameterSharding("table_wise", kernel, sw.Layout([block]))
    plan = sw.ShardingPlan({"": sw.EmbeddingModuleShardingPlan(t=sharding)})
    sharders = [sw.EmbeddingBagCollectionSharder(fused_params)]
    return sw.DistributedModelParallel(bags, LOCAL, plan=plan, sharders=sharders, **options)


def moved(model: sw.DistributedModelParallel, *optimizers: torch.optim.Optimizer) -> list[float]:
    """How far a step whose gradient is 1 moves the row that it looks up: after the backward pass, and at its end."""
    model(sw.KeyedJaggedTensor.from_lists({"f": [[3]]})).values().backward(torch.ones(1, 4))
    found = [row_of(model)]
    for optimizer in optimizers:
        optimizer.step()
    return [*found, row_of(model)]


def row_of(model: sw.DistributedModelParallel) -> float:
    weight = model.full_state_dict()["embedding_bags.t.weight"]
    assert (weight == weight[3, 0] * (torch.arange(10) == 3)[:, None]).all()  # the others stay
    return -float(weight[3, 0])


def own(model: sw.DistributedModelParallel) -> torch.optim.Optimizer:
    """The optimizer of a script, with the rate 1: of tables whose kernel has one, that of the model."""
    shown = [value for _, value in sw.in_backward_optimizer_filter(model.named_parameters())]
    return torch.optim.SGD(shown, lr=1.0) if shown else model.fused_optimizer


def applied(kernel: str, fuses: bool) -> None:
    bags = bags_of_zeros()
    sw.apply_optimizer_in_backward(torch.optim.SGD, bags.parameters(), {"lr": 1.0})
    assert moved(model_of(bags, kernel)) == [1.0, 1.0]


def fused(kernel: str, fuses: bool) -> None:
    assert moved(model_of(bags_of_zeros(), kernel, {"optimizer": "sgd", "learning_rate": 1.0})) == [1.0, 1.0]


def in_step(kernel: str, fuses: bool) -> None:
    model = model_of(bags_of_zeros(), kernel, {"learning_rate": 1.0} if fuses else None, update="in_step")
    assert moved(model, own(model)) == [0.0, 1.0]


def clipped(kernel: str, fuses: bool) -> None:
    model = model_of(
        bags_of_zeros(), kernel, {"max_gradient": 0.25, **({"learning_rate": 1.0} if fuses else {})}
    )
    assert moved(model, own(model))[1] == 0.25


def of_halves(kernel: str, fuses: bool) -> None:
    model = model_of(bags_of_zeros("FP16"), kernel, {"learning_rate": 1.0} if fuses else None)
    assert model.full_state_dict()["embedding_bags.t.weight"].dtype == torch.float16
    assert moved(model, own(model))[1] == 1.0


def at_rate(kernel: str, fuses: bool) -> None:
    model = model_of(bags_of_zeros(), kernel, {"learning_rate": 1.0} if fuses else None)
    optimizer = own(model)
    optimizer.param_groups[0]["lr"] = 0.5
    assert moved(model, optimizer)[1] == 0.5


DEMANDS: Mapping[Callable[[str, bool], None], str] = {
    applied: "optimizer",
    fused: "optimizer",
    in_step: "update",
    clipped: "max_gradient",
    of_halves: "data_type",
    at_rate: "learning_rate",
}


@pytest.mark.parametrize("kernel", [name for name in KERNELS if runs_here(name)])
@pytest.mark.parametrize("demand", DEMANDS)
def test_model_does_what_is_asked_or_names_what_it_refuses(
    demand: Callable[[str, bool], None], kernel: str
) -> None:
    made = host().compute_kernels.create(kernel)
    refused = refused_of(made, DEMANDS[demand])
    if not refused:
        demand(kernel, made.fuses_optimizer)
        return
    with raises(sw.UnsupportedError, subject="t", asked=refused):
        demand(kernel, made.fuses_optimizer)


def refused_of(kernel: sw.ComputeKernel, asked: str) -> str:
    """The name of what a kernel must refuse; empty if it must do what is asked."""
    if asked in ASKED and not ASKED[asked][0].is_obeyed_by(kernel):
        return asked
    halves = attrs.evolve(request_on("cpu"), data_type=sw.DataType.FP16)
    return "compute_kernel" if asked == "data_type" and kernel.supports(halves) is not True else ""


def test_tables_that_ask_for_nothing_make_no_demand() -> None:
    assert [*demands_on(table()), *demands_on(table(optimizer=None))] == []


@pytest.mark.parametrize(("pooling", "is_kept_whole"), [("SUM", True), ("NONE", False)])
def test_planner_cuts_no_rows_whose_sums_the_codec_does_not_carry(pooling: str, is_kept_whole: bool) -> None:
    with installed(WholeOnly()) as plugins:
        rule = sw.ParameterConstraints(qcomms_config=sw.QCommsConfig("whole_only"))
        options = enumerate_options(
            [table(pooling=pooling)], sw.Topology(2, "cpu"), Constraints({"t": rule}), plugins, batch_size=1
        )
        assert options.cuts_rows.any() != is_kept_whole
        rule = attrs.evolve(rule, sharding_types=["row_wise"])
        planner = sw.EmbeddingShardingPlanner(sw.Topology(2, "cpu"), constraints={"t": rule})
        if is_kept_whole:
            with raises(sw.PlanningError, subject="t"):
                planner.plan_tables([table(pooling=pooling)])
        else:
            planner.plan_tables([table(pooling=pooling)])


def planned(*tables: sw.TableSpec) -> sw.ShardingPlan:
    return sw.EmbeddingShardingPlanner(sw.Topology(1, "cpu")).plan_tables(tables)


def test_misspelt_optimizer_is_an_error_with_the_known_ones() -> None:
    with raises(sw.UnknownPluginError, asked="adgrad", possible=["adagrad", "sgd"]) as caught:
        planned(table(optimizer=sw.OptimizerSpec("adgrad")))
    assert len(str(caught.value)) < 400
    with raises(sw.UnknownPluginError, asked="my_own") as caught:  # like none that is known
        planned(table(optimizer=sw.OptimizerSpec("my_own")))
    assert len(str(caught.value)) < 400
