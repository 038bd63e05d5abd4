"""Registered sharding types and kernels together, on simulated ranks, against the unsharded module.

The matrix has each of them alone. A type or kernel that is added later is in these tests by itself.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import torch
from attrs import evolve
from hypothesis import strategies as st
from tests.drawn import drawn
from tests.equality import BATCHES, Case, Table, assert_equals_unsharded, layouts_of, train_simulated
from tests.plugins.built_in import built_in

from shardwright import DataType, KernelRequest, OptimizerSpec, TableSpec
from shardwright.host import PluginHost, host

OPTIMIZERS = ["sgd", "adagrad", "row_wise_adagrad", "adam"]
BATCH_SIZES = {1: (4,), 2: (5, 2), 3: (3, 0, 4)}


@functools.cache
def sharding_types() -> list[str]:
    return built_in("sharding_types")


@functools.cache
def kernels() -> list[str]:
    """Those that run on this machine's CPU."""
    request = KernelRequest("cpu", DataType.FP32, 8, 8, optimizer=OptimizerSpec("sgd"), on_this_machine=True)
    create = host().compute_kernels.create
    return [name for name in built_in("compute_kernels") if create(name).supports(request) is True]


def supports(
    kernel: str,
    table: Table,
    optimizer: str,
    *,
    world_size: int,
    is_weighted: bool = False,
    local_world_size: int | None = None,
) -> bool:
    """Whether ``kernel`` takes every block of the table's layout.

    A row-wise optimizer outside the kernel sees the columns of its block only, and `torch.optim.Adagrad` divides halves
    by a zero of their own type where its sums are too small: that is no kernel's to mend.
    """
    variants = _columns_of_variants(
        host(),
        table.sharding_type,
        (table.rows, table.dim, table.features, table.data_type),
        world_size,
        local_world_size,
    )
    if not variants:
        return False
    widths = variants[table.variant % len(variants)]
    return _takes_columns(
        host(), kernel, table.dim, table.data_type, widths, optimizer, is_weighted=is_weighted
    )


@functools.cache
def _takes_columns(
    plugins: PluginHost,
    kernel: str,
    dim: int,
    data_type: str,
    widths: frozenset[int],
    optimizer: str,
    *,
    is_weighted: bool,
) -> bool:
    """Whether a kernel takes blocks of so many columns; thousands of tables are asked for."""
    kernel_object = plugins.compute_kernels.create(kernel)
    if optimizer == "row_wise_adagrad" and min(widths) < dim and not kernel_object.fuses_optimizer:
        return False
    if optimizer == "adagrad" and data_type != "FP32" and not kernel_object.fuses_optimizer:
        return False
    return all(
        kernel_object.supports(
            KernelRequest(
                device="cpu",
                data_type=DataType(data_type),
                embedding_dim=dim,
                num_columns=num_columns,
                is_weighted=is_weighted,
                optimizer=OptimizerSpec(optimizer),
                on_this_machine=True,
            )
        )
        is True
        for num_columns in widths
    )


@functools.cache
def _columns_of_variants(
    plugins: PluginHost,
    sharding_type: str,
    shape: tuple[int, int, tuple[str, ...], str],
    world_size: int,
    local_world_size: int | None,
) -> list[frozenset[int]]:
    """Numbers of columns that the blocks of each of a table's layouts have."""
    rows, dim, features, data_type = shape
    spec = TableSpec("t", rows, dim, features, data_type)
    layouts = layouts_of(sharding_type, spec, world_size, local_world_size=local_world_size)
    return [frozenset(block.num_columns for block in layout.blocks) for layout in layouts]


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


def sequences_of(sharding_type: str, kernel: str) -> list[Table]:
    """The same tables without pooling, of different dims."""
    return [
        evolve(table, pooling="NONE", dim=(8, 12, 16, 8)[index])
        for index, table in enumerate(tables_of(sharding_type, kernel))
    ]


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


def test_int32_ids_equal_unsharded() -> None:
    check(Case(tables_of("column_wise", "fused_torch"), (3, 2), id_dtype=torch.int32))


@st.composite
def tables(
    draw: st.DrawFn, features: Sequence[str], pooling: str | None, data_type: str, **plan: Any
) -> Table:
    """A table of any shape, cut in any way that its type offers, in a kernel that takes it."""
    table = Table(
        rows=draw(st.integers(1, 30)),
        dim=draw(st.integers(1, 24)),
        features=tuple(draw(st.lists(st.sampled_from(features), min_size=1, max_size=3, unique=True))),
        pooling=pooling or draw(st.sampled_from(["SUM", "MEAN"])),
        sharding_type=draw(st.sampled_from(sharding_types())),
        kernel=draw(st.sampled_from(kernels())),
        variant=draw(st.integers(0, 3)),
        offset=draw(st.integers(0, 3)),
        data_type=data_type,
    )
    if supports(table.kernel, table, **plan):
        return table
    return evolve(table, sharding_type="row_wise", kernel="fused_torch")


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Tables, plans and batches of any shape that the kernels take, on one host or several."""
    world_size = draw(st.integers(1, 4))
    local_world_size = draw(st.sampled_from([n for n in range(1, world_size + 1) if world_size % n == 0]))
    optimizer = draw(st.sampled_from(OPTIMIZERS))
    is_sequence = draw(st.booleans())
    is_weighted = not is_sequence and draw(st.booleans())
    features = [f"f{index}" for index in range(draw(st.integers(1, 4)))]
    one = tables(
        features,
        "NONE" if is_sequence else None,
        draw(st.sampled_from(["FP32", "FP32", "FP16", "BF16"])),
        optimizer=optimizer,
        world_size=world_size,
        local_world_size=local_world_size,
        is_weighted=is_weighted,
    )
    return Case(
        draw(st.lists(one, min_size=1, max_size=4)),
        tuple(draw(st.integers(0, 4)) for _ in range(world_size)),
        optimizer,
        is_weighted=is_weighted,
        max_length=draw(st.integers(0, 5)),
        local_world_size=local_world_size,
        batches=tuple(draw(st.lists(st.sampled_from(BATCHES), max_size=5))),
    )


@drawn(cases(), quick=10, thorough=300)
def test_random_tables_plans_and_batches_equal_unsharded(case: Case) -> None:
    check(case)
