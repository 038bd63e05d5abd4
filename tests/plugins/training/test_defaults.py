"""Torch's defaults are the user's: sharded modules compute alike under any default dtype and device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tests.equality import Case, RankResult, train_simulated
from tests.pairs import each_once
from tests.plugins.training.test_equality import kernels, sharding_types, tables_of

from shardwright.host import host


@pytest.fixture
def default_dtype() -> Iterator[None]:
    yield
    torch.set_default_dtype(torch.float32)


def case_of(sharding_type: str, kernel: str) -> Case:
    optimizer = "row_wise_adagrad" if host().compute_kernels.create(kernel).fuses_optimizer else "sgd"
    cuts = sharding_type in ("column_wise", "table_column_wise", "grid_shard")
    return Case(
        tables_of(sharding_type, kernel),
        (3, 2, 0, 4),
        "sgd" if kernel == "fused" and cuts else optimizer,
        is_weighted=True,
        local_world_size=2,
    )


def assert_same(results: list[RankResult], expected: list[RankResult]) -> None:
    for one, other in zip(results, expected, strict=True):
        torch.testing.assert_close(one.weights, other.weights, rtol=0, atol=0)
        for output, wanted in zip(one.outputs, other.outputs, strict=True):
            assert output.dtype is torch.float32
            assert torch.equal(output, wanted)


@pytest.mark.parametrize(
    ("sharding_type", "kernel", "dtype"),
    each_once(sharding_types(), kernels(), [torch.bfloat16, torch.float64]),
)
def test_training_under_another_default_dtype_gives_the_same_bits(
    default_dtype: None, sharding_type: str, kernel: str, dtype: torch.dtype
) -> None:
    case = case_of(sharding_type, kernel)
    expected = train_simulated(case)
    torch.set_default_dtype(dtype)
    assert_same(train_simulated(case), expected)
