"""`DistributedModelParallel` on simulated ranks, and on a process group of one."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Iterator

import pytest
import torch
from tests.core.runtime.plans import RATE, SHARDER, Cut, Cuts, Kernels
from tests.ports import group_of_one
from torch import nn

from shardwright import (
    CommBackend,
    DistributedModelParallel,
    EmbeddingBagConfig,
    EmbeddingModuleShardingPlan,
    InvalidInputError,
    LeaveAlone,
    PlanError,
    ShardingEnv,
    ShardingPlan,
    UnsupportedError,
    hookimpl,
)
from shardwright.host import PluginHost, use_host
from shardwright.runtime.sharded.tables.initialization import initialize, seeded
from shardwright_plugins import dense_part
from shardwright_plugins.comm_backends.torch_communicator import TorchCommunicator
from shardwright_testing import run_simulated

CASE = Cuts([Cut(5, 2, ("a",), edges=(1,), ranks=(0, 1)), Cut(7, 3, ("b",), "MEAN", ranks=(1,))], 2)
ALONE = Cuts([Cut(5, 2, ("a",)), Cut(7, 3, ("b",), "MEAN", edges=(1,))], 1)
WIDTH = 5


class Model(nn.Module):
    def __init__(self, case, device="cpu"):
        super().__init__()
        self.bags = nn.ModuleList([case.module(device)])
        torch.manual_seed(8)
        self.over = nn.Linear(WIDTH, 1, device=device)

    def forward(self, batch):
        return self.over(self.bags[0](batch).values())


def plan_of(case, *paths):
    return ShardingPlan({path: EmbeddingModuleShardingPlan(case.shardings()) for path in paths})


def wrapped(case, env, model=None, path="bags.0"):
    return DistributedModelParallel(
        model or Model(case), env=env, device="cpu", plan=plan_of(case, path), sharders=[SHARDER]
    )


class OneGloo(CommBackend):
    name, devices = "gloo", ("cpu",)

    def connect(self, process_group):
        return TorchCommunicator(process_group, torch.device("cpu"))


class Backends:
    @hookimpl
    def shardwright_comm_backends(self):
        return [OneGloo]


@pytest.fixture
def env_of_one() -> Iterator[ShardingEnv]:
    """An environment over a gloo group of this process alone."""
    plugins = {"loops": Kernels(), "backends": Backends(), "dense_part": dense_part}
    with group_of_one(), use_host(PluginHost(entry_points=(), plugins=plugins, environment={})):
        yield ShardingEnv.from_process_group()


def test_building_a_model_seeds_no_accelerator(env_of_one, monkeypatch):
    """Each rank has seeded its own as it likes; seeded alike, all would drop out the same elements."""
    model, seeds = Model(ALONE, "meta"), []
    for accelerator in (torch.cuda, torch.xpu):
        monkeypatch.setattr(accelerator, "manual_seed_all", seeds.append)
    wrapped(ALONE, env_of_one, model)
    initialize(
        torch.empty(3, 2),
        EmbeddingBagConfig(3, 2, name="t", init_fn=torch.nn.init.normal_),
        ALONE.shardings()["t0"].layout.blocks[0],
        path="t",
        seed=1,
    )
    assert seeds == []


@pytest.mark.gpu
def test_building_a_model_leaves_the_accelerators_random_numbers_as_they_were():
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    device = torch.device("cuda", torch.accelerator.current_device_index())
    before = torch.cuda.get_rng_state(device)
    drawn = []
    for _ in range(2):
        with seeded(7, device):
            drawn.append(torch.rand(4, device=device))
    assert torch.equal(*drawn)
    assert torch.equal(torch.cuda.get_rng_state(device), before)


def test_module_on_meta_without_reset_parameters_raises_with_its_path():
    class Plain(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.empty(2, device="meta"))

    model = Model(CASE)
    model.head = nn.Sequential(Plain())
    with pytest.raises(
        UnsupportedError, match=r"Plain at 'head\.0' is on 'meta' and has no reset_parameters\(\)"
    ):
        run_simulated(lambda env: wrapped(CASE, env, copy.deepcopy(model)), 2)


def test_state_dict_of_a_module_around_the_model_loads_into_it():
    around = nn.ModuleDict({"net": wrapped(ALONE, ShardingEnv.local(device_type="cpu"))})
    other = {name: value + 1 for name, value in around.state_dict().items()}
    assert all(name.startswith(("net.bags.", "net.over.")) for name in other)
    around.load_state_dict(other)
    torch.testing.assert_close(around.state_dict(), other)
    with pytest.raises(RuntimeError, match="Missing key"):
        around.load_state_dict({})


class Twice(nn.Module):
    """One collection under two parents, and a second one."""

    def __init__(self, case):
        super().__init__()
        self.first = case.module()
        self.inner = nn.ModuleDict({"again": self.first, "other": case.module()})
        self.over = nn.Linear(WIDTH, 1)

    def forward(self, batch):
        return sum(self.over(bags(batch).values()) for bags in (self.first, *self.inner.values()))


def test_keys_that_a_module_around_the_model_misses_have_the_names_of_its_state(env_of_one):
    outer = nn.ModuleDict({"inner": wrapped(ALONE, env_of_one), "_model": nn.Linear(1, 1)})
    state = outer.state_dict()
    assert {name.partition(".")[0] for name in state} == {"inner", "_model"}
    found = outer.load_state_dict({}, strict=False)
    assert found.missing_keys == list(state)
    found = outer.load_state_dict({**state, "inner.over.more": torch.zeros(1)}, strict=False)
    assert found.unexpected_keys == ["inner.over.more"]


def test_collection_shared_by_two_parents_is_sharded_once_and_used_by_both(env_of_one):
    torch.manual_seed(1)
    model = Twice(ALONE)
    expected = copy.deepcopy(model)
    sharded = DistributedModelParallel(
        model, env=env_of_one, device="cpu", plan=plan_of(ALONE, "first", "inner.other"), sharders=[SHARDER]
    )
    assert sharded.module.first is sharded.module.inner["again"]
    assert type(sharded.module.first).__name__ == "ShardedEmbeddingBagCollection"
    assert list(sharded.full_state_dict()) == list(expected.state_dict())
    optimizer = torch.optim.SGD(
        [*expected.first.parameters(), *expected.inner["other"].parameters()], lr=RATE
    )
    for step in range(2):
        optimizer.zero_grad()
        batch = ALONE.batch(3, seed=step)
        actual, reference = sharded(batch), expected(batch)
        torch.testing.assert_close(actual, reference)
        actual.sum().backward()
        reference.sum().backward()
        optimizer.step()
    assert list(sharded.fused_optimizer.params) == [
        f"{path}.embedding_bags.{table}.weight" for path in ("first", "inner.other") for table in ("t0", "t1")
    ]


@pytest.mark.parametrize("take", [copy.deepcopy, pickle.dumps])
def test_sharded_collection_that_is_copied_or_pickled_says_what_to_do(env_of_one, take):
    sharded = wrapped(ALONE, env_of_one).module.bags[0]
    with pytest.raises(UnsupportedError, match=r"cannot be copied or pickled: save its full_state_dict\(\)"):
        take(sharded)


def test_plan_for_a_collection_that_is_left_alone_says_that_no_sharder_shards_it(env_of_one):
    model = Model(ALONE)
    with pytest.raises(InvalidInputError, match=r"at 'bags\.0', and no sharder shards"):
        DistributedModelParallel(
            model,
            env=env_of_one,
            device="cpu",
            plan=plan_of(ALONE, "bags.0"),
            sharders=[LeaveAlone(model.bags[0]), SHARDER],
        )


@pytest.mark.parametrize(
    ("edit", "error", "text"),
    [
        (
            lambda plan: plan.plan.update(plan_of(CASE, "bags.00").plan),
            InvalidInputError,
            r"a module at 'bags\.00'.*Did you mean 'bags\.0'\?",
        ),
        (
            lambda plan: plan.plan.clear(),
            InvalidInputError,
            r"nothing for EmbeddingBagCollection at 'bags\.0'; it is for \[\]",
        ),
        (
            lambda plan: plan.plan["bags.0"].pop("t1"),
            InvalidInputError,
            r"plan of module 'bags\.0' leaves out 1 of 2 tables: t1",
        ),
        (
            lambda plan: plan.plan["bags.0"].update(t11=plan.plan["bags.0"]["t1"]),
            InvalidInputError,
            r"'bags\.0' names the table 't11', .* Did you mean 't1'\?",
        ),
        (
            lambda plan: plan.plan["bags.0"].update(t1=plan.plan["bags.0"]["t0"]),
            ValueError,
            r"table 'bags\.0\.t1' \(cut\): .*7 x 3.*covers 5 rows",
        ),
    ],
    ids=["no such collection", "no collection", "a table less", "a table more", "of another table"],
)
def test_plan_that_is_not_of_the_model_says_what_differs(edit, error, text):
    model, plan = Model(CASE), plan_of(CASE, "bags.0")
    edit(plan)
    with pytest.raises(error, match=text):
        run_simulated(
            lambda env: DistributedModelParallel(
                copy.deepcopy(model), env=env, device="cpu", plan=plan, sharders=[SHARDER]
            ),
            2,
        )


@pytest.mark.parametrize(("planned_for", "told"), [(1, "1 rank"), (3, "3 ranks")])
def test_plan_for_another_number_of_ranks_says_so_before_anything_is_sharded(planned_for, told):
    plan = ShardingPlan(plan_of(CASE, "bags.0").plan, {"topology": {"world_size": planned_for}})
    with pytest.raises(PlanError, match=f"the plan is for {told}, and the model is on 2: plan with"):
        run_simulated(
            lambda env: DistributedModelParallel(
                Model(CASE), env=env, device="cpu", plan=plan, sharders=[SHARDER]
            ),
            2,
        )


def test_model_with_tables_of_torch_alone_is_warned_of_unless_sharders_are_given():
    env, model = ShardingEnv.local(), nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 1))
    with pytest.warns(RuntimeWarning, match="Embedding"):
        assert DistributedModelParallel(model, env, "cpu").plan == ShardingPlan({})
    with warnings.catch_warnings(action="error"):
        DistributedModelParallel(model, env, "cpu", sharders=[])
        DistributedModelParallel(model[1], env, "cpu")
