"""Resharding between plans of any shape, on simulated ranks."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.core.runtime.conftest import only_loops  # noqa: F401 - the kernels of these cases
from tests.core.runtime.mixed_cuts import case_of
from tests.core.runtime.plans import Cut, Cuts, cut_tables, cuts, train_step, train_unsharded
from tests.plugins.resharding.one_collection import reshard_collection

from shardwright import (
    DistributedError,
    InvalidInputError,
    PlanError,
    RowsModulo,
    RowsRange,
    UnsupportedError,
)
from shardwright_plugins.dataflows import Replicate
from shardwright_testing.simulated import run_simulated

OTHER = Cuts(
    (
        Cut(11, 4, ("a",), "SUM", RowsModulo(11, parts=3), (3,), (1, 0)),
        Cut(9, 6, ("b", "a"), "MEAN", None, (), (0, 1), "loop_by_sample", Replicate()),
        Cut(7, 3, ("b",), "MEAN", RowsRange(7, parts=2), (1,), (1,)),
    ),
    2,
)


def resharded(case, then, **options):
    """What each rank's whole tables are after resharding, and what reshard said."""
    module = case.module()

    def work(env):
        sharded = case.shard(env, module)
        said = reshard_collection(sharded, then.shardings(), **options)
        return sharded.full_state_dict(), said, env.communicator.labels

    return run_simulated(work, case.world_size)


def assert_unchanged(results, case):
    expected = case.module().state_dict()
    for state, *_ in results:
        assert all(torch.equal(state[name], weight) for name, weight in expected.items())


@st.composite
def pairs(draw):
    """A case, and the same tables cut otherwise."""
    first = draw(cuts(is_pooled=None, with_copies=True))
    others = []
    for table in first.tables:
        other = draw(cut_tables(first.world_size, is_pooled=first.is_pooled, with_copies=True))
        row_map = other.row_map and _of_rows(other.row_map, table.rows)
        most = row_map.num_parts - 1 if row_map else 0
        copied = tuple(part for part in other.copied if part < most)
        others.append(
            evolve(
                table,
                row_map=row_map,
                edges=other.edges,
                ranks=other.ranks,
                kernel=other.kernel,
                copied=copied,
            )
        )
    return first, evolve(first, tables=others)


def _of_rows(row_map, rows):
    if hasattr(row_map, "bounds"):
        return type(row_map)((*(min(bound, rows) for bound in row_map.bounds[:-1]), rows))
    return evolve(row_map, num_rows=rows)


@settings(max_examples=30, deadline=None)
@given(pair=pairs(), piece_bytes=st.sampled_from([1, 100, 1 << 20]))
def test_any_plan_to_any_other_keeps_every_bit(pair, piece_bytes):
    case, then = pair
    assert_unchanged(resharded(case, then, piece_bytes=piece_bytes), case)


@settings(max_examples=15, deadline=None)
@given(pair=pairs(), limit=st.booleans())
def test_training_goes_on_as_unsharded(pair, limit):
    case, then = pair
    batches = [[case.batch(2, seed=10 * step + rank) for rank in range(case.world_size)] for step in range(3)]
    module = case.module()

    def work(env):
        sharded = case.shard(env, module)
        for step, by_rank in enumerate(batches):
            train_step(case, sharded, by_rank[env.rank], step, env.rank)
            plan = (then, case)[step % 2].shardings()
            reshard_collection(sharded, plan, max_extra_bytes=1 << 20 if limit else None)
        return sharded.full_state_dict()

    expected = train_unsharded(case, batches)
    for state in run_simulated(work, case.world_size):
        torch.testing.assert_close(state, expected)


def test_one_exchange_a_piece_and_one_gathering():
    labels = resharded(case_of(), OTHER)[0][2]
    first = labels.index("rows that are resharded")
    assert labels[:first].count("object") == 2  # the names of states when it was sharded, and one gathering
    assert labels.count("rows that are resharded") == 3  # one for each table
    assert resharded(case_of(), OTHER, piece_bytes=200)[0][2].count("rows that are resharded") > 3


def test_same_plan_moves_nothing():
    _, said, labels = resharded(case_of(), case_of())[0]
    assert said.tables == ()
    assert "rows that are resharded" not in labels


def test_tables_that_stay_keep_their_memory():
    case = Cuts((Cut(11, 4, ("a",)), Cut(9, 4, ("b",), kernel="loop_by_sample")), 2)
    first, second = case.tables
    then = evolve(case, tables=(first, evolve(second, ranks=(1,))))
    module = case.module()

    def work(env):
        sharded = case.shard(env, module)
        before = [p.data_ptr() for p in sharded.embedding_bags["t0"].parameters()]
        said = reshard_collection(sharded, then.shardings())
        return before, [p.data_ptr() for p in sharded.embedding_bags["t0"].parameters()], said

    for before, after, said in run_simulated(work, 2):
        assert before == after
        assert said.tables == ("t1",)


def test_memory_that_is_not_allowed_is_refused_before_anything_moves():
    case, module = case_of(), case_of().module()

    def work(env):
        sharded = case.shard(env, module)
        with pytest.raises((InvalidInputError, DistributedError), match="max_extra_bytes allows 50 B"):
            reshard_collection(sharded, OTHER.shardings(), max_extra_bytes=50)
        assert "rows that are resharded" not in env.communicator.labels
        return (sharded.full_state_dict(),)

    assert_unchanged(run_simulated(work, 2), case)


def test_old_blocks_are_freed_as_rows_leave_where_memory_is_limited():
    kernels = ("loop", "loop_by_sample")
    tables = [Cut(1000, 4 + 4 * n, ("a",), ranks=(n % 2,), kernel=kernels[n // 2]) for n in range(4)]
    case, then = Cuts(tables, 2), Cuts([evolve(table, ranks=(1 - table.ranks[0],)) for table in tables], 2)
    kept, freed = (
        resharded(case, then, max_extra_bytes=limit, piece_bytes=10_000) for limit in (None, 120_000)
    )
    assert_unchanged(kept, case)
    assert_unchanged(freed, case)
    # Rank 0 has tables of 4 and 12 columns, and gets those of 8 and 16; its own two have left when the last comes.
    assert kept[0][1].peak_bytes - freed[0][1].peak_bytes == (4 + 12) * 1000 * 4
    assert freed[0][1].peak_bytes <= 120_000


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda plan, rank: {name: plan[name] for name in ("t0", "t1")}, "leaves out 1 of 3 tables: t2"),
        (lambda plan, rank: {**plan, "t9": plan["t0"]}, "names the table 't9'"),
        (
            lambda plan, rank: {**plan, "t0": Cuts((Cut(12, 4, ("a",)),), 2).shardings()["t0"]},
            "covers 12 rows",
        ),
        (
            lambda plan, rank: {**plan, "t0": Cuts((Cut(11, 4, ("a",), ranks=(5,)),), 6).shardings()["t0"]},
            "rank 5",
        ),
        (
            lambda plan, rank: plan if rank else case_of().shardings(),
            "plan of table 't0' is rank 0: .*; rank 1: ",
        ),
        (lambda plan, rank: {**plan, "t0": evolve(plan["t0"], compute_kernel="nowhere")}, "nowhere"),
    ],
    ids=["a table too few", "one too many", "another size", "no such rank", "others", "no such kernel"],
)
def test_plan_that_does_not_fit_is_refused_on_all_ranks_and_changes_nothing(change, message):
    case, module = case_of(), case_of().module()

    def work(env):
        sharded = case.shard(env, module)
        with pytest.raises((PlanError, InvalidInputError, DistributedError, LookupError), match=message):
            reshard_collection(sharded, change(OTHER.shardings(), env.rank))
        train_step(case, sharded, case.batch(2), 0, env.rank)
        reshard_collection(sharded, OTHER.shardings())
        return train_step(case, sharded, case.batch(2), 1, env.rank)

    assert len(run_simulated(work, 2)) == 2


def test_batch_under_way_is_refused_on_all_ranks():
    case, module = case_of(), case_of().module()

    def work(env):
        sharded = case.shard(env, module)
        step = sharded.begin_input_dist(case.batch(2))
        assert step.send()
        with pytest.raises(UnsupportedError, match="let the pipeline come to the end of its data"):
            reshard_collection(sharded, OTHER.shardings())
        outputs = sharded.output_dist(sharded.compute(step))
        values = outputs.values()
        with pytest.raises(UnsupportedError, match="whose backward pass was not made"):
            reshard_collection(sharded, OTHER.shardings())
        values.sum().backward()
        reshard_collection(sharded, OTHER.shardings())
        with torch.no_grad():
            kept = sharded(case.batch(2)).values()
        reshard_collection(sharded, case.shardings())
        return kept

    assert len(run_simulated(work, 2)) == 2
