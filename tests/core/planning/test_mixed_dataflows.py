"""Layouts whose blocks have different dataflows, through enumeration, traffic, plan document and check."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from attrs import frozen
from tests.core.planning.conftest import Plain, Slices, Whole, make_host

from shardwright import (
    NAMED_ONLY,
    BlockRun,
    EmbeddingShardingPlanner,
    Exchange,
    Layout,
    Options,
    ParameterConstraints,
    PlanError,
    PlanningError,
    RowMap,
    RowsRange,
    RowsSplit,
    ShardingPlan,
    ShardingType,
    TableSpec,
    Topology,
)
from shardwright.host import host, use_host
from shardwright.planning.options.enumeration import enumerate_options
from shardwright.planning.options.search_space import traffic_bytes
from shardwright.planning.tables.constraints import Constraints
from shardwright_plugins.dataflows import Replicate
from shardwright_plugins.estimators.shard_bytes import synchronised_bytes

TABLE = TableSpec("t", 11, 8, ["f"], pooling="NONE")
RANKS = Topology(2, "cpu")


@frozen
class FirstRowsAskedFor(RowsSplit):
    """Part 0 gets three quarters of the lookups."""

    name = "first_rows_asked_for"

    def id_fraction_of(self, part: int) -> float:
        return 0.75 if part == 0 else 0.125


class FirstRowsCopied(ShardingType):
    """Three rows on every rank, the others cut in two."""

    name, abbreviation, row_maps = "first_rows_copied", "FR", (FirstRowsAskedFor,)
    dataflows = (Replicate, Exchange)
    offered = "always"

    def layouts(
        self, table: TableSpec, topology: Topology, constraints: ParameterConstraints
    ) -> Iterator[Layout]:
        rows = FirstRowsAskedFor((0, 3, 7, table.num_embeddings))
        copies = BlockRun(rows, table.all_columns, 2, is_copied=True, rank=0, dataflow=Replicate())
        yield Layout([copies, BlockRun(rows, table.all_columns, 2, first_part=1, rank=0)])


@pytest.fixture(autouse=True)
def first_rows_copied() -> Iterator[None]:
    with use_host(make_host(sharding_types=[FirstRowsCopied, Slices, Whole])):
        yield


def options_of(**rule: object) -> Options:
    rules = Constraints({"t": ParameterConstraints(sharding_types=["first_rows_copied"], **rule)})
    return enumerate_options([TABLE], RANKS, rules, host(), batch_size=16)


def planned() -> ShardingPlan:
    rule = {"t": ParameterConstraints(sharding_types=["first_rows_copied"])}
    return EmbeddingShardingPlanner(RANKS, constraints=rule).plan_tables([TABLE])


def test_traffic_of_copies_is_their_own_batch_and_of_others_that_of_all_ranks():
    options = options_of(pooling_factors=[4])
    received, sent = (options.spread(column, 0).tolist() for column in traffic_bytes(options, RANKS))
    ids = [48, 48, 16, 16]  # of 64 a rank, 12 of 16 on its own copy, an eighth of both ranks' on each other
    assert received == [8 * count for count in ids]
    assert sent == [4 * 8 * count for count in ids]
    # The dense gradient of three rows is less than the ids and gradients of both ranks.
    assert options.spread(synchronised_bytes(options, RANKS), 0).tolist() == [96, 96, 0, 0]


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda shards: shards[1].pop("dataflow"), "rank 1 has 0 copies of row part 0"),
        (lambda shards: shards[1].update(dataflow={"name": "replicat"}), "Did you mean 'replicate'"),
        (lambda shards: shards[1].update(dataflow=3), "shard 1: dataflow must be an object, got 3"),
        (lambda shards: shards.pop(1), "rank 1 has 0 copies of row part 0"),
        (lambda shards: shards.pop(3), "row part 2: blocks reach column 0 of 8"),
    ],
)
def test_plan_document_edited_so_that_copies_do_not_fit_raises(edit, text):
    document = json.loads(planned().to_json())
    edit(document["modules"][""]["t"]["shards"])
    with pytest.raises(PlanError, match=text):
        ShardingPlan.from_json(json.dumps(document))


@frozen
class Keys(RowMap):
    """Any id, by its remainder."""

    name = "keys"
    takes_any_id = True
    num_rows: int
    num_parts: int

    def part_of(self, ids):
        return ids % self.num_parts

    def local_row_of(self, ids):
        return ids

    def rows_of(self, part):
        return RowsRange(self.num_rows, self.num_parts).rows_of(part)


class OfKeys(ShardingType):
    name, abbreviation, row_maps = "of_keys", "OK", (Keys,)
    offered = "always"

    def layouts(self, table, topology, constraints):
        yield Layout([BlockRun(Keys(table.num_embeddings, 2), table.all_columns, 2, rank=0)])


class FindsKeys(Plain):
    name, aliases, row_state = "finds_keys", (), ("row_keys",)


def test_kernels_of_rows_and_of_keys_are_offered_where_they_belong():
    with use_host(make_host(sharding_types=[OfKeys, Whole], compute_kernels=[Plain, FindsKeys])):
        options = enumerate_options([TABLE], RANKS, Constraints(), host(), batch_size=4)
    found = {
        (options.type_of(option).name, options.kernel_of(option).name)
        for option in range(options.num_options)
    }
    assert found == {("whole", "plain"), ("of_keys", "finds_keys")}
    reasons = {refusal.name: refusal.reason for refusal in options.refusals}
    assert {name: reason.partition(":")[0] for name, reason in reasons.items()} == {
        "plain": "its ids are rows, and the layout sends it keys",
        "finds_keys": "its ids are keys, and the layout sends it rows",
    }


def test_kernel_that_is_named_only_is_offered_where_constraints_name_it_alone():
    class OnRequest(Plain):
        name, aliases, preference = "on_request", (), NAMED_ONLY

    def offered(**rule):
        rules = Constraints({"t": ParameterConstraints(**rule)})
        with use_host(make_host(sharding_types=[Whole], compute_kernels=[Plain, OnRequest])):
            options = enumerate_options([TABLE], RANKS, rules, host(), batch_size=4)
        return {options.kernel_of(option).name for option in range(options.num_options)}

    assert offered() == {"plain"}
    assert offered(compute_kernels=["on_request"]) == {"on_request"}


def test_extras_of_constraints_reach_the_sharding_type_and_the_plan():
    seen = []

    class Listens(Whole):
        name, aliases = "listens", ()

        def layouts(self, table, topology, constraints):
            seen.append(constraints.extras)
            return super().layouts(table, topology, constraints)

    rule = ParameterConstraints.from_data({"extras": {"counts": [3, 1]}}, "rule")
    with use_host(make_host(sharding_types=[Listens])):
        plan = EmbeddingShardingPlanner(RANKS, constraints={"t": rule}).plan_tables([TABLE])
    assert {"counts": [3, 1]} in seen
    assert json.loads(plan.to_json())["inputs"]["constraints"]["value"] == {
        "t": {"extras": {"counts": [3, 1]}}
    }
    hash(rule)


@pytest.mark.parametrize("fraction", [1.5, -0.5, float("nan"), None, "x"], ids=str)
def test_row_map_that_gives_no_part_of_the_ids_is_named(fraction, monkeypatch):
    monkeypatch.setattr(FirstRowsAskedFor, "id_fraction_of", lambda self, part: fraction)
    text = r"row map 'first_rows_asked_for' broke its contract: what id_fraction_of\(\) returns must be a finite number"
    with pytest.raises(PlanningError, match=text):
        options_of()


class Counted(Plain):
    name, aliases = "counted", ()

    def columns(self, request):
        return {"count": "int64", "time": "float32"}


def test_kernel_that_asks_for_columns_is_offered_no_table_of_which_rows_are_copied():
    rule = {"t": ParameterConstraints(compute_kernels=["counted"])}
    types = [FirstRowsCopied, Slices, Whole]
    with use_host(make_host(sharding_types=types, compute_kernels=[Counted])):
        options = enumerate_options([TABLE], RANKS, Constraints(rule), host(), batch_size=16)
        assert {options.type_of(option).name for option in range(options.num_options)} == {"slices", "whole"}
        with pytest.raises(
            PlanningError, match="columns beside ids, which reach no table that every rank has"
        ):
            options_of(compute_kernels=["counted"])
