"""`shardwright plan`, `check`, `explain`, `diff` and `bench plan` with the built-in plugins."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import sys
import time
import types
from pathlib import Path
from unittest import mock

import pytest
from tests import readme
from tests.programs import printed_by

import shardwright
from shardwright.cli import main
from shardwright.host import PluginHost, use_host
from shardwright.planning.plan.plan import ShardingPlan
from shardwright.planning.planner import TablePlanner
from shardwright.planning.search.placement import Placed
from shardwright_plugins.plan_differences.check import check_plan
from shardwright_plugins.proposers.proving.search import Search


def table(name, rows, dim, *pooling):
    sizes = {"name": name, "num_embeddings": rows, "embedding_dim": dim}
    if len(pooling) == 1:
        return {**sizes, "num_features": 1, "pooling_factor": pooling[0]}
    return {**sizes, "num_features": len(pooling), "pooling_factors": list(pooling)}


WORKLOAD = {
    "name": "little",
    "batch_size_per_rank": 64,
    "tables": [
        table("user", 200_000, 64, 3.0),
        table("item", 50_000, 128, 1.0, 20.0),
        *(table(f"t{i}", 1000 * (i + 1), 32, 1.0) for i in range(6)),
    ],
}
DOCUMENTS = Path(shardwright.__file__).parent / "docs" / "documents.md"
PLAN_PAGE = readme.CORE_DOCS / "howto/plan_from_a_file.md"
PLAN_ALL = ("--ranks", "2", "--hbm-gib", "40", "--quiet")
PLAN = ("--ranks", "4", "--local", "2", "--hbm-gib", "1", "--ddr-gib", "4")


@pytest.fixture
def workload(tmp_path):
    path = tmp_path / "little.json"
    path.write_text(json.dumps(WORKLOAD))
    return path


def run(*arguments, code=0):
    """Run the command line in this process: starting one takes longer than most of these commands."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["shardwright", *map(str, arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        main()
    done = types.SimpleNamespace(stdout=out.getvalue(), stderr=err.getvalue())
    assert (ended.value.code or 0) == code, done.stderr + done.stdout
    return done


@pytest.fixture
def planned(workload, tmp_path):
    """`planned(*options)`: plans the little workload and gives the document's file."""

    def plan(*options, name="plan.json"):
        path = tmp_path / name
        run("plan", workload, *PLAN, "--quiet", "--output", path, *options)
        return path

    return plan


def edit(path, change):
    document = json.loads(path.read_text())
    change(document)
    path.write_text(json.dumps(document))
    return path


def entry(document, table):
    return document["modules"][""][table]


def test_plan_each_option_reaches_the_planner(workload, tmp_path):
    path, constraints = tmp_path / "plan.json", tmp_path / "constraints.json"
    constraints.write_text(json.dumps({"user": {"min_partition": 16}}))
    options = {
        **{"--ranks": 4, "--local": 2, "--device": "cuda", "--hbm-gib": 1, "--ddr-gib": 4, "--batch": 32},
        **{"--reserve": 0.25, "--estimator": "torchrec", "--storage-estimator": "weights_and_buffers"},
        **{"--proposer": "uniform", "--partitioner": "memory_balanced", "--objective": "step_time"},
        **{"--seconds": 7, "--constraints": constraints, "--output": path},
    }
    run("plan", workload, *(word for option in options.items() for word in option))
    document = json.loads(path.read_text())
    topology, inputs = document["topology"], document["inputs"]
    assert (topology["world_size"], topology["local_world_size"]) == (4, 2)
    assert topology["memory_bytes"] == {"hbm": 1 << 30, "ddr": 4 << 30}
    assert document["objective"]["name"] == "step_time"
    asked = {"batch_size": 32, "storage_reservation": 0.25, "estimator": "torchrec", "seconds_limit": 7.0}
    asked["storage_estimator"] = "weights_and_buffers"
    assert {name: inputs[name] for name in asked} == {
        name: {"value": value, "provenance": "given"} for name, value in asked.items()
    }
    assert inputs["constraints"]["value"]["user"] == {"min_partition": 16, "pooling_factors": [3.0]}
    parts = {(plugin["kind"], plugin["name"]) for plugin in document["plugins"]}
    assert {("proposers", "uniform"), ("partitioners", "memory_balanced")} <= parts


@pytest.mark.parametrize("option", [("--sync-every", 20), ("--inter-host-averaging",)])
def test_plan_option_of_sharding_groups_without_a_group_is_refused(workload, option):
    done = run("plan", workload, "--ranks", 64, *option, code=1)
    assert "are of sharding groups: give --sharding-group RANKS too" in done.stderr


def test_plan_check_explain_and_diff_import_no_torch(workload, tmp_path):
    source = f"""
import contextlib, io, sys
from shardwright.cli import main
for words in (
    ["plan", {str(workload)!r}, *{PLAN!r}, "--output", "plan.json", "--report", "plan.html"],
    ["check", "plan.json"],
    ["explain", "plan.json", "--table", "user"],
    ["diff", "plan.json", "plan.json"],
):
    sys.argv = ["shardwright", *words]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main()
assert not {{"torch", "fbgemm_gpu"}} & set(sys.modules)
"""
    printed_by("-c", source, cwd=tmp_path)
    assert (tmp_path / "plan.html").exists()


@pytest.mark.parametrize(
    ("rules", "text"),
    [
        ({"usr": {}}, "constraints['usr'] is for no table of the model"),
        (
            {"user": {"sharding_type": ["row_wise"]}},
            "constraints['user'] has the key 'sharding_type', which is not read",
        ),
        ({"user": {"sharding_types": ["row_wize"]}}, "Did you mean 'row_wise'?"),
        ({"user": {"ranks": [7]}}, "ranks has 7; the topology has 4 ranks, 0 to 3"),
        (
            {"user": {"sharding_types": ["row_wise"], "ranks": [0], "compute_kernels": ["fused"]}},
            "'row_wise': has blocks on the ranks 1, 2, 3, which 'ranks' does not allow",
        ),
        (
            {"user": {"together": "x", "apart": "y"}, "item": {"together": "x", "apart": "y"}},
            "'item', 'user' are kept together on one rank, and apart",
        ),
    ],
)
def test_plan_constraints_that_cannot_be_kept_are_told_without_traceback(workload, tmp_path, rules, text):
    constraints = tmp_path / "constraints.json"
    constraints.write_text(json.dumps(rules))
    done = run("plan", workload, *PLAN, "--constraints", constraints, code=1)
    assert done.stderr.startswith("error: ")
    assert text in done.stderr
    assert "Traceback" not in done.stderr


def test_plan_of_a_missing_file_is_told(tmp_path):
    assert "No such file" in run("plan", tmp_path / "none.json", *PLAN, code=1).stderr


def interrupted_search(monkeypatch, num_plans):
    """The default search, to which somebody sends SIGINT after so many plans; it goes on until it is told to end."""
    plans = Search.plans

    def with_interrupt(self):
        count = 0
        for found in plans(self):
            count += isinstance(found, Placed)
            if count > num_plans:
                break
            yield found
        os.kill(os.getpid(), signal.SIGINT)
        while not self.watch.is_over:
            time.sleep(0.01)

    monkeypatch.setattr(Search, "plans", with_interrupt)


def test_plan_interrupted_writes_the_best_plan_so_far(workload, tmp_path, monkeypatch):
    interrupted_search(monkeypatch, 1)
    path = tmp_path / "plan.json"
    run("plan", workload, *PLAN, "--quiet", "--output", path)
    assert "everything fits" in run("check", path).stdout


def test_plan_interrupted_before_there_is_one_says_so_and_writes_nothing(workload, tmp_path, monkeypatch):
    interrupted_search(monkeypatch, 0)
    path = tmp_path / "plan.json"
    done = run("plan", workload, *PLAN, "--quiet", "--output", path, code=130)
    assert done.stderr == "interrupted before there was a plan: nothing is written\n"
    assert not path.exists()


@pytest.mark.parametrize("option", ["--output", "--report"])
@pytest.mark.parametrize(
    ("path", "told"),
    [("none/plan.json", "there is no folder"), ("", "it is a folder")],
    ids=["none", "folder"],
)
def test_plan_that_could_not_be_written_is_not_begun(workload, tmp_path, option, path, told):
    done = run("plan", workload, *PLAN, option, tmp_path / path, code=1)
    assert done.stdout == ""
    assert told in done.stderr


@pytest.mark.parametrize("size", ["inf", "1e30"])
def test_plan_memory_that_no_rank_has_is_told(workload, size):
    done = run("plan", workload, "--ranks", "4", "--hbm-gib", size, code=1)
    assert f"--hbm-gib is the memory of one rank in GiB, 1048576 at most; got {float(size)}" in done.stderr


@pytest.mark.parametrize(("rows", "dim"), [(1 << 62, 64), (10, 1 << 40)], ids=["rows", "columns"])
def test_plan_of_a_table_larger_than_numbers_are_says_that_there_is_none(tmp_path, rows, dim):
    path = tmp_path / "large.json"
    path.write_text(json.dumps({"tables": [table("large", rows, dim, 1.0)]}))
    assert "no plan: table 'large'" in run("plan", path, *PLAN, code=1).stderr


@pytest.mark.parametrize(("rule", "leaves_out"), [({"apart": "x"}, True), ({"ranks": [0, 1]}, False)])
def test_plan_under_rules_on_ranks_says_if_the_bound_leaves_them_out(workload, tmp_path, rule, leaves_out):
    constraints = tmp_path / "constraints.json"
    constraints.write_text(json.dumps({"user": rule, "item": rule}))
    told = run("plan", workload, *PLAN, "--quiet", "--constraints", constraints).stdout
    assert ("the proof leaves out the rules on ranks" in told) == leaves_out


def test_plan_report_as_html_json_and_text(workload, tmp_path):
    for suffix in ("html", "json", "txt"):
        run("plan", workload, *PLAN, "--report", tmp_path / f"report.{suffix}")
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    data = json.loads((tmp_path / "report.json").read_text())
    assert [rank["rank"] for rank in data["ranks"]] == [0, 1, 2, 3]
    assert max(rank["time_ms"] for rank in data["ranks"]) == pytest.approx(data["objective"]["value_ms"])
    assert "--- Sharding plan ---" in (tmp_path / "report.txt").read_text()


def test_plan_report_in_a_format_that_is_not_there_ends_before_planning(workload, tmp_path, monkeypatch):
    monkeypatch.setattr(TablePlanner, "plan_tables", lambda *_: pytest.fail("it plans"))
    with use_host(PluginHost(environment={"SHARDWRIGHT_PLUGINS": "-builtin_reports"})):
        told = run("plan", workload, *PLAN, "--report", tmp_path / "plan.html", code=1).stderr
    assert "no report 'html'. Known: json, txt." in told
    assert "Not loaded: 'builtin_reports' from shardwright" in told


def test_plan_arguments_that_a_plugin_does_not_take_are_told(workload):
    done = run("plan", workload, *PLAN, "--estimator", "roofline:read=5e6", code=1)
    assert "estimator 'roofline' of plugin 'builtin_estimators' from shardwright" in done.stderr
    assert "cannot be made with read=5000000.0: got an unexpected keyword argument 'read'" in done.stderr


def raise_bound(document):
    for name in ("lower_bound_ms", "value_ms"):
        document["objective"][name] = document["objective"]["value_ms"] * 1.5
    document["objective"]["certificate"]["z_ms"] = document["objective"]["lower_bound_ms"]


def pile_up(document):
    document["inputs"]["hbm_cap"]["value"] = 1 << 20
    document["topology"]["memory_bytes"]["hbm"] = 1 << 20


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda d: d["objective"].update(value_ms=0.5),
            "the document says value_ms = 0.5; the shards' costs add up",
        ),
        (raise_bound, "is not proven: the solver proves"),
        (
            lambda d: d["objective"].update(certificate={}),
            "is not proven: the certificate is for z_ms = None",
        ),
        (pile_up, "problem: rank 0 holds"),
    ],
)
def test_check_of_a_document_that_claims_too_much_says_so(planned, change, text):
    done = run("check", edit(planned(), change), code=1)
    assert text in done.stdout


def test_explain_names_the_option_the_runner_up_and_what_ruled_others_out(planned):
    path = planned()
    chosen = entry(json.loads(path.read_text()), "user")
    told = run("explain", path, "--table", "user").stdout
    assert f"'user' (200_000 x 64 FP32): {chosen['sharding_type']} / {chosen['compute_kernel']}" in told
    assert "runner-up: " in told
    # Of the refused kernels, those that are preferred to the one taken; no table was refused what it asked for.
    reasons = {line.split("'")[1] for line in told.splitlines() if line.startswith("not an option")}
    number, names = re.search(r"(\d+) refused that nobody asked for: (.*)", told).groups()
    others = set(names.split(", "))
    assert "fused_numba" in reasons
    assert others >= {"dense", "mapped_caching"}
    assert int(number) == len(others)
    assert not reasons & others


def test_explain_unknown_table_is_told_with_the_nearest(planned):
    assert "Did you mean 'user'?" in run("explain", planned(), "--table", "usr", code=1).stderr


@pytest.fixture
def moved(planned, tmp_path):
    """A plan, and the same after its first table was moved to the rank of the second, by hand."""
    constraints = tmp_path / "constraints.json"
    constraints.write_text(json.dumps({"*": {"sharding_types": ["table_wise"]}}))
    first = planned("--constraints", constraints)
    second = tmp_path / "second.json"
    second.write_text(first.read_text())
    return first, edit(
        second, lambda d: d["modules"][""]["user"]["shards"][0].update(rank=rank_of(d, "item"))
    )


def rank_of(document, table):
    return entry(document, table)["shards"][0]["rank"]


def test_diff_counts_the_bytes_that_move(moved):
    left, taken = (rank_of(json.loads(path.read_text()), "user") for path in moved)
    assert left != taken
    told = run("diff", *moved).stdout
    assert "1 table differs, 7 do not; 48.8 MiB of weights move" in told  # 200_000 x 64 x 4 bytes
    assert (
        "a reshard sends 48.8 MiB (weights and optimizer states): 48.8 MiB inside hosts, 0 B between hosts"
        in told
    )
    assert f"most leaves rank {left}, 48.8 MiB; most comes to rank {taken}, 48.8 MiB" in told
    assert "by the topology's bandwidths that takes" in told
    found = json.loads(run("diff", *moved, "--json").stdout)
    assert found["reshard"]["bytes"]["intra_host"] == found["moved_weight_bytes"] == 200_000 * 64 * 4
    assert found["reshard"]["ms"] > 0


def test_plan_near_another_stays_there_if_moves_are_dear(planned, workload, tmp_path):
    constraints = tmp_path / "constraints.json"
    constraints.write_text(json.dumps({"*": {"sharding_types": ["table_wise"], "ranks": [0]}}))
    first = planned("--constraints", constraints)
    made = {}
    for cost in (0, 1e9):
        near = f"stay_near:plan={first},move_cost={cost}"
        made[cost] = planned("--proposer", "greedy", "--refinement", near, name=f"{cost}.json")
    modules = {cost: json.loads(path.read_text())["modules"] for cost, path in made.items()}
    assert modules[1e9] == json.loads(first.read_text())["modules"] != modules[0]
    origins = json.loads(made[0].read_text())["plugins"]
    assert {"kind": "extensions", "name": "refinement:stay_near"}.items() <= next(
        own.items() for own in origins if own["kind"] == "extensions"
    )
    wrong = run("plan", workload, *PLAN, "--refinement", "stay_near:plans=a.json", code=1).stderr
    assert "refinement 'stay_near' cannot be made with plans='a.json'" in wrong


def test_examples_of_the_page_about_documents_are_planned_and_checked(tmp_path):
    names = ("workload", "constraints", "plan")
    paths = {name: tmp_path / f"{name}.json" for name in (*names, "made")}
    for name in names:
        paths[name].write_text(readme.source(name, DOCUMENTS))
    run(
        "plan", paths["workload"], "--constraints", paths["constraints"], *PLAN_ALL, "--output", paths["made"]
    )
    assert "3 tables: each row and column is covered once" in run("check", paths["made"]).stdout
    assert "0 tables differ, 1 does not" in run("diff", paths["plan"], paths["plan"]).stdout


def test_diff_of_a_hand_edited_plan_tells_its_real_value(moved):
    stated = json.loads(moved[0].read_text())["objective"]["value_ms"]
    told = run("diff", *moved).stdout
    real = check_plan(ShardingPlan.from_json(moved[1].read_text())).value_ms
    assert real > 1.01 * stated
    assert f"value: {stated:.6g} ms before, {real:.6g} ms after" in told
    assert f"{moved[1]} says value_ms = {stated:.6g}; its shards' costs add up to {real:.6g} ms. " in told
    assert f"`shardwright check --rewrite {moved[1]}` writes that." in told
    assert "says value_ms" not in run("diff", moved[0], moved[0]).stdout


def test_check_rewrite_writes_what_a_hand_edited_plan_costs(moved):
    path = moved[1]
    before = path.read_text()
    assert "the shards' costs add up to" in run("check", path, code=1).stdout
    assert path.read_text() == before
    assert "rewritten: the document says value_ms" in run("check", "--rewrite", path).stdout
    assert "proven again" in run("check", path).stdout
    assert "nothing to rewrite" in run("check", "--rewrite", path).stdout
    assert "says value_ms" not in run("diff", *moved).stdout


def test_check_rewrite_of_a_plan_that_does_not_fit_writes_nothing(planned):
    path = edit(planned(), pile_up)
    before = path.read_text()
    assert "problem: rank 0 holds" in run("check", "--rewrite", path, code=1).stdout
    assert path.read_text() == before


def test_page_commands_of_planning_run_as_they_stand(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = readme.blocks(PLAN_PAGE)
    (tables,) = [block for block in blocks if block.name == "tables.json"]
    (commands,) = [block for block in blocks if block.language == "console"]
    (tmp_path / "tables.json").write_text(tables.text)
    told = [
        run(*line.removeprefix("$ shardwright ").split()).stdout
        for line in commands.text.strip().splitlines()
    ]
    assert len(told) == 4
    assert "proven again" in told[1]
    assert (tmp_path / "plan.html").exists()


def test_page_example_of_constraints_leaves_a_plan(tmp_path):
    (tmp_path / "tables.json").write_text(readme.source("tables.json", PLAN_PAGE))
    example = re.search(r"--constraints FILE.*?: `(\{.*?\})`\.", PLAN_PAGE.read_text(), re.DOTALL)
    (tmp_path / "constraints.json").write_text(example[1])
    plan = ["plan", tmp_path / "tables.json", "--ranks", 8, "--hbm-gib", 16]
    assert "fits" in run(*plan, "--constraints", tmp_path / "constraints.json").stdout
