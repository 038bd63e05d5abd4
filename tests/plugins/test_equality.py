"""Every registered sharding type with every registered kernel, on simulated ranks, against the unsharded module.

What the registries hold is what is tested: a type or kernel that is added later is in these tests by itself.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.equality import Case, Table, assert_equals_unsharded, layouts_of, train_simulated

from shardwright.contracts.compute_kernel import KernelRequest
from shardwright.planning.optimizers import OptimizerSpec
from shardwright.planning.tables import DataType, TableSpec
from shardwright.plugins import host

OPTIMIZERS = ["sgd", "adagrad", "row_wise_adagrad", "adam"]
BATCH_SIZES = {1: (4,), 2: (5, 2), 3: (3, 0, 4)}


def sharding_types() -> list[str]:
    return sorted(host().sharding_types)


def kernels() -> list[str]:
    return sorted(host().compute_kernels)


def supports(
    kernel: str, table: Table, optimizer: str, *, world_size: int, is_weighted: bool = False
) -> bool:
    """Whether ``kernel`` takes every block of the table's layout.

    A row-wise optimizer outside the kernel sees the columns of its block only: that is no kernel's to mend.
    """
    spec = TableSpec("t", table.rows, table.dim, table.features, table.data_type, is_weighted=is_weighted)
    layouts = layouts_of(table.sharding_type, spec, world_size)
    kernel_object = host().compute_kernels.create(kernel)
    blocks = layouts[table.variant % len(layouts)].blocks
    cuts_columns = any(block.num_columns < table.dim for block in blocks)
    if optimizer == "row_wise_adagrad" and cuts_columns and not kernel_object.fuses_optimizer:
        return False
    return all(
        kernel_object.supports(
            KernelRequest(
                device="cpu",
                data_type=DataType(table.data_type),
                embedding_dim=table.dim,
                num_columns=block.num_columns,
                is_weighted=is_weighted,
                optimizer=OptimizerSpec(optimizer),
                here=True,
            )
        )
        is True
        for block in blocks
    )


def tables_of(sharding_type: str, kernel: str, *, dim: int = 8, data_type: str = "FP32") -> list[Table]:
    """Several features, a feature in several tables, rows that do not divide, fewer rows than ranks."""
    rows_features_pooling = [
        (17, ("a",), "SUM"),
        (2, ("b", "c"), "MEAN"),
        (40, ("c", "a"), "MEAN"),
        (1, ("d",), "SUM"),
    ]
    return [
        Table(
            rows,
            dim,
            features,
            pooling,
            sharding_type,
            kernel,
            variant=index,
            offset=index,
            data_type=data_type,
        )
        for index, (rows, features, pooling) in enumerate(rows_features_pooling)
    ]


def check(case: Case) -> None:
    assert_equals_unsharded(case, train_simulated(case))


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("sharding_type", sharding_types())
def test_type_and_kernel_equal_unsharded(
    sharding_type: str, kernel: str, optimizer: str, world_size: int
) -> None:
    tables = tables_of(sharding_type, kernel)
    if not all(supports(kernel, table, optimizer, world_size=world_size) for table in tables):
        pytest.skip(f"{kernel} says it does not support this")
    for is_weighted in (False, True):
        check(Case(tables, BATCH_SIZES[world_size], optimizer, is_weighted))


def sequences_of(sharding_type: str, kernel: str) -> list[Table]:
    """The same tables without pooling, of different dims."""
    return [
        evolve(table, pooling="NONE", dim=(8, 12, 16, 8)[index])
        for index, table in enumerate(tables_of(sharding_type, kernel))
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("sharding_type", sharding_types())
def test_sequences_of_type_and_kernel_equal_unsharded(
    sharding_type: str, kernel: str, optimizer: str, world_size: int
) -> None:
    tables = sequences_of(sharding_type, kernel)
    if not all(supports(kernel, table, optimizer, world_size=world_size) for table in tables):
        pytest.skip(f"{kernel} says it does not support this")
    check(Case(tables, BATCH_SIZES[world_size], optimizer))


@pytest.mark.parametrize("data_type", ["FP16", "BF16"])
@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("sharding_type", sharding_types())
def test_half_tables_equal_unsharded_within_their_precision(
    sharding_type: str, kernel: str, data_type: str
) -> None:
    tables = tables_of(sharding_type, kernel, data_type=data_type)
    if not all(supports(kernel, table, "row_wise_adagrad", world_size=2) for table in tables):
        pytest.skip(f"{kernel} says it does not support this")
    check(Case(tables, BATCH_SIZES[2], "row_wise_adagrad", is_weighted=True))


@pytest.mark.parametrize("kernel", kernels())
@pytest.mark.parametrize("sharding_type", sharding_types())
def test_dims_not_divisible_by_four_equal_unsharded(sharding_type: str, kernel: str) -> None:
    tables = tables_of(sharding_type, kernel, dim=10)
    if not all(supports(kernel, table, "adagrad", world_size=3) for table in tables):
        pytest.skip(f"{kernel} says it does not support this")
    check(Case(tables, BATCH_SIZES[3], "adagrad"))


def test_all_types_and_kernels_mixed_make_four_collectives() -> None:
    pairs = list(itertools.product(sharding_types(), kernels()))
    tables = [
        Table(
            rows=5 + 3 * index,
            dim=8,
            features=(f"f{index % 5}", f"g{index}"),
            pooling="SUM" if index % 2 else "MEAN",
            sharding_type=sharding_type,
            kernel=kernel,
            variant=index,
            offset=index,
        )
        for index, (sharding_type, kernel) in enumerate(pairs)
    ]
    tables = [table for table in tables if supports(table.kernel, table, "row_wise_adagrad", world_size=3)]
    assert len({table.sharding_type for table in tables}) == len(sharding_types())
    check(Case(tables, BATCH_SIZES[3], "row_wise_adagrad", is_weighted=True))


def test_no_ids_anywhere_gives_zeros_and_changes_nothing() -> None:
    check(Case(tables_of("row_wise", "fused_torch"), (3, 2), "adam", max_length=0))


def test_int32_ids_equal_unsharded() -> None:
    check(Case(tables_of("column_wise", "fused_torch"), (3, 2), id_dtype=torch.int32))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Tables, plans and batches of any shape that the kernels take."""
    world_size = draw(st.integers(1, 4))
    optimizer = draw(st.sampled_from(OPTIMIZERS))
    features = [f"f{index}" for index in range(draw(st.integers(1, 4)))]
    tables = []
    for _ in range(draw(st.integers(1, 4))):
        table = Table(
            rows=draw(st.integers(1, 30)),
            dim=draw(st.integers(1, 12)),
            features=tuple(draw(st.lists(st.sampled_from(features), min_size=1, max_size=3, unique=True))),
            pooling=draw(st.sampled_from(["SUM", "MEAN"])),
            sharding_type=draw(st.sampled_from(sharding_types())),
            kernel=draw(st.sampled_from(kernels())),
            variant=draw(st.integers(0, 3)),
            offset=draw(st.integers(0, 3)),
        )
        if not layouts_of(
            table.sharding_type, TableSpec("t", table.rows, table.dim, table.features), world_size
        ) or not supports(table.kernel, table, optimizer, world_size=world_size):
            table = Table(table.rows, table.dim, table.features, table.pooling, "row_wise", "fused_torch")
        tables.append(table)
    return Case(
        tables,
        tuple(draw(st.integers(0, 4)) for _ in range(world_size)),
        optimizer,
        is_weighted=draw(st.booleans()),
        max_length=draw(st.integers(0, 5)),
    )


@pytest.mark.timeout(400)
@settings(max_examples=100, deadline=None)
@given(cases())
def test_random_tables_plans_and_batches_equal_unsharded(case: Case) -> None:
    check(case)
