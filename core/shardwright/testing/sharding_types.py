"""What every sharding type must keep.

Legend: R rows, D columns of a table, W ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import assume, given
from hypothesis import strategies as st

from shardwright.contracts import ShardingType
from shardwright.errors import InvalidInputError
from shardwright.planning.constraints import Constraints, ParameterConstraints
from shardwright.planning.enumeration import enumerate_options
from shardwright.planning.layouts import Block, Layout, from_data, to_data
from shardwright.planning.plan import ShardingPlan
from shardwright.planning.planner import EmbeddingShardingPlanner
from shardwright.planning.row_maps import RowMap
from shardwright.planning.space import traffic_bytes
from shardwright.planning.tables import TableSpec
from shardwright.planning.topology import Topology
from shardwright.runtime.environment import ShardingEnv
from shardwright.sparse import KeyedJaggedTensor
from shardwright.testing.cases import Case, Table, shard_case, shardings_of
from shardwright.testing.drawing import (
    LAWS,
    TRAININGS,
    Cluster,
    clusters,
    plain_kernel,
    table_specs,
    training_cases,
)
from shardwright.testing.guests import installed
from shardwright.testing.simulated import SimulatedCommunicator, run_simulated
from shardwright.testing.training import assert_equals_unsharded, train_simulated

_MIN_PARTITIONS = st.none() | st.integers(1, 80)


class ShardingTypeTests:
    """The tests of a sharding type: give the fixture ``sharding_type``, an instance.

    Tables are drawn; those for which the type offers no layout, although it is asked for by name, are left out.
    """

    @pytest.fixture(autouse=True)
    def _one_thread(self) -> Any:
        """Tensors are tiny: more threads only wait for each other."""
        count = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(count)

    def test_layouts_cover_each_row_and_column_once(self, sharding_type: ShardingType) -> None:
        """Every cell of a table is in one block, or, where the dataflow is replicated, in one block a rank."""

        @LAWS
        @given(table_specs(), clusters(), _MIN_PARTITIONS)
        def check(table: TableSpec, cluster: Cluster, min_partition: int | None) -> None:
            layouts = _layouts(sharding_type, table, cluster, min_partition)
            _check_variants(sharding_type, table, layouts)
            for layout in layouts:
                _check_cover(sharding_type, table, cluster, layout)

        check()

    def test_some_table_has_a_layout(self, sharding_type: ShardingType) -> None:
        """The type applies to something: else no other test here would test anything."""
        table, shapes = TableSpec("t", 1000, 64, ["f"]), [Cluster(1, 1), Cluster(1, 2), Cluster(2, 2)]
        offered = [_layouts(sharding_type, table, cluster) for cluster in shapes]
        assert any(offered), (
            f"{sharding_type.name}: offers no layout for {table.describe()} on 1, 2 or 4 ranks"
        )

    def test_row_maps_are_bijections_onto_their_parts(self, sharding_type: ShardingType) -> None:
        """Each row has one place, no two share one, and the places of a part are numbered from 0 without a gap."""

        @LAWS
        @given(table_specs(), clusters(), _MIN_PARTITIONS)
        def check(table: TableSpec, cluster: Cluster, min_partition: int | None) -> None:
            for layout in _layouts(sharding_type, table, cluster, min_partition):
                _check_row_map(f"{sharding_type.name}: row map {layout.row_map}", layout.row_map)

        check()

    def test_layouts_are_the_same_each_time(self, sharding_type: ShardingType) -> None:
        """All ranks, and a process that reads a plan, see the same; and a type answers by shape if it says so."""

        @LAWS
        @given(table_specs(), clusters())
        def check(table: TableSpec, cluster: Cluster) -> None:
            first, again = (_layouts(sharding_type, table, cluster, 1) for _ in range(2))
            assert first == again, f"{sharding_type.name}: offers other layouts when it is asked again"
            if sharding_type.answers_by_shape:
                other = evolve(table, name="other", feature_names=("g", "h"), module="elsewhere")
                assert first == _layouts(sharding_type, other, cluster, 1), (
                    f"{sharding_type.name}: says answers_by_shape, but looks at a table's name, module or features"
                )

        check()

    def test_row_maps_and_dataflows_come_back_from_a_plan(self, sharding_type: ShardingType) -> None:
        """They are plain data, and of classes that the type lists."""

        @LAWS
        @given(table_specs(), clusters())
        def check(table: TableSpec, cluster: Cluster) -> None:
            for layout in _layouts(sharding_type, table, cluster, 1):
                _check_data(
                    f"{sharding_type.name}: row map", layout.row_map, sharding_type.row_maps, "row_maps"
                )
                for flow in {_dataflow_of(block, layout) for block in layout.blocks}:
                    _check_data(f"{sharding_type.name}: dataflow", flow, sharding_type.dataflows, "dataflows")

        check()

    def test_planner_plans_it_by_name_and_the_plan_survives_json(self, sharding_type: ShardingType) -> None:
        """The planner takes what is asked for by name, the document can be read back, and the report shows it."""
        table = TableSpec("t", 1000, 64, ["f"])
        rule = {"t": ParameterConstraints(sharding_types=[sharding_type.name])}
        with installed(sharding_type):
            for cluster in (Cluster(1, 1), Cluster(1, 2), Cluster(2, 2)):
                if not _layouts(sharding_type, table, cluster):
                    continue
                topology = Topology(cluster.world_size, "cpu", local_world_size=cluster.local_world_size)
                planner = EmbeddingShardingPlanner(topology, constraints=rule)
                plan = planner.plan_tables([table])
                again = ShardingPlan.from_json(plan.to_json())
                assert again == plan, f"{sharding_type.name}: the plan that is read back is another one"
                assert sharding_type.name in str(planner.report), f"{sharding_type.name}: not in the report"

    @pytest.mark.parametrize("mode", ["pooled", "weighted", "sequence"])
    def test_sharded_module_equals_unsharded(self, sharding_type: ShardingType, mode: str) -> None:
        """Outputs, gradients, and weights and optimizer state after five steps, for drawn models and batches."""
        with installed(sharding_type):

            @TRAININGS
            @given(training_cases([sharding_type.name], kernels=[plain_kernel()], mode=mode))
            def check(case: Case) -> None:
                assume(_applies(sharding_type, case))
                assert_equals_unsharded(case, train_simulated(case))

            check()

    def test_declared_traffic_equals_counted_bytes(self, sharding_type: ShardingType) -> None:
        """What the planner reckons with is what ranks send: ids on their way in, results on their way home."""
        with installed(sharding_type):
            kernel = plain_kernel()

            @TRAININGS
            @given(
                table_specs(most_rows=12, most_columns=40),
                clusters(most_hosts=2, most_local=2),
                st.booleans(),
            )
            def check(table: TableSpec, cluster: Cluster, is_weighted: bool) -> None:
                for index in range(len(_layouts(sharding_type, table, cluster, 1))):
                    _check_traffic(sharding_type, kernel, table, cluster, index, is_weighted)

            check()

    def test_checkpoint_loads_under_another_plan(self, sharding_type: ShardingType) -> None:
        """Weights and optimizer state written by one number of ranks are those of another, and of whole tables."""
        with installed(sharding_type):

            @TRAININGS
            @given(
                training_cases([sharding_type.name], kernels=[plain_kernel()], mode="pooled"),
                clusters(most_hosts=2, most_local=2),
            )
            def check(case: Case, other: Cluster) -> None:
                moved = evolve(
                    case, batch_sizes=(2,) * other.world_size, local_world_size=other.local_world_size
                )
                assume(_applies(sharding_type, case) and _applies(sharding_type, moved))
                _check_checkpoint(sharding_type, case, moved)

            check()


def _layouts(
    sharding_type: ShardingType, table: TableSpec, cluster: Cluster, min_partition: int | None = None
) -> list[Layout]:
    """The layouts of a table, the type asked for by name; none where it does not apply."""
    topology = Topology(cluster.world_size, "cpu", local_world_size=cluster.local_world_size)
    answer = sharding_type.supports(table, topology)
    if answer is not True:
        assert isinstance(answer, str), (
            f"{sharding_type.name}: supports() must be True or the reason why not, it is {answer!r}"
        )
        return []
    rule = ParameterConstraints(sharding_types=[sharding_type.name], min_partition=min_partition)
    return list(sharding_type.layouts(table, topology, rule))


def _applies(sharding_type: ShardingType, case: Case) -> bool:
    cluster = Cluster(
        case.world_size // (case.local_world_size or case.world_size),
        case.local_world_size or case.world_size,
    )
    return all(_layouts(sharding_type, spec, cluster, 1) for spec in case.specs())


def _dataflow_of(block: Block, layout: Layout) -> Any:
    return getattr(block, "dataflow", None) or layout.dataflow


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
        replicated[cells] |= _dataflow_of(block, layout).is_replicated
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


def _check_row_map(where: str, row_map: RowMap) -> None:
    ids = np.arange(row_map.num_rows)
    parts, locals_ = np.asarray(row_map.part_of(ids)), np.asarray(row_map.local_row_of(ids))
    _check_torch_agrees(where, row_map, parts, locals_)
    outside = np.flatnonzero((parts < 0) | (parts >= row_map.num_parts))
    assert not len(outside), (
        f"{where}: row {outside[0]} is in part {parts[outside[0]]} of {row_map.num_parts}"
    )
    for part in range(row_map.num_parts):
        held = np.arange(row_map.num_rows)[row_map.rows_of(part)]
        assert row_map.num_rows_of(part) == len(held), (
            f"{where}: num_rows_of({part}) is {row_map.num_rows_of(part)}, rows_of({part}) has {len(held)} rows"
        )
        _check_part(where, part, held, np.flatnonzero(parts == part), locals_)
    sizes = [rows for rows, count in row_map.part_sizes() for _ in range(count)]
    wanted = [row_map.num_rows_of(part) for part in range(row_map.num_parts)]
    assert sizes == wanted, f"{where}: part_sizes() says {sizes}, the parts have {wanted}"


def _check_part(where: str, part: int, held: Any, sent: Any, locals_: Any) -> None:
    """The rows that ``rows_of`` lists are those that ids are sent to, each at its local row."""
    missing, strange = np.setdiff1d(sent, held), np.setdiff1d(held, sent)
    assert not len(missing), (
        f"{where}: part_of sends row {missing[0]} to part {part}, rows_of({part}) lacks it"
    )
    assert not len(strange), f"{where}: rows_of({part}) has row {strange[0]}, part_of sends it elsewhere"
    for local, row in enumerate(held.tolist()):
        assert locals_[row] == local, (
            f"{where}: row {row} is local row {local} of part {part} by rows_of, and {locals_[row]} by local_row_of"
        )


def _check_torch_agrees(where: str, row_map: RowMap, parts: Any, locals_: Any) -> None:
    ids = torch.arange(row_map.num_rows)
    for name, of_numpy in (("part_of", parts), ("local_row_of", locals_)):
        of_torch = getattr(row_map, name)(ids)
        assert isinstance(of_torch, torch.Tensor), (
            f"{where}: {name} of a tensor gives a {type(of_torch).__name__}, not a tensor"
        )
        assert np.array_equal(of_torch.numpy(), of_numpy), (
            f"{where}: {name} gives other values for a tensor than for an array"
        )


def _check_data(where: str, value: Any, known: Sequence[type[Any]], listed: str) -> None:
    try:
        again = from_data(to_data(value), known)
    except InvalidInputError as error:
        raise AssertionError(
            f"{where} {value} cannot be read back from a plan: {error} Is its class in {listed}?"
        ) from error
    assert again == value, f"{where} {value} comes back from a plan as {again}"


def _check_traffic(
    sharding_type: ShardingType,
    kernel: str,
    table: TableSpec,
    cluster: Cluster,
    index: int,
    is_weighted: bool,
) -> None:
    """Each rank looks every row up once in each of two bags, so that ids are spread as the planner takes them to be."""
    case = Case(
        [Table(table.num_embeddings, table.embedding_dim, ("f",), "SUM", sharding_type.name, kernel, index)],
        (2,) * cluster.world_size,
        "sgd",
        is_weighted,
        local_world_size=cluster.local_world_size,
    )
    (layout,) = (sharding.layout for sharding in shardings_of(case, case.specs()).values())
    # Copies look up their own batch: nothing of it travels. Of parts without rows the planner reckons with nothing,
    # while sums inside a host are sent for all of them, as zeros.
    if any(_dataflow_of(block, layout).is_replicated or not block.num_rows for block in layout.blocks):
        return
    declared = _declared_bytes(sharding_type, case, cluster, layout.variant)
    counted = _counted_bytes(case, 2) - _counted_bytes(case, 1), _results_bytes(case)
    for what, said, sent in zip(("ids", "results"), declared, counted, strict=True):
        assert said == sent, (
            f"{sharding_type.name}: {table.describe()} on {cluster.world_size} ranks, layout {layout.variant!r}: "
            f"the planner reckons with {said:.0f} bytes of {what} a step, ranks sent {sent}"
        )


def _declared_bytes(
    sharding_type: ShardingType, case: Case, cluster: Cluster, variant: str
) -> tuple[float, float]:
    (spec,) = case.specs()
    rule = ParameterConstraints(
        sharding_types=[sharding_type.name],
        compute_kernels=[case.tables[0].kernel],
        min_partition=1,
        pooling_factors=[float(spec.num_embeddings)],
        is_weighted=case.is_weighted,
    )
    topology = Topology(cluster.world_size, "cpu", local_world_size=cluster.local_world_size)
    with installed(sharding_type) as plugins:
        rules = Constraints({spec.path: rule})
        options = enumerate_options([spec], topology, rules, plugins, batch_size=2)
    option = next(o for o in range(options.num_options) if options.layouts[o].variant == variant)
    runs = options.shards_of(option)
    received, sent = (column[runs] @ options.count[runs] for column in traffic_bytes(options, topology))
    return float(received), float(sent)


def _every_row(case: Case, times: int) -> KeyedJaggedTensor:
    """Two bags, each of all rows, so many times."""
    rows = case.tables[0].rows
    values = torch.arange(rows).repeat(2 * times)
    return KeyedJaggedTensor(
        keys=["f"],
        values=values,
        lengths=torch.full((2,), rows * times, dtype=torch.int32),
        weights=torch.ones(len(values)) if case.is_weighted else None,
    )


def _sent(case: Case, times: int) -> Counter[str]:
    """The bytes that all ranks sent in one forward pass, by the first word of the label."""
    module = case.module()

    def look_up(env: ShardingEnv) -> Counter[str]:
        communicator = env.communicator
        assert isinstance(communicator, SimulatedCommunicator)
        sharded = shard_case(case, env, module)
        first = len(communicator.sent_bytes)
        with torch.no_grad():
            sharded(_every_row(case, times)).values()
        counted: Counter[str] = Counter()
        for label, by_rank in communicator.sent_bytes[first:]:
            # On one host there is nothing to cross: that leg only hands a rank its own sums.
            if not (label.endswith("across hosts") and env.local_world_size == env.world_size):
                counted[label.split()[0]] += sum(by_rank)
        return counted

    by_rank = run_simulated(look_up, case.world_size, local_world_size=case.local_world_size)
    return sum(by_rank, Counter())


def _counted_bytes(case: Case, times: int) -> int:
    return _sent(case, times)["ids"]


def _results_bytes(case: Case) -> int:
    return _sent(case, 1)["results"]


def _check_checkpoint(sharding_type: ShardingType, case: Case, moved: Case) -> None:
    trained = train_simulated(case)[0]
    expected = {name: weight.clone() for name, weight in trained.weights.items()}
    module = moved.module()
    for parameter in module.parameters():
        torch.nn.init.constant_(parameter, 7.0)  # what is not loaded shows

    def load(env: ShardingEnv) -> tuple[dict[str, Any], dict[str, Any]]:
        sharded = shard_case(moved, env, module)
        sharded.load_state_dict(expected)
        sharded.fused_optimizer.load_state_dict(trained.optimizer)
        return sharded.state_dict(), sharded.fused_optimizer.state_dict()["state"]

    where = f"{sharding_type.name}: a checkpoint of {case.world_size} ranks loaded by {moved.world_size}"
    for rank, (weights, state) in enumerate(
        run_simulated(load, moved.world_size, local_world_size=moved.local_world_size)
    ):
        for name, weight in expected.items():
            _check_loaded(f"{where}, rank {rank}: {name}", weights[name], weight)
            for entry, value in trained.optimizer["state"].get(name, {}).items():
                loaded = torch.as_tensor(state[name][entry])
                _check_loaded(f"{where}, rank {rank}: {entry} of {name}", loaded, torch.as_tensor(value))


def _check_loaded(where: str, loaded: torch.Tensor, written: torch.Tensor) -> None:
    assert loaded.shape == written.shape, f"{where} has shape {list(loaded.shape)}, not {list(written.shape)}"
    lost = (loaded != written).nonzero().tolist()
    assert not lost, f"{where} lost values: {len(lost)} of {written.numel()} differ, the first at {lost[:1]}"
