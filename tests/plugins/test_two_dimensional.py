"""Sharding groups with replicas, on simulated ranks: what training gives, what travels, and what plans say of both."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.errors import error_of
from tests.pairs import each_once
from tests.plugins.built_in import built_in
from tests.plugins.training.test_equality import OPTIMIZERS

from shardwright import (
    DistributedError,
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagCollectionSharder,
    EmbeddingBagConfig,
    EmbeddingShardingPlanner,
    InvalidInputError,
    KeyedJaggedTensor,
    ParameterConstraints,
    PlanError,
    ShardingEnv,
    ShardingPlan,
    Topology,
    check_plan,
    load_checkpoint,
    save_checkpoint,
    spec_to_torch,
)
from shardwright_plugins.sharding_groups import DMPCollection, ShardingEnv2D, averaging
from shardwright_testing.simulated import run_simulated

WORLD, GROUP, HOST = 4, 2, 2
ROWS = {"user": 23, "item": 17, "shop": 6}
DIM, BATCH, RATE = 8, 3, 0.1
TYPES = built_in("sharding_types")


def bags(seed: int = 5) -> EmbeddingBagCollection:
    torch.manual_seed(seed)
    configs = [
        EmbeddingBagConfig(
            name=name,
            num_embeddings=rows,
            embedding_dim=DIM,
            feature_names=[name],
            pooling="MEAN" if name == "item" else "SUM",
        )
        for name, rows in ROWS.items()
    ]
    return EmbeddingBagCollection(configs, device="cpu")


FIRST, OTHER = bags(5), bags(6)  # made once: random numbers come from one generator for all threads


def sharder(optimizer: str | None) -> EmbeddingBagCollectionSharder:
    """The sharder of tables with an optimizer, or of those that leave it to a script's."""
    return EmbeddingBagCollectionSharder(optimizer and {"optimizer": optimizer, "learning_rate": RATE})


def planned(
    types: Sequence[str],
    optimizer: str | None = "sgd",
    *,
    kernels: list[str] | None = None,
    sync_every: int = 1,
    world_size: int = WORLD,
    local: int = HOST,
) -> EmbeddingShardingPlanner:
    rules = {
        name: ParameterConstraints(
            sharding_types=[types[index % len(types)]], compute_kernels=kernels, min_partition=4
        )
        for index, name in enumerate(ROWS)
    }
    disk = {
        "memory_bytes": {"disk": 1 << 30},
        "memory_bandwidths": {"disk": 1e6},
    }  # for kernels that map files
    cluster = Topology(world_size, "cpu", local_world_size=local, **disk)
    topology = cluster.sharding_group(GROUP, sync_every=sync_every)
    planner = EmbeddingShardingPlanner(topology=topology, batch_size=BATCH, constraints=rules)
    planner.made = planner.plan_tables(sharder(optimizer).tables(bags(), ""))  # type: ignore[attr-defined]
    return planner


def batch(step: int, rank: int) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    lengths = torch.randint(0, 4, (len(ROWS), BATCH), generator=generator)
    values = [
        torch.randint(0, rows, (int(own.sum()),), generator=generator)
        for rows, own in zip(ROWS.values(), lengths, strict=True)
    ]
    return KeyedJaggedTensor(
        keys=list(ROWS), values=torch.cat(values), lengths=lengths.flatten().to(torch.int32)
    )


def loss_of(model: Any, step: int, rank: int) -> torch.Tensor:
    values = model(batch(step, rank)).values()
    return (values * torch.linspace(-1, 2, values.shape[1])).square().mean()


def wrapped(env: Any, plan: ShardingPlan, optimizer: str | None = "sgd", **options: Any) -> DMPCollection:
    # Other weights on each rank: those of the first sharding group count.
    module = copy.deepcopy(FIRST if env.everyone.rank in env.grid.sharding_group(0) else OTHER)
    return DMPCollection(module, "cpu", plan, env=env, sharders=[sharder(optimizer)], **options)


def train(env: Any, plan: ShardingPlan, optimizer: str, steps: int, **options: Any) -> tuple[Any, Any]:
    model = wrapped(env, plan, optimizer, **options)
    for step in range(steps):
        loss_of(model, step, env.everyone.rank).backward()
    return model.full_state_dict(), model.fused_optimizer.full_state_dict()["state"]


def simulated(work: Callable[[Any], Any], world_size: int = WORLD, local: int = HOST) -> list[Any]:
    return run_simulated(work, world_size, local_world_size=local, sharding_group_size=GROUP)


class Unsharded:
    """Unsharded modules, one for each set of ranks, each trained on the mean of their losses."""

    def __init__(self, groups: Sequence[Sequence[int]], optimizer: str) -> None:
        self.groups = groups
        self.modules = [bags() for _ in groups]
        spec = sharder(optimizer).optimizer
        self.optimizers = [spec_to_torch(spec, list(module.parameters())) for module in self.modules]

    def step(self, number: int) -> None:
        for ranks, module, optimizer in zip(self.groups, self.modules, self.optimizers, strict=True):
            optimizer.zero_grad()
            for rank in ranks:
                (loss_of(module, number, rank) / len(ranks)).backward()
            optimizer.step()

    def average(self) -> None:
        for parameters in zip(*(module.parameters() for module in self.modules), strict=True):
            _give_all_their_mean([parameter.detach() for parameter in parameters])
            states = [
                optimizer.state[parameter]
                for optimizer, parameter in zip(self.optimizers, parameters, strict=True)
            ]
            for name in states[0]:
                if name != "step":
                    _give_all_their_mean([state[name] for state in states])

    def state(self) -> tuple[Mapping[str, torch.Tensor], list[Mapping[str, Any]]]:
        first = self.optimizers[0]
        return self.modules[0].state_dict(), [first.state[p] for p in self.modules[0].parameters()]


def _give_all_their_mean(tensors: Sequence[torch.Tensor]) -> None:
    mean = torch.stack(list(tensors)).mean(0)
    for tensor in tensors:
        tensor.copy_(mean)


def groups_of(world_size: int = WORLD) -> list[range]:
    """The sharding groups: ranks as far apart as there are groups."""
    return [range(first, world_size, world_size // GROUP) for first in range(world_size // GROUP)]


def assert_equal_to(unsharded: Unsharded, of_ranks: list[tuple[Any, Any]]) -> None:
    expected, states = unsharded.state()
    for weights, optimizer in of_ranks:
        assert list(weights) == list(expected)
        for (name, value), state in zip(expected.items(), states, strict=True):
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6)
            for entry, kept in state.items():
                if entry != "step":
                    own = optimizer[name][entry]
                    torch.testing.assert_close(own, kept.reshape(own.shape), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("sharding_type", "optimizer"), each_once(TYPES, OPTIMIZERS))
def test_averaged_each_step_is_the_mean_of_unsharded_modules_of_each_group(
    sharding_type: str, optimizer: str
) -> None:
    plan = planned([sharding_type], optimizer).made
    results = simulated(lambda env: train(env, plan, optimizer, 4, sync_every=1))
    expected = Unsharded(groups_of(), optimizer)
    for step in range(4):
        expected.step(step)
        expected.average()
    assert_equal_to(expected, results)


@pytest.mark.parametrize(
    "bucket_bytes", [averaging.BUCKET_BYTES, 100], ids=["at once", "three rows at a time"]
)
def test_groups_go_their_own_ways_between_averagings(
    monkeypatch: pytest.MonkeyPatch, bucket_bytes: int
) -> None:
    monkeypatch.setattr(averaging, "BUCKET_BYTES", bucket_bytes)
    plan = planned(["row_wise", "table_wise"], "adagrad", sync_every=3).made
    results = simulated(lambda env: train(env, plan, "adagrad", 5, sync_every=3))
    expected = Unsharded(groups_of(), "adagrad")
    for step in range(5):
        expected.step(step)
        if step in (2, 4):  # the last one by the state dict
            expected.average()
    assert_equal_to(expected, results)


def test_sync_of_weights_alone_leaves_optimizer_state_to_each_group() -> None:
    plan = planned(["row_wise"], "adagrad").made

    def work(env: Any) -> tuple[Any, Any]:
        model = wrapped(env, plan, "adagrad")
        loss_of(model, 0, env.everyone.rank).backward()
        model.sync(include_optimizer_state=False)
        return model.full_state_dict(), model.fused_optimizer.full_state_dict()["state"]

    (first, state), (second, other), *_ = simulated(work)
    name = "embedding_bags.user.weight"
    assert torch.equal(first[name], second[name])
    assert not torch.equal(state[name]["sum"], other[name]["sum"])


def test_copies_on_several_ranks_of_a_group_stay_equal_bit_for_bit_with_three_replicas() -> None:
    plan = planned(["data_parallel"], "adam", world_size=6, local=6).made

    def work(env: Any) -> list[torch.Tensor]:
        model = wrapped(env, plan, "adam", sync_every=1)
        for step in range(3):
            loss_of(model, step, env.everyone.rank).backward()
        model.sync()
        return [parameter.detach().clone() for parameter in model.parameters()]

    first, *others = simulated(work, 6, 6)
    for other in others:
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(first, other, strict=True))


def test_half_precision_is_averaged_in_float32() -> None:
    values = torch.tensor([[1.0, 2048.0], [0.0, 1.0], [0.0, 1.0], [0.0, 2.0]], dtype=torch.float16)

    def work(env: Any) -> list[float]:
        mine = values[env.rank].clone()
        env.communicator.all_reduce(mine, mean=True).wait()
        return list(mine.tolist())

    assert run_simulated(work, 4) == [[0.25, 513.0]] * 4  # in float16 2048 + 1 is 2048


def test_checkpoint_of_groups_is_one_model_for_any_number_of_ranks(tmp_path: Path) -> None:
    plan = planned(["row_wise", "table_wise", "data_parallel"], "adagrad").made

    def save(env: Any) -> Any:
        model = wrapped(env, plan, "adagrad")
        loss_of(model, 0, env.everyone.rank).backward()
        save_checkpoint(tmp_path, model, step=1)
        return model.full_state_dict()

    def load(env: Any) -> Any:
        model = wrapped(env, plan, "adagrad")
        load_checkpoint(tmp_path, model)
        return model.full_state_dict()

    saved, *_ = simulated(save)
    alone = DistributedModelParallel(
        copy.deepcopy(OTHER), env=ShardingEnv.local(device_type="cpu"), sharders=[sharder("adagrad")]
    )
    load_checkpoint(tmp_path, alone)
    for state in (*simulated(load), alone.full_state_dict()):
        torch.testing.assert_close(state, saved, rtol=0, atol=0)


@pytest.mark.parametrize("limit", [None, 1 << 16])
def test_reshard_keeps_every_bit_of_each_replica_and_averagings_go_on(limit: int | None) -> None:
    # Whole rows on one rank, whichever, so that no sum changes its order; groups differ when they are resharded.
    first, second = (planned([kind], "adagrad").made for kind in ("table_wise", "column_wise"))

    def work(env: Any) -> tuple[Any, Any]:
        model = wrapped(env, first, "adagrad", sync_every=3)
        for step in range(6):
            loss_of(model, step, env.everyone.rank).backward()
            model.reshard((second, first)[step % 2], max_extra_bytes=limit)
        return model.full_state_dict(), model.fused_optimizer.full_state_dict()["state"]

    moved, stayed = simulated(work), simulated(lambda env: train(env, first, "adagrad", 6, sync_every=3))
    for (weights, states), (expected, expected_states) in zip(moved, stayed, strict=True):
        assert all(torch.equal(weights[name], value) for name, value in expected.items())
        for name, entries in expected_states.items():
            assert torch.equal(states[name]["sum"], entries["sum"])


# Misuse


def test_groups_that_reshard_to_different_plans_are_one_error_and_stay_as_they_were() -> None:
    first, second = (planned([kind]).made for kind in ("table_wise", "column_wise"))

    def work(env: Any) -> str:
        model = wrapped(env, first)
        before = [parameter.data_ptr() for parameter in model.parameters()]
        with pytest.raises(DistributedError) as raised:
            model.reshard((first, second)[env.grid.sharding_group(env.everyone.rank).start])
        assert [parameter.data_ptr() for parameter in model.parameters()] == before
        return str(raised.value)

    (text,) = set(simulated(work))
    assert "the plan of table 'user' is ranks 0, 2: table_wise" in text


@pytest.mark.parametrize(("planned_for", "told"), [(1, "1 rank"), (WORLD, f"{WORLD} ranks")])
def test_reshard_to_a_plan_for_more_or_fewer_ranks_than_a_group_has_is_refused(
    planned_for: int, told: str
) -> None:
    plan = planned(["table_wise"]).made
    other = EmbeddingShardingPlanner(Topology(planned_for, "cpu"), BATCH).plan_tables(
        sharder("sgd").tables(bags(), "")
    )

    def work(env: Any) -> None:
        with pytest.raises(
            PlanError,
            match=f"the plan is for {told}, the model for 2 sharding groups of 2 ranks",
        ):
            wrapped(env, plan).reshard(other)

    simulated(work)


def test_ranks_that_average_something_else_are_one_error() -> None:
    plan = planned(["row_wise"], "adagrad").made

    def work(env: Any) -> str:
        model = wrapped(env, plan, "adagrad")
        return error_of(lambda: model.sync(include_optimizer_state=env.everyone.rank % 2 == 0))

    for text in simulated(work):
        assert text.startswith("DistributedError: ")
        assert "optimizer_state is rank 0: True; " in text


def test_group_that_left_a_batch_out_is_found_in_the_averaging() -> None:
    plan = planned(["row_wise"]).made

    def work(env: Any) -> str:
        model = wrapped(env, plan)
        if env.everyone.rank % 2:  # one of the two groups
            loss_of(model, 0, env.everyone.rank).backward()
        return error_of(model.sync)

    for text in simulated(work):
        assert text.startswith("DistributedError: ")
        assert "calls_before is rank" in text


def test_wrong_group_sizes_and_steps_are_refused() -> None:
    plan = planned(["row_wise"]).made
    with pytest.raises(
        InvalidInputError, match=r"64 ranks do not divide into sharding groups of 24 .*16, 32, 64"
    ):
        Topology(64, "cpu").sharding_group(24)
    with pytest.raises(InvalidInputError, match=r"sync_every .*got 0"):
        Topology(64, "cpu").sharding_group(16, sync_every=0)
    with pytest.raises(InvalidInputError, match="sharding_group_size is needed"):
        DMPCollection(bags(), "cpu", plan)

    def work(env: ShardingEnv2D) -> None:
        for options, text in (
            ({"world_size": 8}, "world_size is 8; the process group has 4 ranks"),
            ({"sync_every": 0}, r"sync_every .*got 0"),
            ({"sharding_group_size": 2}, "env has its groups already"),
        ):
            with pytest.raises(InvalidInputError, match=text):
                wrapped(env, plan, **options)
        other = planned(["row_wise"], world_size=6, local=6).made
        with pytest.raises(
            PlanError, match=r"for 2 ranks in each of 3 sharding groups, the model for 2 shard"
        ):
            wrapped(env, other)
        with pytest.raises(PlanError, match=r"would be on 2 of these 4 ranks"):
            DistributedModelParallel(bags(), env.everyone, "cpu", plan, [sharder("sgd")])

    simulated(work)


# Plans


def test_plan_counts_the_averaging_and_says_so() -> None:
    every, seldom = (planned(["row_wise"], "adagrad", sync_every=steps) for steps in (1, 10))
    often, rare = (planner.report.plan.phases_ms["averaging"].max() for planner in (every, seldom))
    assert rare > 0
    assert often == pytest.approx(10 * rare)
    assert every.report.plan.value_ms > seldom.report.plan.value_ms
    text = str(seldom.report)
    assert "2 sharding groups of 2 ranks with such a plan, averaged every 10 steps" in text
    document = seldom.made.to_json()
    assert json.loads(document)["topology"]["replicas"] == {
        "num_groups": 2,
        "sync_every": 10,
        "local_replicas": 2,
    }
    again = ShardingPlan.from_json(document)
    assert again.to_json() == document
    assert check_plan(again).problems == check_plan(again).misstatements == []
    edited = copy.deepcopy(json.loads(document))
    edited["topology"]["replicas"]["sync_every"] = 1
    assert check_plan(ShardingPlan.from_json(json.dumps(edited))).misstatements


def test_plan_is_made_for_a_group_where_none_is_given() -> None:
    module = bags()

    def work(env: Any) -> int:
        model = DMPCollection(copy.deepcopy(module), "cpu", env=env, sharders=[sharder("sgd")])
        loss_of(model, 0, env.everyone.rank).backward()
        model.sync()
        return model.plan.document["topology"]["world_size"]

    assert simulated(work) == [GROUP] * WORLD
