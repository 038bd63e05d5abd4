"""A stranger's sharding type, installed from the README, goes through all that a built-in one does.

Nothing of it is in this source tree, and this process never loads it: other processes do.
"""

from __future__ import annotations

import functools
import json
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests import readme, stranger
from tests.distributed import workers
from tests.distributed.programs import stranger_ranks
from tests.distributed.test_training import assert_same_state, unsharded_after

from shardwright_testing.ranks import RankPool

MOST_LINES = 44

# Two tables planned over three ranks; what is run after it prints a JSON value.
PLAN = """
import json, sys
import shardwright as sw

def plan(sharding_types=None, **topology):
    constraints = {"*": sw.ParameterConstraints(sharding_types=sharding_types)}
    topology = sw.Topology(world_size=3, compute_device="cpu", **topology)
    planner = sw.EmbeddingShardingPlanner(topology=topology, constraints=constraints, batch_size=4)
    tables = [sw.TableSpec(name, 1001, 16, [name]) for name in ("user_id", "item_id")]
    return planner, planner.plan_tables(tables)

def types_of(plan):
    return {name: sharding.sharding_type for name, sharding in plan.plan[""].items()}
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stranger.install(tmp_path_factory.mktemp("stranger"))


@pytest.fixture(scope="module")
def ranks(site: Path) -> Iterator[RankPool]:
    with RankPool(
        3, backend="gloo", initializer=functools.partial(stranger_ranks.find_plugins_in, str(site))
    ) as pool:
        yield pool


def run_source(site: Path | None, source: str, *arguments: str, **environment: str) -> Any:
    """The JSON value that ``source``, run after ``PLAN``, prints."""
    done = stranger.run_python("-c", PLAN + textwrap.dedent(source), *arguments, site=site, **environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_stranger_is_small() -> None:
    assert sum(len(readme.source(name).splitlines()) for name in stranger.FILES) <= MOST_LINES


def test_plugins_command_lists_the_stranger_with_distribution_and_version(site: Path) -> None:
    done = stranger.run_python("-m", "shardwright", "plugins", "--json", site=site)
    (row,) = [row for row in json.loads(done.stdout) if row["distribution"] == stranger.DISTRIBUTION]
    assert row == {
        "plugin": stranger.NAME,
        "kind": "sharding_types",
        "name": stranger.NAME,
        "distribution": stranger.DISTRIBUTION,
        "version": "1.0",
        "file": str(site / "acme_even_first.py"),
        "state": "loaded",
        "reason": "",
    }
    table = stranger.run_python("-m", "shardwright", "plugins", site=site, COLUMNS="100").stdout
    (line,) = [line for line in table.splitlines() if stranger.DISTRIBUTION in line]
    assert " ".join(line.split()) == "sharding_types even_first loaded even_first acme-even-first 1.0"


def test_planner_offers_the_stranger_to_nobody_who_does_not_name_it(site: Path) -> None:
    """The plan is that without it, installed or not."""
    source = "print(json.dumps([types_of(plan()[1]), plan()[0].report.result.num_proposals]))"
    assert run_source(site, source) == run_source(site, source, SHARDWRIGHT_PLUGINS="-even_first")


def test_planner_chooses_the_stranger_where_the_other_type_allowed_does_not_fit(site: Path) -> None:
    types = run_source(
        site,
        """
        roomy = plan(["table_wise"])[1]
        # Both tables have 64 kB of weights: no rank has room for one beside the 15 % that are kept free.
        tight = plan(["table_wise", "even_first"], ddr_cap=70_000)[1]
        print(json.dumps([types_of(roomy), types_of(tight)]))
        """,
    )
    assert types[0] == {"user_id": "table_wise", "item_id": "table_wise"}
    assert types[1] == {"user_id": "even_first", "item_id": "even_first"}


def test_planner_constrained_to_the_stranger_takes_it_and_reports_it(site: Path) -> None:
    found = run_source(
        site,
        """
        planner, made = plan(["even_first"])
        shardings = made.plan[""].values()
        ranks, rows = [s.ranks for s in shardings], [[b.num_rows for b in s.layout.blocks] for s in shardings]
        print(json.dumps([types_of(made), ranks, rows, str(planner.report), "torch" in sys.modules]))
        """,
    )
    types, ranks, rows, report, imported_torch = found
    assert set(types.values()) == {"even_first"}
    assert ranks == [[0, 2, 1]] * 2
    assert rows == [[336, 336, 329]] * 2  # 125 blocks of 8 rows and one of 1: 42, 42, 41 of 8 and that 1
    assert "EF: 2" in report
    assert "EF (even_first)" in report
    assert not imported_torch


def test_plan_document_of_the_stranger_survives_a_round_trip(site: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert run_source(
        site,
        """
        made = plan(["even_first"])[1]
        read = sw.ShardingPlan.from_json(made.to_json())
        open(sys.argv[1], "w").write(made.to_json())
        print(json.dumps(read == made and read.to_json() == made.to_json()))
        """,
        str(path),
    )
    document = json.loads(path.read_text())
    versions = {origin["distribution"]: origin["version"] for origin in document["plugins"]}
    assert versions["acme-even-first"] == "1.0"
    assert document["modules"][""]["user_id"]["row_map"] == {
        "name": "acme_dealt",
        "num_rows": 1001,
        "num_parts": 3,
        "block_rows": 8,
    }
    error = run_source(
        None,
        """
        try:
            sw.ShardingPlan.from_json(open(sys.argv[1]).read())
        except sw.PlanError as error:
            print(json.dumps(str(error)))
        """,
        str(path),
    )
    assert error.startswith("module '', table 'user_id': no sharding type 'even_first'. Known: ")
    assert "row_wise" in error


MIXED = ["even_first", "row_wise", "column_wise"]


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("types", "world_size"),
    [
        (["even_first"], 2),
        pytest.param(["even_first"], 3, marks=pytest.mark.slow),
        *(pytest.param(MIXED, size, marks=pytest.mark.slow) for size in (2, 3)),
    ],
)
def test_model_planned_with_the_stranger_trains_like_one_process(
    ranks: RankPool, types: list[str], world_size: int
) -> None:
    expected = unsharded_after(range(4), world_size)[0].state_dict()
    documents, states = zip(*ranks.run(stranger_ranks.plan_and_train, world_size, types, 4), strict=True)
    (document,) = set(documents)
    tables = json.loads(document)["modules"]["sparse.bags"]
    assert {table["sharding_type"] for table in tables.values()} == set(types)
    for state in states:
        assert_same_state(state, expected)


@pytest.mark.distributed
def test_stranger_on_one_rank_only_is_an_error_on_both_naming_it(ranks: RankPool) -> None:
    for text in ranks.run(workers.with_plugins_of_rank, 2, [None, "-even_first"]):
        assert text.startswith("PluginMismatchError")
        assert "acme-even-first 1.0" in text
        assert "rank 1" in text
