"""Trained weights of ids: their gradients come back through every sharding type and kernel, as unsharded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from tests.drawn import drawn
from tests.plugins.built_in import built_in
from tests.plugins.compute_kernels.loops import skip_unless_here
from torch import Tensor

import shardwright as sw
from shardwright.runtime.step.backward import weight_gradients as backward
from shardwright_testing.equality.cases import BATCHES, VARIABLE, Case, Table, shard_case, shardings_of
from shardwright_testing.simulated import run_simulated

STEPS, RATE, LONGEST = 3, 0.1, 4
KERNELS = ["dense", "fused", "fused_numba", "fused_torch", "mapped_caching"]


def case(kind: str, kernel: str, sizes: tuple[int, ...], **changes: Any) -> Case:
    tables = (
        Table(20, 8, ("a", "b"), "SUM", kind, kernel),
        Table(9, 4, ("b",), "MEAN", kind, kernel, offset=1),
        Table(12, 8, ("c",), "SUM", "table_wise", kernel),
    )
    kinds = ("uneven", "empty bags", VARIABLE)
    hosts = 2 if len(sizes) > 2 else None
    return Case(tables, sizes, is_weighted=True, batches=kinds, local_world_size=hosts, **changes)


def start(own: Case) -> dict[str, Tensor]:
    """Position weights of each feature."""
    return {
        name: torch.linspace(0.5, 1.5, LONGEST + 1).add_(index).requires_grad_()
        for index, name in enumerate(own.features)
    }


def processed(features: sw.KeyedJaggedTensor, positions: dict[str, Tensor]) -> sw.KeyedJaggedTensor:
    """The batch, whose ids have the weights of their positions."""
    weights = []
    for name, feature in features.to_dict().items():
        lengths = feature.lengths().tolist()
        places = torch.cat([torch.arange(0), *(torch.arange(length) for length in lengths)])
        weights.append(positions[name][places])
    return sw.KeyedJaggedTensor(
        keys=features.keys(),
        values=features.values(),
        weights=torch.cat(weights),
        lengths=features.lengths(),
        stride_per_key_per_rank=features.stride_per_key_per_rank() or None,
        inverse_indices=features.inverse_indices_or_none(),
    )


def frozen(module: Any, tables: tuple[str, ...]) -> Any:
    """The module, some of whose tables are only looked up."""
    for name in tables:
        module.table_weight(name).requires_grad_(False)
    return module


def train_unsharded(
    own: Case, still: tuple[str, ...]
) -> tuple[list[list[Tensor]], dict[str, Tensor], dict[str, Tensor]]:
    """Outputs of each step and rank, position weights, and weights of tables."""
    module, positions, outputs = frozen(own.module(), still), start(own), []
    optimizer = torch.optim.SGD([*module.parameters(), *positions.values()], lr=RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        outputs.append([])
        for rank in range(own.world_size):
            values = module(processed(own.batch(step, rank), positions)).values()
            outputs[-1].append(values.detach())
            values.backward(own.gradient(step, rank, values) / own.world_size)
        optimizer.step()
    return outputs, positions, module.state_dict()


def train_rank(
    own: Case, env: Any, module: Any, update: str
) -> tuple[list[Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """The same of one rank, whose gradients of position weights are averaged as those of dense parameters."""
    sharder = own.sharder().updating(update)
    sharded = sharder.shard(module, shardings_of(own, sharder.tables(module)), env, "cpu")
    positions, outputs = start(own), []
    dense = [p for p in sharded.parameters() if not hasattr(p, "_in_backward_optimizers")]
    optimizer = torch.optim.SGD([*dense, *positions.values()], lr=RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        values = sharded(processed(own.batch(step, env.rank), positions)).values()
        outputs.append(values.detach().clone())
        values.backward(own.gradient(step, env.rank, values))
        for weights in positions.values():
            every = env.communicator.all_gather_objects(weights.grad)
            found = [gradient for gradient in every if gradient is not None]
            weights.grad = sum(found) / env.world_size if found else None
        optimizer.step()
        sharded.fused_optimizer.step()
        sharded.fused_optimizer.zero_grad()
    return outputs, positions, sharded.full_state_dict()


def check(
    own: Case, still: tuple[str, ...] = (), update: str = "in_backward", *, has_moved: bool = True
) -> None:
    outputs, positions, weights = train_unsharded(own, still)
    module = frozen(own.module_to_shard(), still)
    ranks = run_simulated(
        lambda env: train_rank(own, env, module, update),
        own.world_size,
        local_world_size=own.local_world_size,
    )
    for rank, (found, found_positions, found_weights) in enumerate(ranks):
        torch.testing.assert_close(found, [step[rank] for step in outputs], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found_positions, positions, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found_weights, weights, rtol=1e-4, atol=1e-4)
    first = start(own)
    assert not has_moved or all(
        not torch.equal(positions[name], first[name]) for name in ("a", "b", "c")
    )  # it trained at all


TYPES = built_in("sharding_types")


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_gives_gradients_of_weights(kernel: str) -> None:
    skip_unless_here(kernel)
    for kind in ("column_wise", "row_wise"):
        check(case(kind, kernel, (3, 2)))


@pytest.mark.parametrize("kind", ["row_wise", "data_parallel"])
def test_weights_of_a_batch_of_no_examples_get_a_gradient(kind: str) -> None:
    own = Case((Table(20, 8, ("a",), "SUM", kind, "fused_torch"),), (0,), is_weighted=True)
    weights = torch.ones(1, requires_grad=True)  # of a feature that no table asks for
    batch = sw.KeyedJaggedTensor(
        keys=["a", "unused"],
        values=torch.tensor([3]),
        lengths=torch.tensor([1]),
        weights=weights,
        stride_per_key_per_rank=[[0], [1]],
    )
    run_simulated(lambda env: shard_case(own, env, own.module())(batch).values().sum().backward(), 1)
    assert torch.equal(weights.grad, torch.zeros(1))


def test_rows_are_read_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backward, "_ON_HOST", 20)  # two rows of 8 columns at once, five of 4
    check(case("row_wise", "fused_torch", (3, 2)))


@st.composite
def drawn_cases(draw: st.DrawFn) -> tuple[Case, tuple[str, ...], str]:
    """Tables on some of the ranks of one host or several, some of them frozen, and when they are updated."""
    hosts, local = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (2, 2), (3, 1)]))
    table = st.builds(
        Table,
        rows=st.integers(1, 9),
        dim=st.sampled_from([1, 4, 6]),
        features=st.lists(st.sampled_from("abc"), min_size=1, max_size=2, unique=True).map(tuple),
        pooling=st.sampled_from(["SUM", "MEAN"]),
        sharding_type=st.sampled_from(TYPES),
        kernel=st.sampled_from(["fused_torch", "fused_numba", "dense"]),
        variant=st.integers(0, 3),
        offset=st.integers(0, 3),
    )
    tables = draw(st.lists(table, min_size=1, max_size=3))
    sizes = draw(st.lists(st.integers(0, 3), min_size=hosts * local, max_size=hosts * local))
    kinds = draw(st.permutations([*BATCHES, VARIABLE]))
    case = Case(tables, sizes, is_weighted=True, batches=kinds, local_world_size=local)
    still = tuple(f"t{index}" for index in range(len(tables)) if draw(st.integers(0, 3)) == 0)
    return case, still, draw(st.sampled_from(["in_backward", "in_step"]))


@drawn(drawn_cases(), quick=24, thorough=400)
def test_weights_of_ids_train_as_unsharded_wherever_blocks_are(drawn_case: Any) -> None:
    case, still, update = drawn_case
    check(case, still, update, has_moved=False)
