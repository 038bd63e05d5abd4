from __future__ import annotations

import json
import logging

import numpy as np
import pytest
from tests.core.planning.conftest import Plain
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
    Proposer,
    RowsRange,
    ShardingType,
    TableSpec,
    Topology,
    UnknownPluginError,
)
from shardwright.host import host

TABLES = [
    TableSpec("a", 10, 8, ["f"]),
    TableSpec("b", 7, 4, ["g"], module="tower"),
    TableSpec("c", 3, 8, ["h"]),
]


def planner(*, ranks=2, cap=10_000, device="cpu", **arguments):
    return EmbeddingShardingPlanner(Topology(ranks, device, ddr_cap=cap), **arguments)


def test_plan_tables_groups_tables_by_module_in_their_order():
    plan = planner().plan_tables(TABLES)
    assert {path: list(tables) for path, tables in plan.plan.items()} == {"": ["a", "c"], "tower": ["b"]}


def test_plan_tables_constrained_type_and_kernel_are_taken_with_the_options_data():
    rule = ParameterConstraints(sharding_types=["slices"], compute_kernels=["thorough"])
    sharding = planner(constraints={"a": rule}).plan_tables(TABLES).plan[""]["a"]
    assert (sharding.sharding_type, sharding.compute_kernel, sharding.ranks) == ("slices", "thorough", [0, 1])
    assert sharding.layout.extras["made_by"] == "slices"
    assert sharding.layout.variant in {"range", "modulo"}


class Sized(Plain):
    """A kernel that keeps as many bytes more for each row as the table's extras ask for."""

    name, aliases = "sized", ()

    def supports(self, request):
        return "no such size" if request.extras.get("bytes_a_row") == 0 else True

    def memory_bytes(self, request, num_rows):
        return {"device": num_rows * (self.row_bytes(request) + request.extras.get("bytes_a_row", 0))}

    def extras(self, request):
        return {"kept": [request.extras.get("bytes_a_row"), request.extras.get("made_by")]}


@pytest.mark.parametrize(("name", "made_by"), [("whole", "user"), ("slices", "slices")])
def test_plan_tables_kernel_sees_extras_of_constraints_under_those_of_the_layout(host_with, name, made_by):
    rule = ParameterConstraints(sharding_types=[name], extras={"bytes_a_row": 900, "made_by": "user"})
    with host_with(compute_kernels=[Sized]):
        layout = planner(constraints={"a": rule}, cap=20_000).plan_tables(TABLES[:1]).plan[""]["a"].layout
        assert layout.extras["kept"] == [900, made_by]
        assert "bytes_a_row" not in layout.extras
        planner(cap=3_000).plan_tables(TABLES[:1])
        with pytest.raises(NoPlanError):  # for its memory
            planner(constraints={"a": rule}, cap=3_000).plan_tables(TABLES[:1])
        with pytest.raises(PlanningError, match="no such size"):
            planner(constraints={"a": ParameterConstraints(extras={"bytes_a_row": 0})}).plan_tables(
                TABLES[:1]
            )


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


def test_plan_tables_document_names_the_plugins_with_their_distribution():
    plugins = planner().plan_tables(TABLES).document["plugins"]
    assert {(p["kind"], p["name"]) for p in plugins} >= {
        ("estimators", "cells"),
        ("estimators", "weights"),
        ("partitioners", "first_fit"),
        ("proposers", "each_alone"),
        ("compute_kernels", "plain"),
    }
    assert all("version" in p and "distribution" in p for p in plugins)


def test_plan_tables_parts_by_name_and_as_objects_make_the_same_plan():
    create = {kind: getattr(host(), kind).create for kind in ("estimators", "proposers", "partitioners")}
    by_name = planner(
        estimator="cells", storage_estimator="weights", proposer="each_alone", partitioner="first_fit"
    )
    as_objects = planner(
        estimator=create["estimators"]("cells"),
        storage_estimator=create["estimators"]("weights"),
        proposer=[create["proposers"]("each_alone")],
        partitioner=create["partitioners"]("first_fit"),
    )
    assert by_name.plan_tables(TABLES) == as_objects.plan_tables(TABLES) == planner().plan_tables(TABLES)


def test_plan_tables_reservation_leaves_memory_free():
    # Each table alone needs 320 bytes at most; half of 660 is room for the largest only.
    assert planner(ranks=1, cap=660, storage_reservation=0.15).plan_tables(TABLES)
    with pytest.raises(
        NoPlanError, match=r"the 3 tables need at least 528 B of ddr together.*the 1 rank has 330 B"
    ):
        planner(ranks=1, cap=660, storage_reservation=0.5).plan_tables(TABLES)


def test_plan_tables_never_exceeds_what_may_be_used():
    made = planner(cap=400, storage_reservation=0.1)
    made.plan_tables(TABLES)
    assert (made.report.result.plan.used_bytes <= 360).all()


def test_plan_tables_silent_unless_debug(capsys, caplog):
    with caplog.at_level(logging.DEBUG):
        planner().plan_tables(TABLES)
    assert capsys.readouterr() == ("", "")
    assert not caplog.records


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


def test_no_plan_table_too_large_names_the_type_to_allow():
    rule = ParameterConstraints(sharding_types=["whole"])
    with pytest.raises(NoPlanError) as caught:
        planner(cap=1000, constraints={"big": rule}).plan_tables([TableSpec("big", 100, 4, ["f"])])
    assert (
        "'only_pairs' with kernel 'plain' (2 blocks) needs 800 B of ddr for its largest block: "
        "allow it in constraints['big']." in str(caught.value)
    )


def test_no_plan_nearest_proposal_is_told_where_nothing_is_proven():
    tables = [TableSpec(name, 10, 6, [name]) for name in "abc"]
    rule = ParameterConstraints(sharding_types=["whole"], compute_kernels=["plain"])
    with pytest.raises(NoPlanError) as caught:
        planner(cap=400, storage_reservation=0.0, constraints={"*": rule}).plan_tables(tables)
    text = str(caught.value)
    assert "no plan found" in text
    assert "a shard of table 'c' (10 x 6 FP32) needs 240 B; " not in text
    assert "needs 240 B of ddr; the emptiest rank (0) has 160 B left of 400 B" in text
    assert "'only_pairs' with kernel 'plain'" in text


def test_plan_tables_order_in_which_plugins_offer_changes_nothing(host_with):
    from tests.core.planning.conftest import OFFERED

    plan = planner().plan_tables(TABLES)
    with host_with(**{kind: items[::-1] for kind, items in OFFERED.items()}):
        assert planner().plan_tables(TABLES) == plan


def test_no_plan_without_a_plugin_that_says_why_names_what_is_not_loaded(host_with):
    with (
        host_with(extensions=[]),
        pytest.raises(NoPlanError, match=r"no plan found, and no plugin says why \('method:no_plan'\)"),
    ):
        planner(cap=10).plan_tables(TABLES)


def test_no_plan_proposer_without_proposals_is_told():
    class Silent(Proposer):
        name = "silent"

        def proposals(self, space):
            yield from ()

    with pytest.raises(NoPlanError, match="proposer 'silent' proposed nothing"):
        planner(proposer=Silent()).plan_tables(TABLES)


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
