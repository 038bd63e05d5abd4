"""The matrix: every registered sharding type, with everything that it may meet, equals the unsharded module.

Type x {sum, mean, sequence} x {weighted, not} x data type x kernel x ranks x kinds of batches x kinds of tables:
forward, gradient, weights and optimizer state after five steps, and the number of collectives of each. Ranks are
simulated; one model holds tables of all kinds and each of its five steps has another kind of batch, so that a case
covers many cells. Optimizers take turns from case to case, so that each trains with every type, kernel and mode. What
the registries hold is in it: a type or kernel that is added later is, by itself.
"""

from __future__ import annotations

import itertools

import pytest
from attrs import evolve
from tests.equality import BATCHES, Case, Table, assert_equals_unsharded, train_simulated
from tests.pairs import covering, pairs_of
from tests.plugins.training.test_equality import OPTIMIZERS, kernels, sharding_types, supports

from shardwright.host import host

MODES = {"pooled": False, "weighted": True, "sequence": False}
DATA_TYPES = ["FP32", "FP16", "BF16"]
WORLD_SIZES = [1, 2, 3, 4]
UNEVEN = (3, 1, 4, 2)
HOST_SIZES = {1: 1, 2: 2, 3: 3, 4: 2}  # four ranks are two hosts of two


def many_tables(mode: str, world_size: int) -> list[Table]:
    """For each pooling: a plain table, one of several features, one of a width that 4 does not divide, one of few rows.

    Features are shared between tables; the last table has fewer rows than there are ranks.
    """
    tables = []
    for pooling in ["NONE"] if mode == "sequence" else ["SUM", "MEAN"]:
        base = Table(13, 8, ("a",), pooling, "", "")
        tables += [
            base,
            evolve(base, rows=9, features=("a", "b")),
            evolve(base, dim=10, features=("b", "c")),
            evolve(base, rows=max(1, world_size - 1), dim=16, features=("d",)),
        ]
    return tables


def few_tables(mode: str, world_size: int) -> list[list[Table]]:
    """Models of fewer tables than ranks."""
    poolings = ["NONE"] if mode == "sequence" else ["SUM", "MEAN"]
    tables = [Table(7 + index, 8, (f"f{index}",), pooling, "", "") for index, pooling in enumerate(poolings)]
    if len(tables) < world_size:
        return [tables]
    return [[table] for table in tables if world_size > 1]


def cases_of(sharding_type: str, kernel: str, mode: str) -> dict[tuple[str, int], list[Case]]:
    """The cases of one type, kernel and mode, by data type and ranks; tables that the kernel refuses are left out."""
    cases: dict[tuple[str, int], list[Case]] = {}
    used = dict.fromkeys(OPTIMIZERS, 0)
    for world_size in WORLD_SIZES:
        models = [many_tables(mode, world_size), *few_tables(mode, world_size)]
        for data_type, model in itertools.product(DATA_TYPES, models):
            tables = [
                evolve(
                    table,
                    sharding_type=sharding_type,
                    kernel=kernel,
                    data_type=data_type,
                    variant=index,
                    offset=index,
                )
                for index, table in enumerate(model)
            ]
            taken = [table for table in tables if takes(table, "sgd", world_size, mode)]
            if taken:
                able = [
                    name
                    for name in OPTIMIZERS
                    if all(takes(table, name, world_size, mode) for table in taken)
                ]
                optimizer = min(able, key=used.__getitem__)  # they take turns
                used[optimizer] += 1
                of_axes = cases.setdefault((data_type, world_size), [])
                of_axes.append(case_of(taken, optimizer, mode, world_size))
    return cases


def case_of(tables: list[Table], optimizer: str, mode: str, world_size: int) -> Case:
    return Case(
        tables,
        UNEVEN[:world_size],
        optimizer,
        MODES[mode],
        max_length=3,
        local_world_size=HOST_SIZES[world_size],
        batches=BATCHES,
    )


def takes(table: Table, optimizer: str, world_size: int, mode: str) -> bool:
    """Whether the table's kernel trains it by an optimizer."""
    return supports(
        table.kernel,
        table,
        optimizer,
        world_size=world_size,
        is_weighted=MODES[mode],
        local_world_size=HOST_SIZES[world_size],
    )


CASES = {
    (*axes, *others): cases
    for axes in itertools.product(sharding_types(), kernels(), MODES)
    for others, cases in cases_of(*axes).items()
}


QUICK = covering(axes[:4] for axes in CASES)


def is_quick(sharding_type: str, kernel: str, mode: str, data_type: str, world_size: int) -> bool:
    """Whether a test is made every time: pairs on two ranks, with the preferred kernel on one and on two hosts too."""
    preferred = max(kernels(), key=lambda name: host().compute_kernels.create(name).preference)
    is_pair = (sharding_type, kernel, mode, data_type) in QUICK
    return is_pair and (world_size == 2 or (world_size in (1, 4) and kernel == preferred))


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param(axes, marks=() if is_quick(*axes) else pytest.mark.slow, id="-".join(map(str, axes)))
        for axes in CASES
    ],
)
def test_matrix_equals_unsharded(axes: tuple[str, str, str, str, int]) -> None:
    for case in CASES[axes]:
        assert_equals_unsharded(case, train_simulated(case))


Trained = tuple[str, str, str, str]


def trained(*, quick: bool) -> set[Trained]:
    """Type, kernel, mode and optimizer of the cases; with `quick`, of those that are tested every time."""
    return {
        (*axes[:3], case.optimizer)
        for axes, cases in CASES.items()
        for case in cases
        if not quick or is_quick(*axes)
    }


def test_matrix_trains_every_type_kernel_and_mode_by_every_optimizer() -> None:
    assert trained(quick=False) >= trainable()


def test_matrix_trains_every_pair_of_type_kernel_mode_and_optimizer_each_time() -> None:
    pairs = [set().union(*map(pairs_of, found)) for found in (trained(quick=True), trainable())]
    assert pairs[0] >= pairs[1]


def trainable() -> set[Trained]:
    """What there can be, by the kernels' own word."""
    return {
        (sharding_type, kernel, mode, optimizer)
        for sharding_type, kernel, mode, optimizer in itertools.product(
            sharding_types(), kernels(), MODES, OPTIMIZERS
        )
        if takes(
            evolve(many_tables(mode, 2)[0], sharding_type=sharding_type, kernel=kernel), optimizer, 2, mode
        )
    }


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_kinds_of_batches_are_what_they_are_called(world_size: int) -> None:
    case = Case(many_tables("pooled", world_size), UNEVEN[:world_size], "sgd", batches=BATCHES, max_length=3)
    lengths = {
        kind: [case.batch(step, rank).lengths().view(len(case.features), -1) for rank in range(world_size)]
        for step, kind in enumerate(BATCHES)
    }
    sizes = {kind: [own.shape[1] for own in lengths[kind]] for kind in BATCHES}
    assert len(set(sizes["even"])) == 1
    assert sizes["uneven"] == list(UNEVEN[:world_size])
    assert all(int((own == 0).any()) for own in lengths["empty bags"])
    assert sizes["empty batch on one rank"][-1] == 0
    assert sizes["a rank with no ids"][0] > 0
    assert int(lengths["a rank with no ids"][0].sum()) == 0
