"""Steps that are not forward, backward, forward, backward, or change the learning rate meanwhile: with every kernel."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import torch
from tests.equality import Case, Table, shard_case
from tests.errors import raises
from tests.pairs import each_once
from tests.plugins.training.test_equality import kernels, sharding_types, supports

import shardwright as sw
from shardwright.host import host
from shardwright_testing.simulated import run_simulated

FUSING = [name for name in kernels() if host().compute_kernels.create(name).fuses_optimizer]


def case_of(kernel: str, pooling: str = "SUM") -> Case:
    """One table, so that rank 1 has no block."""
    return Case([Table(9, 8, ("a",), pooling, "table_wise", kernel)], (3, 2))


@pytest.mark.parametrize("kernel", FUSING)
def test_retained_graph_is_gone_through_twice_on_all_ranks_and_updates_twice(kernel: str) -> None:
    case = case_of(kernel)

    def work(env: sw.ShardingEnv) -> torch.Tensor:
        module = shard_case(case, env, case.module())
        output = module(case.batch(0, env.rank)).values()
        gradient = torch.ones_like(output)
        before = module.full_state_dict()["embedding_bags.t0.weight"].clone()
        output.backward(gradient, retain_graph=True)
        once = module.full_state_dict()["embedding_bags.t0.weight"].clone()
        output.backward(gradient)
        twice = module.full_state_dict()["embedding_bags.t0.weight"].clone()
        assert not torch.equal(once, before)
        torch.testing.assert_close(twice - once, once - before)  # plain SGD: the same step again
        with pytest.raises(RuntimeError, match="second time"):
            output.backward(gradient)
        return twice

    first, second = run_simulated(work, 2)
    assert torch.equal(first, second)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("kernel", ["fused_torch", "dense"])
def test_second_derivative_of_a_lookup_is_refused_on_all_ranks_and_the_first_is_right(kernel: str) -> None:
    case = attrs.evolve(case_of(kernel), is_weighted=True)

    def weights_and_loss(module: Any, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        batch = case.batch(0, rank)
        weights = batch.weights().clone().requires_grad_()
        features = sw.KeyedJaggedTensor(batch.keys(), batch.values(), weights, lengths=batch.lengths())
        return weights, module(features).values().pow(2).sum()

    def work(env: sw.ShardingEnv) -> None:
        module = shard_case(case, env, case.module())
        weights, loss = weights_and_loss(module, env.rank)
        own, unsharded = weights_and_loss(case.module(), env.rank)
        unsharded.backward()
        loss.backward(create_graph=True)
        torch.testing.assert_close(weights.grad, own.grad)
        with raises(sw.UnsupportedError, asked="create_graph"):
            weights.grad.pow(2).sum().backward()
        weights_and_loss(module, env.rank)[1].backward()  # the next one trains

    run_simulated(work, 2)


def tables_of(kernel: str, pooling: str) -> list[Table]:
    """A table of each sharding type: few rows, so that copies are synchronised by rows and by dense gradients, too."""
    return [
        Table(rows, 8, (f"f{index}_{rows}",), pooling, sharding_type, kernel, offset=index)
        for index, sharding_type in enumerate(sharding_types())
        for rows in (3, 500)
    ]


@pytest.mark.parametrize(
    ("kernel", "pooling", "between"),
    each_once(FUSING, ["SUM", "NONE"], ["param_groups", "zero_grad", "step", "another forward pass"]),
)
def test_step_keeps_the_learning_rate_of_its_forward_pass(kernel: str, pooling: str, between: str) -> None:
    tables = tables_of(kernel, pooling)
    assert all(supports(kernel, table, "sgd", world_size=2) for table in tables)
    case = Case(tables, (3, 2), "sgd")
    module = case.module()

    def train(env):
        sharded = shard_case(case, env, module)
        optimizer = sharded.fused_optimizer
        values = case.output(sharded(case.batch(0, env.rank)))
        for group in optimizer.param_groups:
            group["lr"] = 0.7
        if between == "another forward pass":
            sharded(case.batch(1, env.rank))
        elif between != "param_groups":
            getattr(optimizer, between)()
        values.backward(case.gradient(0, env.rank, values))
        first = sharded.full_state_dict()
        values = case.output(sharded(case.batch(1, env.rank)))
        values.backward(case.gradient(1, env.rank, values))
        return first, sharded.full_state_dict()

    for sharded in run_simulated(train, case.world_size):
        module = case.module()
        for step, (rate, weights) in enumerate(zip((0.1, 0.7), sharded, strict=True)):
            optimizer = torch.optim.SGD(module.parameters(), lr=rate)
            optimizer.zero_grad()
            for rank in range(case.world_size):
                values = case.output(module(case.batch(step, rank)))
                values.backward(case.gradient(step, rank, values) / case.world_size)
            optimizer.step()
            for name, weight in module.named_parameters():
                torch.testing.assert_close(
                    weights[name], weight.detach(), msg=lambda text, name=name: f"{name}: {text}"
                )


@pytest.mark.parametrize("kind", sharding_types())
def test_batch_of_one_id_that_is_an_element_of_a_column_is_looked_up(kind: str) -> None:
    case = Case([Table(9, 8, ("a",), "SUM", kind, "fused_torch")], (1, 1), is_weighted=True)
    ids, weights, lengths = (
        torch.ones(3, 3, dtype=own)[:1, 1] for own in (torch.int64, torch.float32, torch.int32)
    )
    features = sw.KeyedJaggedTensor(["a"], ids, weights, lengths=lengths)

    def look_up(env: sw.ShardingEnv) -> torch.Tensor:
        found: torch.Tensor = shard_case(case, env, case.module())(features).values()
        return found.detach()

    for found in run_simulated(look_up, 2):
        torch.testing.assert_close(found, case.module()(features).values().detach())


@pytest.mark.parametrize("given", ["lengths", "offsets"])
@pytest.mark.parametrize("kind", ["table_wise", "data_parallel", "unsharded"])
def test_batch_that_is_filled_again_is_looked_up_as_it_is_now_or_refused(kind: str, given: str) -> None:
    case = Case([Table(9, 8, ("a", "b"), "MEAN", kind, "fused_torch")], (2, 2))

    def filled(*lengths: int) -> torch.Tensor:
        made = torch.tensor(lengths)
        return made if given == "lengths" else torch.cat([made[:0].new_zeros(1), made.cumsum(0)])

    def batch_of(sizes: torch.Tensor) -> sw.KeyedJaggedTensor:
        return sw.KeyedJaggedTensor(["a", "b"], torch.tensor([0, 8, 3, 1, 2]), **{given: sizes})

    def look_up_again(module: Any) -> torch.Tensor:
        features = batch_of(sizes := filled(1, 0, 3, 1))
        first: torch.Tensor = module(features).values().detach()
        sizes.copy_(filled(2, 2, 0, 1))
        found = torch.stack([first, module(features).values().detach()])
        assert (features.length_per_key(), features.lengths().tolist()) == ([4, 1], [2, 2, 0, 1])
        sizes.copy_(filled(2, 2, 0, 500))
        with raises(sw.InvalidInputError):
            module(features)
        return found

    wanted = [case.module()(batch_of(filled(*own))).values() for own in ((1, 0, 3, 1), (2, 2, 0, 1))]
    sharded = [look_up_again(case.module())]
    if kind != "unsharded":
        sharded = run_simulated(lambda env: look_up_again(shard_case(case, env, case.module())), 2)
    for found in sharded:
        torch.testing.assert_close(found, torch.stack(wanted).detach())
