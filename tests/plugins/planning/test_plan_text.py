"""What a person sees of copies, codecs and long lists of ranks: printed plans, reports and pages."""

from __future__ import annotations

import pytest

import shardwright as sw
from shardwright.planning.plan.sharding import ranks_text

TABLES = [sw.TableSpec(name, 100, 8, [name]) for name in ("copied", "cut", "whole", "hot")]
RULES = {
    "copied": sw.ParameterConstraints(sharding_types=["data_parallel"]),
    "cut": sw.ParameterConstraints(
        sharding_types=["row_wise"], qcomms_config=sw.QCommsConfig("fp16", "int8")
    ),
    "*": sw.ParameterConstraints(sharding_types=["table_wise"]),
}


@pytest.fixture(scope="module")
def planner() -> sw.EmbeddingShardingPlanner:
    return sw.EmbeddingShardingPlanner(sw.Topology(4, "cpu"), constraints=RULES)


@pytest.fixture(scope="module")
def plan(planner: sw.EmbeddingShardingPlanner) -> sw.ShardingPlan:
    return planner.plan_tables(TABLES)


def rows(text: str, table: str) -> list[list[str]]:
    """The cells of the lines of a table."""
    lines = [[cell.strip() for cell in line.split("|")] for line in text.splitlines()]
    return [cells for cells in lines if cells[0] == table]


def test_printed_plan_shows_copies_and_codecs(plan: sw.ShardingPlan) -> None:
    text = str(plan)
    kind, shard = rows(text, "copied")
    assert kind[1:2] + kind[3:] == ["data_parallel", "0-3", "-"]
    assert shard[1:] == ["[0, 0]", "[100, 8]", "rank:0-3/cpu, a copy on each"]
    kind, *shards = rows(text, "cut")
    assert kind[3:] == ["0-3", "fp16 / int8"]
    assert [shard[3] for shard in shards] == [f"rank:{rank}/cpu" for rank in range(4)]
    assert "codecs of results / gradients" in text
    assert str(sw.ShardingPlan.from_json(plan.to_json())) == text


@pytest.mark.parametrize("form", ["text", "page"])
def test_report_shows_copies_and_codecs(
    planner: sw.EmbeddingShardingPlanner, plan: object, form: str
) -> None:
    assert planner.report is not None
    text = str(planner.report) if form == "text" else planner.report.to_format("html")
    assert "0-3, a copy on each" in text
    assert "fp16 / int8" in text
    assert "codecs of results / gradients" in text


def test_ranks_text_has_each_run_of_neighbours_as_one() -> None:
    assert ranks_text(range(496, 504)) == "496-503"
    assert ranks_text([*range(496, 504), *range(8, 16), 3, 3, 4]) == "496-503,8-15,3,3-4"
    assert ranks_text([]) == ""


def test_plan_of_a_module_is_its_part_of_the_whole_text(plan: sw.ShardingPlan) -> None:
    (path,) = plan.plan
    assert str(plan).split("\n", 1)[1] == str(plan.plan[path])
    assert str(plan.plan[path]).startswith("  table ")
