"""Conformance tests of sharding types.

Legend: R rows, D columns of a table, W ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import assume, given
from hypothesis import strategies as st

from shardwright.contracts import ShardingType
from shardwright.errors import InvalidInputError
from shardwright.planning.layouts.layout import Block, Layout, from_data, to_data
from shardwright.planning.plan.plan import ShardingPlan
from shardwright.planning.tables.constraints import ParameterConstraints
from shardwright.planning.tables.spec import TableSpec
from shardwright.runtime.sharded.models.planner import EmbeddingShardingPlanner
from shardwright_testing.equality.cases import Case
from shardwright_testing.equality.checkpoints import check_checkpoint
from shardwright_testing.equality.random_cases import (
    LAWS,
    TRAININGS,
    Cluster,
    clusters,
    run_drawn,
    table_specs,
    training_cases,
)
from shardwright_testing.equality.traffic import check_traffic
from shardwright_testing.equality.training import assert_equals_unsharded, train_simulated
from shardwright_testing.equality.type_under_test import PLAIN, SHAPES, TypeUnderTest, dataflow_of
from shardwright_testing.plugins_under_test import installed
from shardwright_testing.row_maps import MANY_ROWS, check_counting, check_row_map

_MIN_PARTITIONS = st.none() | st.integers(1, 80)


class ShardingTypeTests:
    """The tests of a sharding type: give the fixture ``sharding_type``, an instance.

    Tables are drawn; those for which the type offers no layout, although it is asked for by name, are left out. A type
    whose ids are keys needs a kernel that takes any id installed, and is compared with rows that begin as its keys' do.

    Attributes:
        constraints: demands of a user beside the type's name; the subclass sets them where the type would not apply
            otherwise: ``ParameterConstraints(extras=...)``.
    """

    constraints: ClassVar[ParameterConstraints] = ParameterConstraints()

    @pytest.fixture(autouse=True)
    def _one_thread(self) -> Any:
        """Tensors are tiny: more threads only wait for each other."""
        count = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(count)

    def test_layouts_cover_each_row_and_column_once(self, sharding_type: ShardingType) -> None:
        """Every cell of a table is in one block, or, where the dataflow is replicated, in one block a rank."""
        tested = TypeUnderTest(sharding_type, self.constraints)

        @LAWS
        @given(table_specs(), clusters(), _MIN_PARTITIONS)
        def check(table: TableSpec, cluster: Cluster, min_partition: int | None) -> None:
            layouts = tested.layouts(table, cluster, min_partition)
            _check_variants(sharding_type, table, layouts)
            for layout in layouts:
                _check_cover(sharding_type, table, cluster, layout)

        check()

    def test_some_table_has_a_layout(self, sharding_type: ShardingType) -> None:
        """The type applies to something: else no other test here would test anything."""
        tested = TypeUnderTest(sharding_type, self.constraints)
        assert any(tested.layouts(PLAIN, cluster) for cluster in SHAPES), (
            f"{tested.name}: offers no layout for {PLAIN.describe()} on 1, 2 or 4 ranks. If it applies only where "
            "extras ask for it, set `constraints` in the class of tests"
        )

    def test_row_maps_are_bijections_onto_their_parts(self, sharding_type: ShardingType) -> None:
        """Each row has one place, no two share one, and the places of a part are numbered from 0 without a gap."""
        tested = TypeUnderTest(sharding_type, self.constraints)

        @LAWS
        @given(table_specs(), clusters(), _MIN_PARTITIONS)
        def check(table: TableSpec, cluster: Cluster, min_partition: int | None) -> None:
            for layout in tested.layouts(table, cluster, min_partition):
                check_row_map(f"{sharding_type.name}: row map {layout.row_map}", layout.row_map)

        check()

    def test_rows_of_large_tables_are_counted_without_listing_them(self, sharding_type: ShardingType) -> None:
        """Else the planner takes minutes for tables of 1e9 rows."""
        tested, table = (
            TypeUnderTest(sharding_type, self.constraints),
            evolve(PLAIN, num_embeddings=MANY_ROWS),
        )
        for cluster in SHAPES:
            for layout in tested.layouts(table, cluster):
                check_counting(f"{sharding_type.name}: row map {layout.row_map.name}", layout.row_map)

    def test_layouts_are_the_same_each_time(self, sharding_type: ShardingType) -> None:
        """All ranks, and a process that reads a plan, see the same; and a type answers by shape if it says so."""
        tested = TypeUnderTest(sharding_type, self.constraints)

        @LAWS
        @given(table_specs(), clusters())
        def check(table: TableSpec, cluster: Cluster) -> None:
            first, again = (tested.layouts(table, cluster, 1) for _ in range(2))
            assert first == again, f"{sharding_type.name}: offers other layouts when it is asked again"
            if sharding_type.depends_on_shape_only:
                other = evolve(table, name="other", feature_names=("g", "h"), module="elsewhere")
                assert first == tested.layouts(other, cluster, 1), (
                    f"{sharding_type.name}: says depends_on_shape_only, but looks at a table's name, module or features"
                )
                assert first == tested.without_extras().layouts(table, cluster, 1), (
                    f"{sharding_type.name}: says depends_on_shape_only, but looks at the extras of constraints"
                )

        run_drawn(check)

    def test_row_maps_and_dataflows_come_back_from_a_plan(self, sharding_type: ShardingType) -> None:
        """They are plain data, and of classes that the type lists."""
        tested = TypeUnderTest(sharding_type, self.constraints)

        @LAWS
        @given(table_specs(), clusters())
        def check(table: TableSpec, cluster: Cluster) -> None:
            for layout in tested.layouts(table, cluster, 1):
                _check_data(
                    f"{sharding_type.name}: row map", layout.row_map, sharding_type.row_maps, "row_maps"
                )
                for dataflow in {dataflow_of(block, layout) for block in layout.blocks}:
                    _check_data(
                        f"{sharding_type.name}: dataflow", dataflow, sharding_type.dataflows, "dataflows"
                    )

        check()

    @pytest.mark.parametrize("case", ["plain", "float16", "extras"])
    def test_planner_plans_it_by_name_and_the_plan_survives_json(
        self, sharding_type: ShardingType, case: str
    ) -> None:
        """The planner takes what is asked for by name, the document can be read back, and the report shows it.

        Reading asks the type again, for the same table with the same constraints: also for one of 16 bits, and with
        extras that are not the type's own beside those that are.
        """
        with installed(sharding_type):
            tested = TypeUnderTest(sharding_type, self.constraints)
            if case == "extras":
                tested = tested.with_more_extras()
            table = evolve(PLAIN, data_type="FP16" if case == "float16" else "FP32")
            if not tested.has_kernel_for(table):
                pytest.skip(f"kernel {tested.kernel!r} has no tables of {table.data_type}")
            for cluster in SHAPES:
                if tested.layouts(table, cluster):
                    _check_round_trip(tested, table, cluster)

    @pytest.mark.parametrize("mode", ["pooled", "weighted", "sequence"])
    def test_sharded_module_equals_unsharded(self, sharding_type: ShardingType, mode: str) -> None:
        """Outputs, gradients, and weights and optimizer state after five steps, for drawn models and batches."""
        with installed(sharding_type):
            tested = TypeUnderTest(sharding_type, self.constraints)

            @TRAININGS
            @given(training_cases([tested.name], kernels=[tested.kernel], mode=mode).map(tested.asking))
            def check(case: Case) -> None:
                assume(tested.applies(case))
                assert_equals_unsharded(case, train_simulated(case))

            check()

    def test_declared_traffic_equals_counted_bytes(self, sharding_type: ShardingType) -> None:
        """Ranks send the bytes that the planner counts, of ids and of results."""
        with installed(sharding_type):
            tested = TypeUnderTest(sharding_type, self.constraints)

            @TRAININGS
            @given(
                table_specs(most_rows=12, most_columns=40),
                clusters(most_hosts=2, most_local=2),
                st.booleans(),
            )
            def check(table: TableSpec, cluster: Cluster, is_weighted: bool) -> None:
                check_traffic(tested, table, cluster, is_weighted=is_weighted)

            check()

    def test_checkpoint_loads_under_another_plan(self, sharding_type: ShardingType) -> None:
        """Weights and optimizer state written by one number of ranks are those of another, and of whole tables."""
        with installed(sharding_type):
            tested = TypeUnderTest(sharding_type, self.constraints)

            @TRAININGS
            @given(
                training_cases([tested.name], kernels=[tested.kernel], mode="pooled").map(tested.asking),
                clusters(most_hosts=2, most_local=2),
            )
            def check(case: Case, other: Cluster) -> None:
                moved = evolve(
                    case, batch_sizes=(2,) * other.world_size, local_world_size=other.local_world_size
                )
                assume(tested.applies(case) and tested.applies(moved))
                check_checkpoint(tested.name, case, moved)

            check()


def _check_round_trip(tested: TypeUnderTest, table: TableSpec, cluster: Cluster) -> None:
    planner = EmbeddingShardingPlanner(cluster.topology, constraints={"t": tested.rule()})
    plan = planner.plan_tables([table])
    again = ShardingPlan.from_json(plan.to_json())
    assert again == plan, f"{tested.name}: the plan that is read back is another one"
    assert tested.name in str(planner.report), f"{tested.name}: not in the report"


def _check_variants(sharding_type: ShardingType, table: TableSpec, layouts: Sequence[Layout]) -> None:
    twice = [name for name, count in Counter(layout.variant for layout in layouts).items() if count > 1]
    assert not twice, (
        f"{sharding_type.name}: {table.describe()} has several layouts of the variant {twice[0]!r}; a variant tells "
        "the layouts of a table apart"
    )


def _check_cover(sharding_type: ShardingType, table: TableSpec, cluster: Cluster, layout: Layout) -> None:
    where = f"{sharding_type.name}: {table.describe()} on {cluster.world_size} ranks"
    covered = np.zeros((table.num_embeddings, table.embedding_dim), dtype=int)
    replicated = np.zeros_like(covered, dtype=bool)
    for block in layout.blocks:
        cells = (block.rows.rows, slice(block.columns.start, block.columns.stop))
        _check_inside(where, table, block, covered[cells].shape)
        covered[cells] += 1
        replicated[cells] |= dataflow_of(block, layout).is_replicated
    wanted = np.where(replicated, cluster.world_size, 1)
    wrong = np.argwhere(covered != wanted)
    if len(wrong):
        row, column = wrong[0]
        raise AssertionError(
            f"{where}: row {row}, column {column} is in {covered[row, column]} blocks, it must be in "
            f"{wanted[row, column]}; {len(wrong)} of {covered.size} cells are wrong"
        )
    try:
        layout.check(table, world_size=cluster.world_size)
    except InvalidInputError as error:
        raise AssertionError(f"{sharding_type.name}: {error}") from error


def _check_inside(where: str, table: TableSpec, block: Block, shape: Sequence[int]) -> None:
    size = (block.num_rows, block.num_columns)
    assert tuple(shape) == size, (
        f"{where}: a block says it has {size[0]} x {size[1]} rows and columns, of the table it has "
        f"{shape[0]} x {shape[1]}"
    )


def _check_data(where: str, value: Any, known: Sequence[type[Any]], listed: str) -> None:
    try:
        again = from_data(to_data(value), known)
    except InvalidInputError as error:
        raise AssertionError(
            f"{where} {value} cannot be read back from a plan: {error} Is its class in {listed}?"
        ) from error
    assert again == value, f"{where} {value} comes back from a plan as {again}"
