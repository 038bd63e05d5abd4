"""Parts of core's classes that plugins bring: another plugin's are used, and without one what needs it is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from tests.plugins.parts.brought import host_with, host_without
from torch import nn

import shardwright as sw
from shardwright.host import use_host
from shardwright.optim.fused import renaming
from shardwright_testing import run_simulated


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags = sw.EmbeddingBagCollection([sw.EmbeddingBagConfig(9, 4, "item", feature_names=["item"])])
        self.over = nn.Linear(4, 1)

    def forward(self, batch: sw.KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.bags(batch).values())


def sharded(
    model: nn.Module | None = None, env: sw.ShardingEnv | None = None, **options: Any
) -> sw.DistributedModelParallel:
    env = env or evolve(sw.ShardingEnv.local(device_type="cpu"), process_group=object())
    return sw.DistributedModelParallel(model or Model(), env=env, **options)


def gradient_of_a_table() -> Any:
    model = sharded(init_data_parallel=False, update="in_step")
    model(sw.KeyedJaggedTensor.from_lists({"item": [[1, 2], [3]]})).sum().backward()
    (table,) = (own for name, own in model.named_parameters() if "item" in name)
    assert table.grad is not None
    return table.grad


def planned(topology: sw.Topology, **asked: Any) -> sw.ShardingPlan:
    return sw.EmbeddingShardingPlanner(topology, **asked).plan_tables([sw.TableSpec("t", 10, 8, ["f"])])


def test_dense_part_is_wrapped_by_what_a_plugin_brings() -> None:
    asked: list[Any] = []

    def wrap(module: nn.Module, env: Any, device: Any, ignored: Any, options: Any) -> nn.Module:
        asked.append((device, sorted(ignored), options["static_graph"]))
        return nn.Sequential(module)

    with use_host(host_with("method:dense_part", wrap, "builtin_dense_part")):
        model = sharded(data_parallel_wrapper=sw.DefaultDataParallelWrapper(static_graph=True))
    assert asked == [(torch.device("cpu"), ["bags.embedding_bags.item.weight"], True)]
    batch = sw.KeyedJaggedTensor.from_lists({"item": [[1, 2], []]})
    assert torch.equal(model(batch), model.module(batch))


def test_model_without_a_dense_part_needs_no_plugin_that_would_wrap_it() -> None:
    with use_host(host_without("builtin_dense_part")):
        model = sharded(Model().bags)
    batch = sw.KeyedJaggedTensor.from_lists({"item": [[1, 2], []]})
    assert model(batch).values().shape == (2, 4)


def test_dense_part_that_some_ranks_alone_have_wrapped_is_an_error_on_all() -> None:
    model, errors = Model(), list[str]()

    def wrap(module: nn.Module, env: sw.ShardingEnv, *_: Any) -> nn.Module | None:
        return nn.Sequential(module) if env.rank else None

    def run(env: sw.ShardingEnv) -> None:
        try:
            sharded(copy.deepcopy(model), evolve(env, process_group=object()))
        except sw.DistributedError as error:
            errors.append(str(error))

    with use_host(host_with("method:dense_part", wrap, "builtin_dense_part")):
        run_simulated(run, 2)
    assert len(errors) == 2
    assert all("method:dense_part" in error for error in errors)


def test_sharding_group_is_what_a_plugin_brings() -> None:
    topology, asked = sw.Topology(8, "cpu"), []

    def group(topology: sw.Topology, size: int, **options: Any) -> sw.Topology:
        asked.append((size, options))
        return sw.Topology(4, "cpu").evolved(replicas=sw.Replicas(2))

    with use_host(host_with("method:sharding_group", group, "builtin_sharding_groups")):
        assert topology.sharding_group(4, sync_every=3).replicas == sw.Replicas(2)
    options = {"sync_every": 3, "use_inter_host_allreduce": False, "node_group_size": None}
    assert asked == [(4, options)]


def test_norm_of_a_gradient_over_ranks_is_refused_without_a_plugin() -> None:
    gradient = gradient_of_a_table()
    expected = gradient.to_local().norm()
    assert float(gradient.norm()) == pytest.approx(float(expected))
    with (
        use_host(host_without("builtin_optimizers")),
        pytest.raises(sw.UnsupportedError, match=r"Not loaded: 'builtin_optimizers' .*SHARDWRIGHT_PLUGINS"),
    ):
        gradient.norm()
    assert float(gradient.mul_(2.0).norm()) == pytest.approx(2 * float(expected))


def test_operator_of_gradients_that_two_plugins_bring_is_an_error_whatever_their_order() -> None:
    gradient = gradient_of_a_table()
    norm = {"linalg_vector_norm": lambda *_: torch.ones(())}
    for word in ("acme", "zeta"):  # before and after the built-in one
        with (
            use_host(host_with(f"gradients:{word}", lambda: norm, "builtin_guards")),
            pytest.raises(sw.DuplicateNameError, match=rf"linalg_vector_norm.*{word}"),
        ):
            gradient.norm()
    with use_host(host_with("gradients:zeta", lambda: norm, "builtin_optimizers")):
        assert gradient.norm() == 1


def test_torch_optimizers_are_those_that_plugins_bring_and_programs_register() -> None:
    row = (torch.optim.RMSprop, "root", renaming({"lr": "learning_rate", "alpha": "decay", "eps": "eps"}))
    weight = nn.Parameter(torch.ones(3, 2))
    sw.apply_optimizer_in_backward(torch.optim.RMSprop, [weight], {"lr": 0.5})
    with pytest.raises(sw.UnsupportedError):
        sw.optimizer_spec_of(weight)
    with use_host(host_with("torch_optimizers:root", lambda: [row], "builtin_guards")):
        spec = sw.optimizer_spec_of(weight)
        with pytest.raises(sw.DuplicateNameError):
            sw.register_fused_optimizer(torch.optim.RMSprop, "other", row[2])
    assert spec == sw.OptimizerSpec("root", 0.5, {"decay": 0.99, "eps": 1e-8})


@pytest.mark.parametrize(
    ("name", "off", "gives", "said"),
    [
        ("method:dense_part", "builtin_dense_part", 7, "what it gives.*a Module or None, got 7"),
        ("method:sharding_group", "builtin_sharding_groups", None, "what it gives.*a Topology, got None"),
        ("method:sharding_group", "builtin_sharding_groups", sw.Topology(8, "cpu"), "of 4 ranks, it .* of 8"),
        ("method:machine", "builtin_bandwidths", 7, "what it gives must be a Topology, got 7"),
        ("method:machine", "builtin_bandwidths", sw.Topology(8, "cpu"), "of 2 ranks, it .* of 8"),
        ("method:progress", "builtin_reports", 7, "what it gives must be .*ContextManager, got 7"),
        ("method:no_plan", "builtin_reports", 7, "what it gives must be a NoPlanError or None, got 7"),
        ("method:averaging", "builtin_sharding_groups", 7, "what it gives must be .*, got 7"),
        (
            "gradients:mine",
            "builtin_guards",
            {"sum": 7},
            r"what it gives.*\['sum'\] must be a function, got 7",
        ),
        ("torch_optimizers:mine", "builtin_guards", [(torch.optim.SGD, "sgd")], "what it gives.*got .*SGD"),
        ("step:mine", "builtin_guards", 7, "what it gives.*StepListener, got 7"),
    ],
)
def test_what_an_extension_gives_against_its_contract_is_refused_by_name(
    name: str, off: str, gives: object, said: str
) -> None:
    gradient = gradient_of_a_table()
    weight = nn.Parameter(torch.ones(3, 2))
    sw.apply_optimizer_in_backward(torch.optim.SGD, [weight], {"lr": 0.5})
    asking: dict[str, Callable[[], object]] = {
        "method:dense_part": sharded,
        "method:sharding_group": lambda: sw.Topology(8, "cpu").sharding_group(4),
        "method:machine": lambda: sw.Topology.from_machine("machine.json", 2),
        "method:averaging": lambda: planned(sw.Topology(2, "cpu", replicas=sw.Replicas(2))),
        "method:progress": lambda: planned(sw.Topology(2, "cpu"), progress=True),
        "method:no_plan": lambda: planned(sw.Topology(2, "cpu")),
        "gradients:mine": gradient.sum,
        "torch_optimizers:mine": lambda: sw.optimizer_spec_of(weight),
        "step:mine": sharded,
    }
    with (
        use_host(host_with(name, lambda *args, **kwargs: gives, off)),
        pytest.raises(sw.PluginLoadError, match=f"{name}' of plugin .* broke its contract: .*{said}"),
    ):
        asking[name]()


@pytest.mark.parametrize(
    ("gives", "said"),
    [
        (lambda runs: (np.zeros(runs), np.zeros(runs + 1)), "broke its contract: 'milliseconds' must be one"),
        (lambda runs: (np.zeros(runs), np.full(runs, np.nan)), "returned nan as 'milliseconds' for .*'t'"),
        (lambda runs: (np.full(runs, -1.0), np.zeros(runs)), "returned -1.0 as 'bytes' for .*'t'"),
    ],
)
def test_costs_of_averaging_are_finite_numbers_of_each_shard_or_refused_by_name(
    gives: Callable[[int], object], said: str
) -> None:
    brought = host_with(
        "method:averaging", lambda options, _: gives(options.num_shards), "builtin_sharding_groups"
    )
    with (
        use_host(brought),
        pytest.raises(sw.PlanningError, match=f"'method:averaging' of plugin .* {said}"),
    ):
        planned(sw.Topology(2, "cpu", replicas=sw.Replicas(2)))


def test_optimizer_of_torch_that_two_plugins_bring_otherwise_is_an_error_that_names_it() -> None:
    row = (torch.optim.Adam, "adam_of_acme", renaming({"lr": "learning_rate"}))
    weight = nn.Parameter(torch.ones(3, 2))
    sw.apply_optimizer_in_backward(torch.optim.SGD, [weight], {"lr": 0.5})
    for word in (
        "acme",
        "zeta",
    ):  # before and after the built-in one: which is taken must not follow from that
        with (
            use_host(host_with(f"torch_optimizers:{word}", lambda: [row], "builtin_guards")),
            pytest.raises(
                sw.DuplicateNameError, match=r"torch\.optim\.Adam stands for '.*SHARDWRIGHT_PLUGINS"
            ),
        ):
            sw.optimizer_spec_of(weight)


def model_and_other_plan() -> tuple[sw.DistributedModelParallel, sw.ShardingPlan]:
    model = sharded(Model().bags)
    rules = {"item": sw.ParameterConstraints(sharding_types=["row_wise"])}
    return model, sw.EmbeddingShardingPlanner(constraints=rules).collective_plan(model, env=model.env)


def test_reshard_without_a_plugin_or_to_what_is_no_plan_is_refused() -> None:
    model, plan = model_and_other_plan()
    before = model.plan
    with pytest.raises(sw.InvalidInputError, match="plan must be a ShardingPlan, got None"):
        model.reshard(None)  # type: ignore[arg-type]
    with use_host(host_without("builtin_resharding")), pytest.raises(sw.UnknownPluginError):
        model.reshard(plan)
    assert model.plan is before
