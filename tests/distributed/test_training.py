"""Real processes over gloo: sharded equals unsharded, state goes in and out, nobody hangs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed import workers
from tests.equality import Case, assert_equals_unsharded, train_simulated
from tests.plugins.built_in import built_in
from tests.plugins.training.test_equality import (
    Table,
    kernels,
    tables_of,
)

from shardwright import KeyedJaggedTensor, KeyedOptimizerWrapper, RowWiseAdagrad
from shardwright.host import host
from shardwright_testing.ranks import RankError, RankPool

pytestmark = pytest.mark.distributed

TYPES = built_in("sharding_types")


def unsharded_after(steps: range, world_size: int) -> Any:
    """One process on the batches of all ranks, with the mean of their losses."""
    model = workers.clicks()
    tables = {name: p for name, p in model.named_parameters() if name.startswith("sparse.")}
    sparse = KeyedOptimizerWrapper(
        tables, lambda params: RowWiseAdagrad(params, lr=workers.LEARNING_RATE, eps=1e-8)
    )
    dense = torch.optim.SGD(model.over.parameters(), lr=workers.LEARNING_RATE)
    for step in steps:
        model.zero_grad()
        for rank in range(world_size):
            (model(workers.batch(step, rank)).square().mean() / world_size).backward()
        sparse.step()
        dense.step()
    return model, sparse


def trained_by_sgd(
    model: torch.nn.Module, steps: Iterable[Sequence[KeyedJaggedTensor]], world_size: int
) -> dict[str, torch.Tensor]:
    """The state of one process after steps of SGD on several batches each, with the mean of the ranks' losses."""
    optimizer = torch.optim.SGD(model.parameters(), lr=workers.LEARNING_RATE)
    for batches in steps:
        optimizer.zero_grad()
        for batch in batches:
            (model(batch).square().mean() / world_size).backward()
        optimizer.step()
    return model.state_dict()


def of_ranks(step: int, world_size: int) -> list[KeyedJaggedTensor]:
    """The batches of all ranks."""
    return [workers.batch(step, rank) for rank in range(world_size)]


def assert_same_state(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(actual) == list(expected)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


DEFAULT = max(kernels(), key=lambda name: host().compute_kernels.create(name).preference)


@pytest.mark.parametrize("backend", built_in("comm_backends"))
def test_each_backend_trains_all_types_as_unsharded(pool: RankPool, backend: str) -> None:
    if "cpu" not in (devices := host().comm_backends.create(backend).devices):
        pytest.skip(f"{backend!r} serves {', '.join(devices)}, not the CPU: see the tests marked gpu")
    tables = [tables_of(sharding_type, DEFAULT)[index % 4] for index, sharding_type in enumerate(TYPES)]
    case = Case(tables, (3, 0, 4), "row_wise_adagrad")
    train_simulated(case)  # what is compiled on first use is, before ranks wait for each other
    assert_equals_unsharded(case, pool.run(workers.train_case_over, 3, backend, case))


@pytest.mark.parametrize(
    "sharding_type",
    [
        "table_row_wise",
        pytest.param("grid_shard", marks=pytest.mark.slow),
        pytest.param("table_column_wise", marks=pytest.mark.slow),
    ],
)
def test_types_of_hosts_equal_unsharded_on_two_hosts_of_two_ranks(pool: RankPool, sharding_type: str) -> None:
    tables = [*tables_of(sharding_type, "fused_torch"), *tables_of("row_wise", "fused")[:2]]
    case = Case(tables, (3, 0, 2, 4), "row_wise_adagrad", is_weighted=True, local_world_size=2)
    assert_equals_unsharded(case, pool.run(workers.train_case_on_hosts, 4, case))


@pytest.mark.parametrize(
    ("sharding_type", "sizes", "shared_memory"),
    [
        ("table_wise", (3,), "off"),
        ("table_wise", (3, 1), "on"),
        ("table_wise", (3, 1), "off"),
        ("table_row_wise", (3, 0, 2, 4), "on"),
        pytest.param("table_row_wise", (3, 0, 2, 4), "off", marks=pytest.mark.slow),
    ],
)
def test_one_table_trains_by_gradients_of_any_form(
    pool: RankPool, sharding_type: str, sizes: tuple[int, ...], shared_memory: str
) -> None:
    """Gradients of one table are sent as they come, where others are put in order first."""
    tables = [Table(17, 8, ("a",), "SUM", sharding_type, "fused_numba")]
    case = Case(tables, sizes, local_world_size=min(len(sizes), 2))
    assert_equals_unsharded(case, pool.run(workers.train_case_on_hosts, len(sizes), case, shared_memory))


@pytest.mark.parametrize(
    "optimizer",
    [
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("sgd", "adagrad", "adam")),
        "row_wise_adagrad",
    ],
)
def test_without_fbgemm_equals_unsharded(pool_without_fbgemm: RankPool, optimizer: str) -> None:
    tables = [tables_of(name, "fused_torch")[index % 4] for index, name in enumerate(TYPES)]
    case = Case(tables, (3, 5), optimizer, is_weighted=True)
    assert_equals_unsharded(case, pool_without_fbgemm.run(workers.train_case, 2, case))


def test_fused_kernel_without_fbgemm_is_refused_with_the_reason(pool_without_fbgemm: RankPool) -> None:
    case = Case(tables_of("table_wise", "fused"), (3, 5))
    with pytest.raises(
        RankError, match=r"'fused', which cannot serve it on cpu: FBGEMM cannot be used here"
    ) as error:
        pool_without_fbgemm.run(workers.train_case, 2, case)
    assert set(error.value.errors) == {0, 1}


@pytest.mark.parametrize("options", [{}, {"full_state_dict": True}], ids=["plain", "full"])
@pytest.mark.parametrize(
    ("types", "world_size"),
    [(["table_wise", "column_wise", "row_wise"], 2), (["column_wise"], 1)],
    ids=["no block on one rank", "several blocks on one rank"],
)
def test_functions_of_torch_checkpoint_have_the_keys_and_values_of_the_state_dict(
    pool: RankPool, types: list[str], world_size: int, options: dict[str, bool]
) -> None:
    names = list(workers.clicks().state_dict())
    for states in pool.run(workers.states_of_torch_checkpoint, world_size, types, **options):
        for state in states.values():
            assert list(state) == names
            assert all(torch.equal(state[name], states["own"][name]) for name in names)


def test_states_leave_nothing_in_the_store(pool: RankPool) -> None:
    assert pool.run(workers.keys_left_by_states, 2, 3) == [0, 0]


def test_functions_of_torch_checkpoint_name_the_dense_optimizer_state(pool: RankPool) -> None:
    for state, taken_over in pool.run(workers.dense_optimizer_of_torch_checkpoint, 2):
        assert list(state) == list(taken_over) == ["over.weight", "over.bias"]
        for name, entries in state.items():
            assert entries["exp_avg"].abs().max() > 0
            torch.testing.assert_close(taken_over[name], entries, rtol=0, atol=0)


def test_initial_weights_are_the_same_for_any_plan_and_world(pool: RankPool) -> None:
    reference = pool.run(workers.initial_weights, 1, ["table_wise"])[0]
    for world_size, types in ((2, ["row_wise"]), (3, ["column_wise", "row_wise"])):
        for weights in pool.run(workers.initial_weights, world_size, types):
            torch.testing.assert_close(weights, reference, rtol=0, atol=0)
    table = reference["sparse.bags.embedding_bags.user.weight"]
    assert table.abs().max() <= 50**-0.5
    assert table.unique().numel() > 300


def test_weights_shared_on_meta_stay_shared(pool: RankPool) -> None:
    assert pool.run(workers.tied_weights, 1) == [True]


THREE_TYPES = ["row_wise", "table_wise", "column_wise"]


@pytest.mark.skipif(
    torch.__version__ < "2.13", reason="torch takes no class of DTensors but its own before 2.13"
)
def test_full_state_dict_by_torch_is_rank_0s_and_that_of_the_unsharded_module(pool: RankPool) -> None:
    (first, whole), (second, other) = pool.run(workers.whole_by_torch, 2, THREE_TYPES)
    assert second == {}
    expected = unsharded_after(range(1), 2)[0].state_dict()
    for state in (first, whole, other):
        assert_same_state(state, expected)


def test_what_dcp_saves_of_two_ranks_it_loads_into_three(pool: RankPool, tmp_path: Path) -> None:
    weights, states = pool.run(workers.saved_by_torch, 2, THREE_TYPES, str(tmp_path))[0]
    for loaded, loaded_states in pool.run(workers.loaded_by_torch, 3, THREE_TYPES[::-1], str(tmp_path)):
        torch.testing.assert_close(loaded, weights, rtol=0, atol=0)
        torch.testing.assert_close(loaded_states, states, rtol=0, atol=0)
