from __future__ import annotations

import json
import logging

import numpy as np
import pytest
from tests.errors import refused
from tests.programs import printed_by

from shardwright import (
    Block,
    EmbeddingShardingPlanner,
    Estimator,
    InvalidInputError,
    Layout,
    NoPlanError,
    ParameterConstraints,
    PlanningError,
    RowsRange,
    ShardingType,
    TableSpec,
    Topology,
    UnknownPluginError,
)

TABLES = [
    TableSpec("a", 10, 8, ["f"]),
    TableSpec("b", 7, 4, ["g"], module="tower"),
    TableSpec("c", 3, 8, ["h"]),
]


def planner(*, ranks=2, cap=10_000, device="cpu", **arguments):
    return EmbeddingShardingPlanner(Topology(ranks, device, ddr_cap=cap), **arguments)


def test_plan_tables_document_says_what_went_in_and_from_where():
    document = planner(
        batch_size=64, constraints={"a": ParameterConstraints(pooling_factors=[3])}
    ).plan_tables(TABLES)
    inputs = json.loads(document.to_json())["inputs"]
    assert inputs["batch_size"] == {"value": 64, "provenance": "given"}
    assert inputs["storage_reservation"]["provenance"] == "assumed"
    assert inputs["ddr_cap"] == {"value": 10_000, "provenance": "given"}
    assert inputs["pooling_factors"]["source"].startswith("ids per bag of the 2 tables")
    assert inputs["cells.cells_per_ms"] == {
        "value": 1000,
        "provenance": "assumed",
        "source": "estimator cells",
    }
    assert inputs["constraints"]["value"] == {"a": {"pooling_factors": [3.0]}}


def test_planner_takes_numbers_of_numpy():
    numbers = {"batch_size": np.int64(64), "seconds": np.float32(5)}
    plan = EmbeddingShardingPlanner(Topology(np.int64(2), "cpu"), **numbers).plan_tables(
        [TableSpec("a", 100, 8)]
    )
    inputs = json.loads(plan.to_json())["inputs"]
    assert [inputs[name]["value"] for name in ("batch_size", "seconds_limit")] == [64, 5]


def test_plan_tables_batch_size_not_given_is_torchrecs_and_assumed():
    inputs = planner().plan_tables(TABLES).document["inputs"]
    assert (inputs["batch_size"]["value"], inputs["batch_size"]["provenance"]) == (512, "assumed")


def test_plan_tables_reservation_leaves_memory_free():
    # Each table alone needs 320 bytes at most; half of 660 is room for the largest only.
    assert planner(ranks=1, cap=660, storage_reservation=0.15).plan_tables(TABLES)
    with pytest.raises(
        NoPlanError, match=r"the 3 tables need at least 528 B of ddr together.*the 1 rank has 330 B"
    ):
        planner(ranks=1, cap=660, storage_reservation=0.5).plan_tables(TABLES)


def test_plan_tables_debug_logs_and_prints_the_report(capsys, caplog):
    with caplog.at_level(logging.INFO, logger="shardwright"):
        planner(debug=True).plan_tables(TABLES)
    assert "--- Sharding plan ---" in capsys.readouterr().out
    assert "--- Sharding plan ---" in caplog.text


def asked_of(key, **rule):
    return {"constraints": {key: ParameterConstraints(**rule)}}


@pytest.mark.parametrize(
    ("argument", "text"),
    [
        ({"estimator": "sells"}, r"no estimator 'sells'.*Did you mean 'cells'\?"),
        ({"proposer": ["each_alone", "each_alon"]}, r"no proposer 'each_alon'.*Did you mean 'each_alone'\?"),
        ({"partitioner": "frist_fit"}, r"no partitioner 'frist_fit'.*Did you mean 'first_fit'\?"),
        ({"storage_estimator": "wights"}, r"no estimator 'wights'.*Did you mean 'weights'\?"),
        ({"refinements": ["nearr"]}, "no refinement 'nearr'"),
        (
            asked_of("a*", sharding_types=["wohle"]),
            r"'a\*'.*no sharding type 'wohle'.*Did you mean 'whole'\?",
        ),
        (asked_of("b", compute_kernels=["plane"]), r"'b'.*no compute kernel 'plane'.*Did you mean 'plain'\?"),
        (asked_of("b", qcomms_config={"forward_precision": "f16"}), "'b'.*no codec 'f16'"),
    ],
)
def test_planner_of_an_unknown_name_is_not_made_and_says_the_nearest(argument, text):
    with pytest.raises(UnknownPluginError, match=text):
        planner(**argument)


def test_plan_tables_no_plugin_that_may_be_taken_unasked_raises(host_with):
    with host_with(proposers=[]), pytest.raises(UnknownPluginError, match="no proposer is loaded"):
        planner()


@pytest.mark.parametrize(
    ("column", "text"),
    [
        (
            lambda n: np.zeros(n + 1),
            r"broke its contract: 'forward' must be one number for .* a ndarray of float64 \[",
        ),
        (lambda n: np.full(n, -1.0), "returned -1.0 as 'forward'"),
        (lambda n: np.full(n, np.nan), "returned nan as 'forward'"),
        (lambda n: np.full(n, np.inf), "returned inf as 'forward'"),
        (lambda n: np.full(n, 1e308), r"returned 1e\+308 as 'forward'"),
    ],
)
def test_plan_tables_estimator_that_breaks_the_contract_raises(column, text):
    class Wrong(Estimator):
        name = "wrong"

        def estimate(self, options, topology):
            return {"forward": column(options.num_shards)}

    with pytest.raises(PlanningError, match=f"estimator 'wrong' {text}"):
        planner(estimator=Wrong()).plan_tables(TABLES)


def test_plan_tables_storage_estimate_that_no_table_has_raises():
    class Wrong(Estimator):
        name, measures = "wrong", "storage"

        def estimate(self, options, topology):
            return {"ddr": np.full(options.num_shards, 1e99)}

    with pytest.raises(PlanningError, match=r"estimator 'wrong' returned 1e\+99 as 'ddr'"):
        planner(storage_estimator=Wrong()).plan_tables(TABLES)


def test_no_plan_table_too_large_says_what_would_fit():
    rule = ParameterConstraints(sharding_types=["whole"], compute_kernels=["plain"])
    with pytest.raises(NoPlanError) as caught:
        planner(cap=[1000, 1200], constraints={"big": rule}, storage_reservation=0.25).plan_tables(
            [TableSpec("big", 100, 4, ["f"])]
        )
    text = str(caught.value)
    assert (
        "table 'big' (100 x 4 FP32) needs 1.6 KiB of ddr on one rank, as 'whole' with kernel 'plain'" in text
    )
    assert "the emptiest rank (1) has 900 B (of 1.2 KiB, the rest is reserved)" in text
    assert "'only_pairs' with kernel 'plain'" not in text  # one rank holds no two blocks
    assert "'slices'" not in text  # 800 B on rank 0, which has 750


def test_plan_tables_order_in_which_plugins_offer_changes_nothing(host_with):
    from tests.core.planning.conftest import OFFERED

    plan = planner().plan_tables(TABLES)
    with host_with(**{kind: items[::-1] for kind, items in OFFERED.items()}):
        assert planner().plan_tables(TABLES) == plan


def test_planning_imports_no_torch():
    source = """
import sys
from shardwright.planning.layouts.layout import Block, Layout
from shardwright.planning.layouts.row_maps import RowsRange
from shardwright.runtime.sharded.models.planner import EmbeddingShardingPlanner
from shardwright.planning.machines.topology import Topology
from shardwright.host import host
from shardwright.planning.plan import document
from shardwright_plugins.reports import no_plan
from shardwright.planning.report import report
assert "torch" not in sys.modules, "torch"
"""
    printed_by("-c", source)


def test_plan_tables_layout_that_leaves_rows_out_names_the_type(host_with):
    class Forgets(ShardingType):
        name, abbreviation = "forgets", "FO"
        offered = "always"

        def layouts(self, table, topology, constraints):
            rows = RowsRange(table.num_embeddings, parts=2)
            yield Layout([Block(rows[0], table.all_columns)])

    with (
        host_with(sharding_types=[Forgets]),
        pytest.raises(PlanningError, match=r"sharding type 'forgets' broke its contract: .*row part 1"),
    ):
        planner().plan_tables(TABLES)


REFUSED = [
    pytest.param(lambda: planner(batch_size=0), InvalidInputError, "batch_size", id="no samples"),
    pytest.param(
        lambda: planner(storage_reservation=1.0), InvalidInputError, "storage_reservation", id="no room"
    ),
    pytest.param(
        lambda: planner(storage_reservation=-0.1),
        InvalidInputError,
        "storage_reservation",
        id="too much room",
    ),
    pytest.param(
        lambda: planner().plan_tables(TABLES[0]),
        InvalidInputError,
        r"tables must be a list \(each: a TableSpec\), got TableSpec\(",
        id="one table",
    ),
    pytest.param(
        lambda: planner().plan_tables([TABLES[0], "b"]),
        InvalidInputError,
        r"tables\[1\] must be a TableSpec, got 'b'",
        id="a text among tables",
    ),
    pytest.param(
        lambda: EmbeddingShardingPlanner().plan_tables(TABLES),
        InvalidInputError,
        "no topology",
        id="plan tables without topology raises",
    ),
    pytest.param(
        lambda: planner().plan_tables([]),
        PlanningError,
        "no tables to plan",
        id="plan tables without tables raises",
    ),
    pytest.param(
        lambda: EmbeddingShardingPlanner(topology=4),
        InvalidInputError,
        "topology must be a Topology or None, got 4",
        id="planner topology of another type raises",
    ),
    pytest.param(
        lambda: planner().plan_tables([TABLES[0], TABLES[0]]),
        InvalidInputError,
        "two tables have the path 'a'",
        id="plan tables same path twice raises",
    ),
    pytest.param(
        lambda: planner(estimator="weights"),
        InvalidInputError,
        "measures storage, a performance estimator is needed: cells",
        id="plan tables estimator of the other kind raises",
    ),
    pytest.param(
        lambda: planner(cap=200).plan_tables([TableSpec("big", 100, 4, ["f"])]),
        NoPlanError,
        r"the emptiest rank \(0\) has 170 B.*More ranks or memory",
        id="no plan table too large without constraints says what would help",
    ),
]


test_wrong_call_is_an_error_that_says_what_is_wrong = refused(REFUSED)
