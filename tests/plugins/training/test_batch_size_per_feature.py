"""A batch size per feature: every sharding type equals the unsharded module, and samples travel once."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import pytest
import torch
from tests.equality import Case, Table, assert_equals_unsharded, train_simulated
from tests.plugins.training.test_equality import kernels, sharding_types
from tests.plugins.training.test_matrix import HOST_SIZES, MODES, UNEVEN, takes

from shardwright import InvalidInputError, KeyedJaggedTensor
from shardwright_testing.equality.cases import VARIABLE, shard_case
from shardwright_testing.simulated import run_simulated


def case_of(sharding_type: str, kernel: str, mode: str, world_size: int, **fields: Any) -> Case | None:
    """A case of tables that a kernel takes, whose batches have a size per feature in every other step."""
    optimizer = "sgd"
    poolings = ["NONE"] if mode == "sequence" else ["SUM", "MEAN"]
    tables = [
        Table(rows, dim, features, pooling, sharding_type, kernel, variant=index, offset=index)
        for index, (pooling, (rows, dim, features)) in enumerate(
            itertools.product(poolings, [(13, 8, ("a", "b")), (9, 4, ("c", "a"))])
        )
    ]
    taken = [table for table in tables if takes(table, optimizer, world_size, mode)]
    if not taken:
        return None
    return Case(
        taken,
        fields.pop("batch_sizes", UNEVEN[:world_size]),
        optimizer,
        MODES[mode],
        local_world_size=HOST_SIZES[world_size],
        batches=(VARIABLE, "uneven"),
        **fields,
    )


AXES = [*itertools.product(sharding_types(), kernels(), MODES, (2, 4))]
PREFERRED = "fused_numba" if "fused_numba" in kernels() else kernels()[0]


def is_quick(sharding_type: str, kernel: str, mode: str, world_size: int) -> bool:
    """Weighted tables: each type on two hosts, and each kernel with one type; and sequences of two types."""
    if mode == "weighted":
        return (world_size, kernel) == (4, PREFERRED) or (world_size == 2 and sharding_type == "table_wise")
    is_sequence = (mode, world_size, kernel) == ("sequence", 4, PREFERRED)
    return is_sequence and sharding_type in ("table_wise", "row_wise")


@pytest.mark.parametrize(
    ("sharding_type", "kernel", "mode", "world_size"),
    [pytest.param(*axes, marks=() if is_quick(*axes) else pytest.mark.slow) for axes in AXES],
)
def test_batch_size_per_feature_equals_unsharded(
    sharding_type: str, kernel: str, mode: str, world_size: int
) -> None:
    case = case_of(sharding_type, kernel, mode, world_size)
    if case is None:
        pytest.skip("the kernel takes none of the tables")
    assert_equals_unsharded(case, train_simulated(case))


REQUEST = 64  # items that one user is asked about
DIM = 16


def batch_of(user: KeyedJaggedTensor, *, once: bool) -> KeyedJaggedTensor:
    """A request: the user's features, once or once for each item, and the items'."""
    ids, lengths = user["user"].values(), user["user"].lengths()
    items = torch.arange(REQUEST)
    repeated = ids if once else ids.repeat(REQUEST)
    sizes: dict[str, Any] = {"stride": REQUEST}
    if once:
        places = torch.stack([torch.zeros(REQUEST, dtype=torch.int64), items])
        sizes = {"stride_per_key_per_rank": [[1], [REQUEST]], "inverse_indices": (["user", "item"], places)}
    return KeyedJaggedTensor(
        keys=["user", "item"],
        values=torch.cat([repeated, items]),
        lengths=torch.cat([lengths if once else lengths.repeat(REQUEST), torch.ones(REQUEST).int()]).int(),
        **sizes,
    )


@pytest.mark.parametrize("sharding_type", ["table_wise", "column_wise", "row_wise"])
def test_user_features_travel_once_per_request(sharding_type: str) -> None:
    user = KeyedJaggedTensor.from_lists({"user": [[3, 80, 1, 90, 12]]})
    tables = [
        Table(100, DIM, (name,), "SUM", sharding_type, PREFERRED, offset=index)
        for index, name in enumerate(("user", "item"))
    ]
    case = Case(tables, (REQUEST, REQUEST))
    module = case.module()

    def sent(env: Any, *, once: bool) -> tuple[Counter[str], torch.Tensor]:
        sharded = shard_case(case, env, module)
        env.communicator.sent_bytes.clear()
        output = sharded(batch_of(user, once=once)).values()
        output.sum().backward()
        found: Counter[str] = Counter()
        for label, sizes in env.communicator.sent_bytes:
            found[label] += sum(sizes)
        return found, output.detach()

    once = run_simulated(lambda env: sent(env, once=True), 2)
    repeated = run_simulated(lambda env: sent(env, once=False), 2)
    for (_, output), (_, expected) in zip(once, repeated, strict=True):
        torch.testing.assert_close(output, expected)
    total, without = (sum((found for found, _ in own), Counter()) for own in (once, repeated))
    # Of the user's bags one travels instead of 64: ids (int64), and per bag and row part a length and a vector.
    ids, num_ids = 8 * 63 * 2, 5
    saved = {label: without[label] - total[label] for label in ("ids", "results", "gradients")}
    num_parts = 2 if sharding_type == "row_wise" else 1
    num_lengths = 63 * 2 * (2 if sharding_type in ("row_wise", "column_wise") else 1)
    assert saved["results"] == saved["gradients"] == 4 * DIM * 63 * 2 * num_parts
    # Each of four messages is filled up to 8 bytes.
    times = 2 if sharding_type == "column_wise" else 1  # each column block gets the ids
    assert abs(saved["ids"] - (ids * num_ids * times + 4 * num_lengths)) <= 16


def test_different_sizes_without_inverse_indices_are_an_error_on_every_rank_that_names_both() -> None:
    case = Case([Table(13, 8, ("a", "b"), "SUM", "table_wise", PREFERRED)], (3, 3))
    module = case.module()
    features = KeyedJaggedTensor(
        ["a", "b"], torch.arange(4), lengths=torch.ones(4).int(), stride_per_key_per_rank=[[1], [3]]
    )
    with pytest.raises(InvalidInputError, match=r"batch sizes.*'a': 1, 'b': 3.*give inverse_indices"):
        module(features)

    def look_up(env: Any) -> str:
        sharded = shard_case(case, env, module)
        with pytest.raises(InvalidInputError) as caught:
            sharded(features if env.rank else case.batch(0, env.rank))
        sharded(case.batch(0, env.rank)).values().sum().backward()
        return str(caught.value)

    first, second = run_simulated(look_up, 2)
    assert first == second
    assert "rank 1" in first
    assert "'b' of table 't0'" in first
    assert "has 3 examples and feature 'a' has 1" in first


def test_a_feature_without_inverse_indices_is_an_error_that_names_it() -> None:
    case = Case([Table(13, 8, ("a", "b"), "SUM", "table_wise", PREFERRED)], (3,))
    module = case.module()
    features = KeyedJaggedTensor(
        ["a", "b"],
        torch.arange(4),
        lengths=torch.ones(4).int(),
        stride_per_key_per_rank=[[1], [3]],
        inverse_indices=(["b"], torch.tensor([[0, 1, 2, 2]])),
    )
    with pytest.raises(InvalidInputError, match="'a' has no row in the KeyedJaggedTensor's inverse_indices"):
        module(features)
    with pytest.raises(
        InvalidInputError, match=r"'a'.*has no row in the KeyedJaggedTensor's inverse_indices"
    ):
        run_simulated(lambda env: shard_case(case, env, module)(features), 1)
