"""What every built-in sharding type offers, and what each is about."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.planning.constraints import ParameterConstraints
from shardwright.planning.tables import TableSpec
from shardwright.planning.topology import Topology
from shardwright.plugins import host
from shardwright_plugins.sharding_types._column_cuts import column_cuts
from shardwright_plugins.sharding_types.column_wise import ColumnWise
from shardwright_plugins.sharding_types.row_wise import RowWise
from shardwright_plugins.sharding_types.table_wise import TableWise

BUILT_IN = ("column_wise", "row_wise", "table_wise")


def layouts_of(kind, rows=10, dim=64, ranks=2, **rule):
    table = TableSpec("t", rows, dim, ["f"])
    return list(kind.layouts(table, Topology(ranks, "cpu"), ParameterConstraints(**rule)))


def blocks_of(layout):
    return [
        (block.rank, block.rows.bounds, (block.columns.start, block.columns.stop)) for block in layout.blocks
    ]


@pytest.mark.parametrize("name", BUILT_IN)
@given(
    rows=st.integers(1, 60),
    dim=st.integers(1, 300),
    ranks=st.integers(1, 9),
    min_partition=st.none() | st.integers(1, 80),
)
def test_layouts_cover_every_cell_exactly_once(name, rows, dim, ranks, min_partition):
    table = TableSpec("t", rows, dim, ["f"])
    rule = ParameterConstraints(sharding_types=[name], min_partition=min_partition)
    layouts = list(host().sharding_types.create(name).layouts(table, Topology(ranks, "cpu"), rule))
    assert layouts
    assert len({layout.variant for layout in layouts}) == len(layouts)
    for layout in layouts:
        layout.check(table, world_size=ranks)
        covered = np.zeros((rows, dim), dtype=int)
        for block in layout.blocks:
            covered[block.rows.rows, block.columns.start : block.columns.stop] += 1
        assert (covered == 1).all()


@pytest.mark.parametrize("name", BUILT_IN)
def test_types_are_registered_with_an_abbreviation(name):
    kind = host().sharding_types.create(name)
    assert kind.abbreviation == "".join(word[0] for word in name.split("_")).upper()


def test_table_wise_is_one_block_on_any_rank():
    assert [blocks_of(layout) for layout in layouts_of(TableWise())] == [[(None, (0, 10), (0, 64))]]


def test_row_wise_block_of_each_rank_has_the_rows_of_torchrec():
    (layout,) = layouts_of(RowWise(), rows=10, ranks=4)
    assert blocks_of(layout) == [
        (0, (0, 3), (0, 64)),
        (1, (3, 6), (0, 64)),
        (2, (6, 9), (0, 64)),
        (3, (9, 10), (0, 64)),
    ]


def test_row_wise_fewer_rows_than_ranks_leaves_empty_blocks():
    (layout,) = layouts_of(RowWise(), rows=2, ranks=4)
    assert [block.num_rows for block in layout.blocks] == [1, 1, 0, 0]
    assert [block.rank for block in layout.blocks] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("dim", "min_partition", "widths"),
    [
        (64, None, [[32, 32]]),
        (128, None, [[64, 64], [32] * 4]),
        (128, 64, [[64, 64]]),
        (96, None, [[48, 48], [32] * 3]),
        (100, None, [[32, 32, 36]]),
        (70, None, [[32, 38]]),
        (64, 4, [[32] * 2, [16] * 4, [8] * 8, [4] * 16]),
        (16, None, []),
        (63, None, []),
    ],
)
def test_column_wise_widths_of_every_variant(dim, min_partition, widths):
    layouts = layouts_of(ColumnWise(), dim=dim, min_partition=min_partition)
    assert [[block.num_columns for block in layout.blocks] for layout in layouts] == widths
    assert [layout.variant for layout in layouts] == [f"{len(blocks)} blocks" for blocks in widths]


def test_column_wise_table_too_narrow_stays_whole_when_asked_by_name():
    (layout,) = layouts_of(ColumnWise(), dim=16, sharding_types=["column_wise"])
    assert blocks_of(layout) == [(None, (0, 10), (0, 16))]


@given(dim=st.integers(1, 300), min_columns=st.integers(1, 100))
def test_column_cuts_are_as_wide_as_asked_and_start_at_whole_vectors(dim, min_columns):
    for bounds in column_cuts(dim, min_columns):
        assert bounds[0] == 0
        assert bounds[-1] == dim
        assert min(np.diff(bounds)) >= min_columns
        assert all(bound % 4 == 0 for bound in bounds[:-1])


@pytest.mark.parametrize("name", BUILT_IN)
def test_types_answer_by_shape_as_they_say(name):
    kind = host().sharding_types.create(name)
    assert kind.answers_by_shape
    one = TableSpec("one", 10, 128, ["f"], module="here")
    other = TableSpec("other", 10, 128, ["g", "h"], module="there")
    asked = ParameterConstraints(min_partition=16, sharding_types=[name])
    more = ParameterConstraints(
        min_partition=16, sharding_types=[name], pooling_factors=[9.0], batch_sizes=[7]
    )
    topology = Topology(3, "cpu")
    assert list(kind.layouts(one, topology, asked)) == list(kind.layouts(other, topology, more))
