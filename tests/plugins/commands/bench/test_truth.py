"""`bench truth`: measured plans, and figures of estimators that an independent computation gives too."""

from __future__ import annotations

import json
import platform
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr
from tests.plugins.reports.test_html_page import Page
from tests.programs import printed_by
from typer.testing import CliRunner

from shardwright import InvalidInputError, ShardingPlan, UnsupportedError, Workload
from shardwright.cli import app
from shardwright_plugins.commands.bench.truth import command, running
from shardwright_plugins.commands.bench.truth.figures import Judgement
from shardwright_plugins.commands.bench.truth.workloads import drawn_workload
from shardwright_plugins.estimators.engine.machine import shipped_machine
from shardwright_plugins.measuring import phases
from shardwright_plugins.reports.html.measured import measured_page

OPTIMIZER = {"name": "row_wise_adagrad", "learning_rate": 0.02, "eps": 1e-8}
WORKLOAD = {
    "name": "tiny",
    "batch_size_per_rank": 4,
    "tables": [
        {
            "name": f"t{i}",
            "num_embeddings": 30 + i,
            "embedding_dim": 8,
            "pooling_factor": 1.5,
            "optimizer": OPTIMIZER,
        }
        for i in range(4)
    ],
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    folder = tmp_path_factory.mktemp("truth")
    workload, output = folder / "tiny.json", folder / "truth.json"
    workload.write_text(json.dumps({name: own for name, own in WORKLOAD.items() if "batch" not in name}))
    words = ["bench", "truth", str(workload), "--plans", "4", "--steps", "2", "--finals", "3", "--batch", "4"]
    words += ["--output", str(output)]
    words += ["--estimator", "torchrec", "--estimator", "roofline", "--json"]
    found = CliRunner().invoke(app, words, catch_exceptions=False)
    assert found.exit_code == 0
    assert json.loads(found.stdout) == json.loads(output.read_text())
    return output, json.loads(output.read_text())


def test_truth_measures_different_plans_each_as_often_as_asked(run: tuple[Path, dict]) -> None:
    plans = run[1]["workloads"][0]["plans"]
    assert run[1]["workloads"][0]["workload"] == WORKLOAD
    assert len(plans) == 4
    assert len({ShardingPlan.from_json(entry["plan"]).to_json() for entry in plans}) == 4
    for entry in plans:
        times = [measured["step_ms"] for measured in entry["runs"]]
        assert len(times) == 2
        assert entry["step_ms"] == pytest.approx(min(times), abs=1e-3)
        assert sum(entry["tables"].values()) == 4


def test_truth_measures_the_phases_that_estimators_price(run: tuple[Path, dict]) -> None:
    for entry in run[1]["workloads"][0]["plans"]:
        for measured in entry["runs"]:
            found = measured["phases_ms"]
            assert set(found) >= set(entry["predicted"]["roofline"]["phases_ms"])
            # An exchange takes nothing where a rank was ahead, as on a busy machine.
            assert min(found.values()) >= 0
            assert min(measured["step_ms"], found["forward_compute"], found["backward_compute"]) > 0


def test_truth_judges_as_another_computation_does(run: tuple[Path, dict]) -> None:
    result = run[1]["workloads"][0]
    took = np.array([entry["step_ms"] for entry in result["plans"]])
    for name, judgement in result["estimators"].items():
        said = np.array([entry["predicted"][name]["step_ms"] for entry in result["plans"]])
        if len(set(said)) > 1:
            assert judgement["spearman"] == pytest.approx(spearmanr(said, took).statistic, abs=1e-3)
        assert judgement["median_error"] == pytest.approx(np.median(abs(said - took) / took), abs=1e-3)
        assert judgement["worst_error"] == pytest.approx(max(abs(said - took) / took), abs=1e-3)
        own = next(entry for entry in result["plans"] if name in entry["chosen_by"])
        assert judgement["own_ms"] == pytest.approx(own["step_ms"], abs=1e-3)
        finals = [[run["step_ms"] for run in entry["finals"]] for entry in result["plans"] if entry["finals"]]
        quickest = min(finals, key=statistics.median)
        beside = [run["step_ms"] / best for run, best in zip(own["finals"], quickest, strict=True)]
        assert judgement["slower"] == pytest.approx(statistics.median(beside) - 1, abs=1e-3)


def test_final_is_of_the_plans_that_were_chosen_and_of_the_quickest(run: tuple[Path, dict]) -> None:
    assert all(len(entry["finals"]) == 3 for entry in run[1]["workloads"][0]["plans"])  # three others at most
    chosen = [False, True, False, False, True, False, False]
    assert sorted(running.finalists([4, 9, 3, 2, 1, 5, 6], chosen)) == [0, 1, 2, 3, 4]


def test_truth_again_judges_others_by_the_same_measurements(run: tuple[Path, dict]) -> None:
    words = ["bench", "truth", "--again", str(run[0]), "--estimator", "roofline", "--json"]
    found = CliRunner().invoke(app, words, catch_exceptions=False)
    (again,), (first,) = json.loads(found.stdout)["workloads"], run[1]["workloads"]
    assert again["estimators"] == {"roofline": first["estimators"]["roofline"]}
    assert [entry["runs"] for entry in again["plans"]] == [entry["runs"] for entry in first["plans"]]


def test_truth_report_has_a_dot_a_plan_where_its_times_are(run: tuple[Path, dict], tmp_path: Path) -> None:
    path = tmp_path / "truth.html"
    words = [
        "bench",
        "truth",
        "--again",
        str(run[0]),
        "--estimator",
        "roofline",
        "--report",
        str(path),
        "--json",
    ]
    found = CliRunner().invoke(app, words, catch_exceptions=False)
    plans = json.loads(found.stdout)["workloads"][0]["plans"]
    times = np.array([(plan["step_ms"], plan["predicted"]["roofline"]["step_ms"]) for plan in plans])
    text = path.read_text()
    page = Page(text)
    drawn = [
        [float(number) for number in attributes["d"][1:-2].split()]
        for tag, attributes in page.tags
        if tag == "path"
    ]
    places = np.array(drawn) * [1, -1] + [0, 100]
    np.testing.assert_allclose(places / places.max(), times / times.max(), atol=0.001)
    (notes,) = page.notes.values()
    assert [note.partition(":")[0] for note in notes] == [plan["label"] for plan in plans]
    assert "<script" not in text
    assert "http" not in text.replace("http-equiv", "")


def phases_of(ranks: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> tuple[np.ndarray, Any]:
    """Phases of steps of ranks: calls of the module, its outputs, backward pass; lookup, update ahead, update."""
    monkeypatch.setattr(phases.dist, "get_world_size", lambda: len(ranks))
    monkeypatch.setattr(
        phases.dist,
        "all_gather",
        lambda into, _: [mine.copy_(torch.from_numpy(own)) for mine, own in zip(into, ranks, strict=True)],
    )
    return phases.phases_of(ranks[0])


def test_phases_of_ranks_in_step_are_the_step_and_each_is_its_own_part(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts = np.random.default_rng(0).uniform(0.1, 1, (5, 20))
    routed, looked_up, home, sent, updated = parts
    one = np.stack([routed + looked_up, home, sent + updated, looked_up, 0 * updated, updated], axis=-1)
    step, found = phases_of(np.stack([one, one]), monkeypatch)
    np.testing.assert_allclose(step, parts.sum(0))
    names = (
        *("input_communication", "forward_compute", "forward_communication"),
        *("backward_communication", "backward_compute"),
    )
    np.testing.assert_allclose([found[name] for name in names], parts)


def test_phases_of_a_rank_that_is_far_ahead_are_none_below_0(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first rank updates for 8 s while the second one waits for its outputs, 9 s after the start.
    ranks = np.array([[[1.0, 0.5, 8.5, 1.0, 0.0, 8.0]], [[1.0, 8.0, 1.5, 1.0, 0.0, 0.5]]])
    step, found = phases_of(ranks, monkeypatch)
    assert step.tolist() == [10.5]
    assert found["backward_communication"].tolist() == [0.0]
    assert found["backward_compute"].tolist() == [8.0]


def test_judgement_leaves_out_plans_that_the_estimator_cannot_price() -> None:
    found = Judgement.of(np.array([1.0, np.nan, 3.0]), np.array([2.0, 1.0, 6.0]), own=2)
    assert found.spearman == pytest.approx(1)
    assert found.ratio == 2
    assert found.slower == 5  # beside the best of all that were measured
    assert found.slower_noise is None


def test_plan_that_was_lucky_once_is_not_the_best() -> None:
    measured = np.array([5.0, 4.0, 9.0])
    finals = {0: np.array([5.0, 6.0, 5.5]), 1: np.array([5.5, 6.3, 6.05])}
    own, lucky = (Judgement.of(measured, measured, number, finals) for number in (0, 1))
    assert (own.slower, own.slower_noise) == (0, 0)
    assert lucky.slower == pytest.approx(0.1)
    assert lucky.slower_noise == pytest.approx(0.025)
    assert Judgement.of(measured, measured, 2, finals).slower == 1.25  # was in no final


def test_predictions_that_do_not_vary_have_no_correlation_and_are_read_again(
    run: tuple[Path, dict], tmp_path: Path
) -> None:
    judged = Judgement.of(np.ones(2), np.array([2.0, 1.0]), own=None).to_data()
    assert judged["spearman"] is None
    data, path = json.loads(run[0].read_text()), tmp_path / "truth.json"
    data["workloads"][0]["estimators"] = {"roofline": judged}
    path.write_text(json.dumps(data, allow_nan=False))
    assert running.read(path)["workloads"][0]["estimators"] == {"roofline": judged}
    assert next(command.judgements(data["workloads"][0]).columns[1].cells) == "-"
    assert "rank correlation none" in measured_page(data)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ([], "workload 'nameless' has no batch_size_per_rank"),
        (
            ["--again", "truth.json", "--batch", "8", "--finals", "2", "--json"],
            "--again judges what truth.json has and measures nothing: leave it out, or --batch, --finals, a workload$",
        ),
    ],
)
def test_truth_refuses_what_it_cannot_measure(options: list[str], said: str, tmp_path: Path) -> None:
    workload = tmp_path / "nameless.json"
    workload.write_text(json.dumps({"tables": WORKLOAD["tables"]}))
    with pytest.raises(InvalidInputError, match=said):
        CliRunner().invoke(app, ["bench", "truth", str(workload), *options], catch_exceptions=False)


@pytest.mark.parametrize("settings", [None, [], {"ranks": 2}])
def test_file_of_an_earlier_run_without_settings_is_refused_by_name(
    settings: Any, run: tuple[Path, dict], tmp_path: Path
) -> None:
    path = tmp_path / "truth.json"
    path.write_text(json.dumps({**run[1], "settings": settings}))
    with pytest.raises(InvalidInputError, match=r"truth\.json' does not say in 'settings'"):
        CliRunner().invoke(app, ["bench", "truth", "--again", str(path)], catch_exceptions=False)


def test_truth_again_prints_all_headings_and_the_processor_that_was_measured(
    run: tuple[Path, dict], tmp_path: Path
) -> None:
    path, machine = tmp_path / "truth.json", tmp_path / "machine_of_a_long_name.json"
    path.write_text(json.dumps({**run[1], "processor": "Abacus 9"}))
    machine.write_text(shipped_machine().to_json())
    words = ["bench", "truth", "--again", str(path), "--estimator", f"engine:machine={machine}"]
    found = CliRunner().invoke(app, words, catch_exceptions=False, env={"COLUMNS": "100"})
    *_, last = found.stdout.splitlines()
    assert last == "Abacus 9, 2 ranks, steps of each run of a plan: 2"
    headings = "Spearman measured predicted machine median worst factor slower noise"
    assert set(headings.split()) <= set(found.stdout.split())
    assert max(map(len, found.stdout.splitlines())) <= 100


@pytest.mark.parametrize("seed", range(5))
def test_drawn_workload_is_one_and_the_same_each_time(seed: int) -> None:
    data = drawn_workload(seed)
    assert data == drawn_workload(seed)
    assert data != drawn_workload(seed + 1)
    tables = Workload.from_data(data).tables
    assert 14 <= len(tables) <= 22
    assert all(
        100 <= table.num_embeddings <= 1_000_000 and 8 <= table.embedding_dim <= 128 for table in tables
    )


def test_truth_of_tables_that_are_not_pooled_is_refused_before_others_are_measured() -> None:
    tables = [{**WORKLOAD["tables"][0], "pooling": "NONE"}]
    asked, measured = [WORKLOAD, {**WORKLOAD, "tables": tables}], []
    with pytest.raises(UnsupportedError):
        running.run(asked, running.TruthSettings(("torchrec",)), note=measured.append)
    assert measured == []


def test_truth_of_a_file_that_is_no_workload_names_the_file(tmp_path: Path) -> None:
    paths = [tmp_path / "good.json", tmp_path / "bad.json"]
    for path, data in zip(paths, (WORKLOAD, {"name": "a plan"}), strict=True):
        path.write_text(json.dumps(data))
    with pytest.raises(InvalidInputError, match=r"bad\.json: the workload has no 'tables'"):
        CliRunner().invoke(app, ["bench", "truth", *map(str, paths)], catch_exceptions=False)


_FAULTS = """
import resource
import numpy as np
from shardwright_plugins.measuring.phases import give_back_memory, keep_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        np.empty(40 << 20, dtype=np.uint8).fill(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

given_back = faults()
keep_memory()
faults()  # takes it once more
kept = faults()
give_back_memory()
print(given_back, kept, faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="mallopt is glibc's")
def test_memory_of_steps_is_kept_by_the_allocator_until_it_is_to_give_it_back() -> None:
    given_back, kept, taken_again = map(int, printed_by("-c", _FAULTS).split())
    assert kept < given_back / 100
    assert taken_again > given_back / 20


def test_each_round_of_runs_has_every_plan_in_another_order() -> None:
    order = np.reshape(running.order_of_runs(plans=12, rounds=3), (3, 12))
    assert (np.sort(order) == np.arange(12)).all()
    assert len({tuple(one) for one in order.tolist()} | {tuple(range(12))}) == 4
