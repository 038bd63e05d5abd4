from __future__ import annotations

import copy
import json
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.as_asked import AsAsked, AsAskedByShape
from tests.core.planning.conftest import make_host

import shardwright as sw
from shardwright import (
    Block,
    BlockRun,
    ColumnRange,
    EmbeddingModuleShardingPlan,
    EmbeddingShardingPlanner,
    Exchange,
    Layout,
    ParameterConstraints,
    ParameterSharding,
    PlanError,
    RowsModulo,
    RowsRange,
    RowsSplit,
    ShardingPlan,
    ShardingType,
    ShardMetadata,
    TableSpec,
    Topology,
)
from shardwright.host import use_host
from shardwright.planning.text import plain_json
from shardwright_plugins.dataflows import Replicate
from shardwright_plugins.plan_differences.check import check_plan
from shardwright_plugins.plan_differences.explain import explain_table

LOOKED_AT = {
    "extras": (TableSpec("t", 10, 8, ["f"]), {"extras": {"cut": True}}),
    "data type": (TableSpec("t", 10, 8, ["f"], data_type="FP16"), {}),
    "neither": (TableSpec("t", 10, 8, ["f"]), {"extras": {"cut": False}}),
}


def planned(*tables, **rules):
    rules = {name: ParameterConstraints(sharding_types=[kind]) for name, kind in rules.items()}
    return EmbeddingShardingPlanner(Topology(3, "cuda"), constraints=rules).plan_tables(tables)


def document_of(plan):
    return json.loads(plan.to_json())


def hand_written(shards, **more):
    return {
        "format": "shardwright-plan",
        "version": 1,
        "topology": {"world_size": 3, "compute_device": "cpu"},
        "modules": {
            "m": {
                "t": {
                    "sharding_type": "slices",
                    "compute_kernel": "plain",
                    "num_embeddings": 10,
                    "embedding_dim": 8,
                    "shards": shards,
                    **more,
                }
            }
        },
    }


def shard(rank, rows, columns):
    return {"rank": rank, "rows": rows, "columns": columns}


WHOLE = [shard(0, [0, 10], [0, 8])]
TABLES = [
    TableSpec("a", 10, 8, ["f"]),
    TableSpec("b", 2, 4, ["g"], module="tower"),
    TableSpec("c", 9, 8, ["h"]),
]


def test_json_extras_and_variant_of_a_plugin_survive():
    plan = planned(TABLES[0], a="slices")
    entry = document_of(plan)["modules"][""]["a"]
    assert entry["extras"] == {"made_by": "slices", "nested": {"numbers": [1, 2.5, None]}}
    layout = ShardingPlan.from_json(plan.to_json()).plan[""]["a"].layout
    assert (layout.extras, layout.variant) == (entry["extras"], entry["variant"])


def test_json_keys_of_others_survive_at_every_level():
    document = document_of(planned(*TABLES, a="slices"))
    document["x-acme"] = {"secret": [1, {"two": 2}]}
    document["objective"]["x-acme"] = 1
    document["topology"]["x-acme"] = None
    document["inputs"]["acme"] = {"value": {"mine": 1}, "acme": 2}
    document["plugins"][0]["acme"] = {}
    document["modules"][""]["a"]["x-acme"] = "kept"
    document["modules"][""]["a"]["shards"][1]["x-acme"] = [3]
    assert document_of(ShardingPlan.from_json(json.dumps(document))) == document


@pytest.mark.parametrize(
    ("bounds", "row_map"),
    [
        ([(0, 4), (4, 8), (8, 10)], RowsRange(10, parts=3)),
        ([(0, 3), (3, 8), (8, 10)], RowsSplit((0, 3, 8, 10))),
        ([(8, 10), (0, 4), (4, 8)], RowsRange(10, parts=3)),
        ([(0, 10), (10, 10), (10, 10)], RowsSplit((0, 10, 10, 10))),
    ],
)
def test_from_json_derives_the_row_map_from_the_bounds(bounds, row_map):
    shards = [shard(rank, list(rows), [0, 8]) for rank, rows in enumerate(bounds)]
    layout = ShardingPlan.from_json(json.dumps(hand_written(shards))).plan["m"]["t"].layout
    assert layout.row_map == row_map
    assert [block.rows.bounds for block in layout.blocks] == bounds


class Anyhow(ShardingType):
    """Makes no layouts, so that there is nothing a plan could contradict."""

    name, abbreviation = "anyhow", "AH"
    offered = "always"

    def layouts(self, table, topology, constraints):
        return []


HALVES = [shard(2, [0, 10], [0, 4]), shard(1, [0, 10], [4, 8])]


def test_from_json_shards_that_the_named_type_would_not_make_are_read_as_they_are():
    document = document_of(planned(TABLES[0], a="whole"))
    document["modules"][""]["a"]["shards"] = HALVES
    plan = ShardingPlan.from_json(json.dumps(document))
    assert plan.plan[""]["a"].ranks == [2, 1]
    (problem,) = check_plan(plan).problems
    assert "table 'a'" in problem
    assert "no option has the plan's 2 shards" in problem


@pytest.mark.parametrize("kind", [AsAsked, AsAskedByShape])
@pytest.mark.parametrize("case", sorted(LOOKED_AT))
def test_json_of_a_type_that_looks_at_extras_or_data_type_comes_back(host_with, kind, case):
    table, more = LOOKED_AT[case]
    rule = ParameterConstraints(sharding_types=[kind.name], **more)
    with host_with(sharding_types=[kind]):
        planner = EmbeddingShardingPlanner(Topology(3, "cuda"), constraints={"t": rule})
        # A table of the same shape of which nothing is asked: what a type said of one is not said of the other.
        other = attrs.evolve(table, name="u", data_type="FP32")
        plan = planner.plan_tables([table, other])
        again = ShardingPlan.from_json(plan.to_json())
        assert again == plan
        assert check_plan(again).problems == []
        assert explain_table(again, "t").chosen.sharding_type == kind.name


def _alike(**changes):
    """Two tables that are cut alike, on other ranks; and changes of the second's first shard."""
    document = hand_written([shard(0, [0, 5], [0, 8]), shard(1, [5, 10], [0, 8])])
    tables = document["modules"]["m"]
    second = copy.deepcopy(tables["t"])
    for entry, rank in zip(second["shards"], (2, 0), strict=True):
        entry["rank"] = rank
    second["shards"][0].update(changes)
    tables["b"] = second
    return json.dumps(document)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rank": 7}, "table 'b', shard 0: rank 7 is not one of"),
        ({"rank": True}, "table 'b', shard 0: rank must be a whole number, got True"),
        ({"rows": [0, 4]}, r"table 'b': rows \[4, 5\) are not covered"),
        ({"rows": [0.5, 5]}, r"table 'b', shard 0: rows\[0\] must be a whole number, got 0.5"),
        ({"columns": [0, 9]}, r"table 'b', shard 0: columns \[0, 9\) are empty or not within"),
    ],
)
def test_from_json_table_almost_like_one_before_is_checked_itself(changes, text):
    with pytest.raises(PlanError, match=text):
        ShardingPlan.from_json(_alike(**changes))


@st.composite
def grids(draw):
    """A table cut at any rows and columns, each block on any of 3 ranks."""
    rows, dim = draw(st.integers(1, 20)), draw(st.integers(1, 12))
    row_cuts = sorted(draw(st.lists(st.integers(0, rows), max_size=4)))
    column_cuts = sorted(draw(st.sets(st.integers(1, dim), max_size=3)) - {dim})
    row_map = RowsSplit((0, *row_cuts, rows))
    table = TableSpec("t", rows, dim)
    spans = [table.columns(a, b) for a, b in zip([0, *column_cuts], [*column_cuts, dim], strict=True)]
    blocks = [Block(part, span, rank=draw(st.integers(0, 2))) for part in row_map for span in spans]
    return Layout(draw(st.permutations(blocks)), extras=draw(st.dictionaries(st.text(), st.integers())))


@given(layout=grids())
def test_json_round_trip_keeps_what_every_block_covers(layout):
    plan = ShardingPlan({"m": EmbeddingModuleShardingPlan(t=ParameterSharding("anyhow", "plain", layout))})
    with use_host(make_host(sharding_types=[Anyhow])):
        again = ShardingPlan.from_json(plan.to_json())
    assert again.to_json() == plan.to_json()
    read = again.plan["m"]["t"].layout

    def cover(blocks):
        return [(block.rank, block.rows.bounds, block.columns) for block in blocks]

    assert cover(read.blocks) == cover(layout.blocks)
    assert read.extras == layout.extras


@pytest.mark.parametrize(
    ("shards", "text"),
    [
        ([], r": shards must have 1 item at least, got \[\]"),
        ([shard(3, [0, 10], [0, 8])], "shard 0: rank 3 is not one of the 3 ranks"),
        ([shard(-1, [0, 10], [0, 8])], "shard 0: rank must be 0 at least, got -1"),
        ([shard(True, [0, 10], [0, 8])], "shard 0: rank must be a whole number, got True"),
        ([shard(0, [0, 11], [0, 8])], r"shard 0: rows \[0, 11\) are not within the table's 10 rows"),
        ([shard(0, [5, 4], [0, 8])], r"shard 0: rows \[5, 4\) are not within"),
        ([shard(0, [0, 10], [0, 9])], r"shard 0: columns \[0, 9\) .* not within the table's 8 columns"),
        ([shard(0, [0, 10], [4, 4])], r"shard 0: columns \[4, 4\) are empty"),
        ([shard(0, [0, "10"], [0, 8])], r"shard 0: rows\[1\] must be a whole number, got '10'"),
        ([shard(0, [0], [0, 8])], r"shard 0: rows must have 2 items at least, got \[0\]"),
        ([shard(0, [0, 10], 8)], "shard 0: columns must be a list, got 8"),
        (["everything"], "shard 0 must be an object, got 'everything'"),
        ([shard(0, {"part": 0}, [0, 8])], "shard 0: rows are given by part, which needs the table's row_map"),
        ([shard(0, [0, 4], [0, 8])], "the shards cover 4 of 10 rows"),
        ([shard(0, [0, 4], [0, 8]), shard(1, [6, 10], [0, 8])], r"rows \[4, 6\) are not covered"),
        ([shard(0, [0, 6], [0, 8]), shard(1, [4, 10], [0, 8])], r"rows \[4, 6\) are covered twice"),
        ([*WHOLE, *WHOLE], r"shard 1: rows \[0, 10\) and columns \[0, 8\) are covered twice"),
        ([shard(0, [0, 10], [0, 4])], "blocks reach column 4 of 8"),
        ([shard(0, [0, 10], [0, 4]), shard(0, [0, 10], [2, 8])], r"columns \[2, 4\) are covered twice"),
        ([shard(0, [0, 10], [0, 4]), shard(0, [0, 10], [6, 8])], r"columns \[4, 6\) are not covered"),
    ],
)
def test_from_json_wrong_shards_raise_naming_module_and_table(shards, text):
    with pytest.raises(PlanError, match=rf"module 'm', table 't'.*{text}"):
        ShardingPlan.from_json(json.dumps(hand_written(shards)))


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"sharding_type": "wohle"}, r"no sharding type 'wohle'.*Did you mean 'whole'\?"),
        ({"compute_kernel": "plane"}, r"no compute kernel 'plane'.*Did you mean 'plain'\?"),
        ({"num_embeddings": 0}, "num_embeddings must be 1 at least, got 0"),
        ({"embedding_dim": "8"}, "embedding_dim must be a whole number, got '8'"),
        ({"row_map": {"name": "modul"}}, r"unknown name 'modul'.*Did you mean 'modulo'\?"),
        (
            {"row_map": {"name": "split", "bounds": [0, 4, 10]}},
            "the row_map has 2 parts, and there are 1 shards for them",
        ),
        ({"dataflow": {"name": "exchang"}}, r"unknown name 'exchang'.*Did you mean 'exchange'\?"),
        ({"extras": [1]}, r"extras must be an object, got \[1\]"),
        ({"variant": 3}, "variant must be a text, got 3"),
    ],
)
def test_from_json_wrong_entry_raises_naming_module_and_table(more, text):
    with pytest.raises(PlanError, match=rf"module 'm', table 't'.*{text}"):
        ShardingPlan.from_json(json.dumps(hand_written(WHOLE, **more)))


def test_from_json_of_a_type_that_is_not_there_names_the_distribution_that_brought_it():
    document = hand_written(WHOLE, sharding_type="dealt")
    brought = {"kind": "sharding_types", "name": "dealt", "distribution": "acme-dealt", "version": "1.2"}
    other = {"kind": "estimators", "name": "dealt", "distribution": "acme-time", "version": "3"}
    with pytest.raises(PlanError, match=r"no sharding type 'dealt'.*made with that of acme-dealt 1\.2\."):
        ShardingPlan.from_json(json.dumps({**document, "plugins": [other, brought]}))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"format": "torchrec"}, "format must be 'shardwright-plan', got 'torchrec'"),
        ({"version": 2}, "version must be 1, got 2"),
        ({"version": 2, "shards": {}}, "version must be 1, got 2"),
        ({"topology": None}, "topology must be an object"),
        (
            {"topology": {"world_size": 0, "compute_device": "cpu"}},
            "world_size must be 1 at least, got 0",
        ),
        ({"topology": {"world_size": 1}}, "topology has no 'compute_device'"),
        ({"modules": []}, r"modules must be an object, got \[\]"),
        ({"modules": {"m": []}}, r"module 'm' must be an object, got \[\]"),
        ({"modules": {"m": {"t": 1}}}, "module 'm', table 't' must be an object, got 1"),
        ({"objective": 3}, "objective must be an object, got 3"),
        ({"objective": {"value_ms": "1"}}, r"objective\.value_ms must be null or a number, got '1'"),
        (
            {"objective": {"lower_bound_ms": True}},
            r"objective\.lower_bound_ms must be null or a number, got True",
        ),
        ({"objective": {"certificate": []}}, r"certificate must be an object, got \[\]"),
        ({"inputs": []}, r"inputs must be an object, got \[\]"),
        ({"plugins": 5}, "plugins must be a list, got 5"),
        ({"plugins": ["acme"]}, r"plugins\[0\] must be an object, got 'acme'"),
    ],
)
def test_from_json_wrong_document_raises(change, text):
    document = copy.deepcopy(hand_written(WHOLE))
    with pytest.raises(PlanError, match=text):
        ShardingPlan.from_json(json.dumps({**document, **change}))


def test_repr_of_a_plan_has_torchrecs_shape():
    text = repr(planned(TABLES[0], a="whole").plan)
    assert text == (
        "{'': {'a': ParameterSharding(sharding_type='whole', compute_kernel='plain', ranks=[0], "
        "sharding_spec=EnumerableShardingSpec(shards=[ShardMetadata(shard_offsets=[0, 0], shard_sizes=[10, 8], "
        "placement='rank:0/cuda:0')]))}}"
    )


def test_places_of_shards_tell_rank_and_device():
    shard = planned(*TABLES, a="slices", b="whole").plan["tower"]["b"].sharding_spec.shards[0]
    assert shard.placement == "rank:0/cuda:0"
    assert (shard.placement.rank(), shard.placement.device()) == (0, torch.device("cuda", 0))
    assert ShardMetadata([0, 0], [1, 1], "rank:12/cpu").placement.rank() == 12


class Spread(ShardingType):
    """Rows, or copies, on all ranks in turn."""

    name, abbreviation, row_maps = "spread", "SP", (RowsModulo,)
    dataflows = (Exchange, Replicate)

    def layouts(self, table, topology, constraints):
        return []


RANKS = 40


def spread_over(blocks, **more):
    kind = EmbeddingModuleShardingPlan({"t": ParameterSharding("spread", "plain", Layout(blocks, **more))})
    topology = {"world_size": RANKS, "compute_device": "cpu"}
    return ShardingPlan({"m": kind}, {"topology": topology})


COLUMNS = ColumnRange(0, 8)
PARTS = RowsModulo(100, parts=RANKS)
EIGHTIETHS = RowsRange(100, parts=2 * RANKS)


@pytest.mark.parametrize(
    ("blocks", "entries"),
    [
        ([BlockRun(PARTS, COLUMNS, RANKS, rank=0)], [{"ranks": [0, 39], "rows": {"parts": [0, 39]}}]),
        (
            [Block(part, COLUMNS, rank=rank) for rank, part in enumerate(PARTS)],
            [{"ranks": [0, 39], "rows": {"parts": [0, 39]}}],
        ),
        (
            [Block(PARTS[i], COLUMNS, rank=(i + 3) % RANKS) for i in range(RANKS)],
            [
                {"ranks": [3, 39], "rows": {"parts": [0, 36]}},
                {"ranks": [0, 2], "rows": {"parts": [37, 39]}},
            ],
        ),
        (
            [
                BlockRun(EIGHTIETHS, COLUMNS, 40, 0, is_copied=True, rank=0, dataflow=Replicate()),
                BlockRun(EIGHTIETHS, COLUMNS, 39, 1, rank=1),
                BlockRun(EIGHTIETHS, COLUMNS, 40, 40, rank=0),
            ],
            [
                {"ranks": [0, 39], "rows": [0, 2], "dataflow": {"name": "replicate"}},
                {"ranks": [1, 39], "rows": {"parts": [1, 39]}},
                {"ranks": [0, 39], "rows": {"parts": [40, 79]}},
            ],
        ),
    ],
    ids=["run", "blocks", "turned", "copies and parts"],
)
def test_json_of_many_shards_on_neighbouring_ranks_is_one_entry_each(blocks, entries):
    with use_host(make_host(sharding_types=[Spread])):
        plan = spread_over(blocks)
        text = plan.to_json()
        assert json.loads(text)["modules"]["m"]["t"]["shards"] == [
            {**own, "columns": [0, 8]} for own in entries
        ]
        again = ShardingPlan.from_json(text)
        assert again.plan["m"]["t"].layout.blocks == plan.plan["m"]["t"].layout.blocks or len(entries) == 3
        assert again.to_json() == text
        assert again.plan["m"]["t"].digest() == plan.plan["m"]["t"].digest()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"ranks": [0, 40]}, "shard 0: ranks 0 to 40 are not among the 40 ranks"),
        ({"ranks": [0, 38]}, "shard 0: parts 0 to 39 of the 40 of the row_map are to be 39, one for each"),
        ({"rows": {"parts": [1, 40]}}, "shard 0: parts 1 to 40 of the 40 of the row_map"),
        ({"rows": {"parts": [0]}}, r"shard 0: rows\.parts must have 2 items"),
        ({"rows": {"part": 0, "num_rows": 3}}, "covered|copies|row part"),
        ({"columns": [0, 4]}, "blocks reach column 4 of 8"),
    ],
)
def test_from_json_refuses_runs_of_shards_that_cannot_be(change, text):
    with use_host(make_host(sharding_types=[Spread])):
        document = json.loads(spread_over([BlockRun(PARTS, COLUMNS, RANKS, rank=0)]).to_json())
        document["modules"]["m"]["t"]["shards"][0].update(change)
        with pytest.raises(PlanError, match=text):
            ShardingPlan.from_json(json.dumps(document))


def test_numbers_of_numpy_are_written_as_numbers() -> None:
    spec = sw.OptimizerSpec("adam", np.float32(0.5), {"eps": np.float32(0.25)})
    topology = sw.Topology(2, "cpu", memory_bytes={"ddr": np.int64(1 << 34)})
    plan = sw.EmbeddingShardingPlanner(topology).plan_tables(
        [sw.TableSpec("t", 10, 8, ["f"], optimizer=spec)]
    )
    assert sw.ShardingPlan.from_json(plan.to_json()) == plan
    assert json.loads(plan.to_json())["topology"]["memory_bytes"]["ddr"] == 1 << 34


@pytest.mark.parametrize("value", [object(), float("nan")])
def test_what_is_no_json_data_is_told(value: Any) -> None:
    with pytest.raises(sw.ShardwrightError, match=r"a plan document holds JSON data, not"):
        plain_json({"a": [value]})
