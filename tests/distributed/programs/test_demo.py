"""`shardwright demo` in real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import attrs
import numpy as np
import pytest
import torch
from sklearn.metrics import roc_auc_score

from shardwright import ShardingPlan
from shardwright_plugins.commands.demo.examples import Clicks
from shardwright_plugins.commands.demo.rank import DemoResult, train_and_evaluate
from shardwright_plugins.commands.demo.settings import DemoSettings
from shardwright_testing.ranks import RankError, RankPool

pytestmark = pytest.mark.distributed
slow = pytest.mark.slow

CPU = torch.device("cpu")
KEYS = {"auc", "best_auc", "steps", "examples", "examples_per_second", "ranks", "plan", "held_out_examples"}
# Held-out examples that do not divide: on 2 and 3 ranks, the last batch leaves ranks without any.
SMALL = DemoSettings(ranks=1, steps=15, batch_size=512, num_held_out=8 * 512 + 1)
TIMEOUT_S = 300


@contextmanager
def demo(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """`shardwright demo`, and no process of it left behind."""
    command = [sys.executable, "-m", "shardwright", "demo", *arguments]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=TIMEOUT_S)


def finished(*arguments: str) -> tuple[int, str, str]:
    """Exit code, output and errors of `shardwright demo`."""
    with demo(*arguments) as process:
        output, errors = process.communicate(timeout=TIMEOUT_S)
        return process.returncode, output, errors


def on_pool(pool: RankPool, settings: DemoSettings) -> DemoResult:
    """What the demo comes to, on ranks that are there already."""
    result, *others = pool.run(train_and_evaluate, settings.ranks, settings, CPU)
    assert others == [None] * (settings.ranks - 1)
    assert isinstance(result, DemoResult)
    return result


@pytest.fixture(scope="module")
def alone(pool: RankPool) -> DemoResult:
    return on_pool(pool, SMALL)


def same_but_for_time(result: DemoResult) -> DemoResult:
    plan = {**result.plan, "inputs": {**result.plan["inputs"], "seconds": 0.0}}
    return attrs.evolve(result, examples_per_second=0.0, plan=plan)


@pytest.mark.slow
def test_demo_two_runs_with_one_seed_give_the_same(pool: RankPool) -> None:
    settings = attrs.evolve(SMALL, ranks=2)
    first, second = on_pool(pool, settings), on_pool(pool, settings)
    assert same_but_for_time(first) == same_but_for_time(second)


@slow
def test_demo_another_seed_gives_another_auc(pool: RankPool, alone: DemoResult) -> None:
    assert on_pool(pool, attrs.evolve(SMALL, seed=1)).auc != alone.auc


@pytest.mark.parametrize(
    ("ranks", "batch_size"),
    [(2, 511), *(pytest.param(*others, marks=slow) for others in ((2, 512), (3, 511), (3, 512)))],
)
def test_demo_number_of_ranks_does_not_matter(pool: RankPool, ranks: int, batch_size: int) -> None:
    alone = on_pool(pool, attrs.evolve(SMALL, batch_size=batch_size))
    shared = on_pool(pool, attrs.evolve(SMALL, batch_size=batch_size, ranks=ranks))
    assert shared.ranks == ranks
    assert shared.examples == alone.examples == SMALL.steps * batch_size
    assert shared.held_out_examples == alone.held_out_examples == SMALL.num_held_out
    assert shared.best_auc == alone.best_auc
    assert shared.auc == pytest.approx(alone.auc, abs=0.002)


@pytest.mark.parametrize(
    "types",
    [("column_wise", "row_wise"), *(pytest.param((one,), marks=slow) for one in ("row_wise", "table_wise"))],
    ids="+".join,
)
def test_demo_types_do_not_matter(pool: RankPool, alone: DemoResult, types: tuple[str, ...]) -> None:
    result = on_pool(pool, attrs.evolve(SMALL, ranks=2, types=types))
    assert {table["sharding_type"] for table in tables_of(result)} <= set(types)
    assert result.auc == pytest.approx(alone.auc, abs=0.002)


def tables_of(result: DemoResult) -> list[dict[str, str]]:
    (tables,) = result.plan["modules"].values()
    return list(tables.values())


def test_demo_best_auc_is_that_of_the_true_probabilities(alone: DemoResult) -> None:
    held_out = list(Clicks(SMALL.seed, SMALL.batch_size).held_out_batches(SMALL.num_held_out, 0, 1))
    labels, logits = (
        np.concatenate([getattr(part, name) for part in held_out]) for name in ("labels", "true_logits")
    )
    assert alone.best_auc == pytest.approx(roc_auc_score(labels, logits), abs=1e-6)


@slow
def test_demo_more_steps_bring_the_auc_nearer_to_the_best(pool: RankPool, alone: DemoResult) -> None:
    longer = on_pool(pool, attrs.evolve(SMALL, ranks=2, steps=100))
    assert 0.5 < alone.auc < longer.auc < longer.best_auc
    assert longer.auc > 0.9 * longer.best_auc


@pytest.mark.slow
def test_demo_prints_and_writes_the_result(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    types = "table_wise,row_wise"
    arguments = ["--steps", "12", "--batch-size", "1024", "--types", types, "--json", str(path)]
    code, output, errors = finished(*arguments)
    assert code == 0, errors
    document = json.loads(path.read_text())
    assert set(document) == KEYS
    assert document["ranks"] == 2
    assert document["examples"] == 12 * 1024
    assert document["examples_per_second"] > 0
    plan = ShardingPlan.from_json(json.dumps(document["plan"]))
    assert {sharding.sharding_type for sharding in plan.plan["embeddings"].values()} <= set(types.split(","))
    assert output.startswith("ranks: 0 is process ")
    assert "HiGHS" not in output  # the solver's own notices
    assert str(plan) in output
    assert "training 12/12" in output
    assert f"{document['examples_per_second']:,.0f} examples/s" in output
    assert f"{document['auc']:.4f} over 65,536 held-out examples" in output
    assert f"{document['best_auc']:.4f} can be reached" in output


@slow
def test_demo_killed_rank_ends_the_job_and_is_named() -> None:
    with demo("--steps", "1000000") as process:
        assert process.stdout is not None
        # Each line comes within seconds; should none come, pytest's time-out ends this.
        line = next(line for line in process.stdout if line.startswith("ranks: "))
        pids = dict(re.findall(r"(\d+) is process (\d+)", line))
        next(line for line in process.stdout if line.startswith("training "))
        # Rank 0 suffers at once from the death of rank 1, and is looked at first: it must not be named.
        os.kill(int(pids["1"]), signal.SIGKILL)
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert f"error: rank 1 of 2 (process {pids['1']}) was killed by signal 9 (SIGKILL)" in errors
    for pid in pids.values():
        assert not Path(f"/proc/{pid}").exists()


@slow
def test_demo_interrupted_ends_all_ranks_quietly() -> None:
    with demo("--steps", "1000000") as process:
        assert process.stdout is not None
        line = next(line for line in process.stdout if line.startswith("ranks: "))
        next(line for line in process.stdout if line.startswith("training "))
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, errors = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert "interrupted: all ranks are ended" in errors
    assert "Traceback" not in errors
    for pid in re.findall(r"is process (\d+)", line):
        assert not Path(f"/proc/{pid}").exists()


@slow
def test_demo_default_settings_reach_the_best_auc(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    code, _, errors = finished("--json", str(path))
    assert code == 0, errors
    document = json.loads(path.read_text())
    assert document["auc"] >= 0.97 * document["best_auc"]


def test_demo_resumes_on_as_many_ranks_with_the_bits_of_a_run_that_was_not_stopped(
    pool: RankPool, alone: DemoResult, tmp_path: Path
) -> None:
    first = attrs.evolve(SMALL, steps=10, checkpoint=tmp_path, checkpoint_every=4)
    on_pool(pool, first)
    assert sorted(path.name for path in tmp_path.glob("step_*")) == ["step_0000000004", "step_0000000008"]
    resumed = on_pool(pool, attrs.evolve(first, steps=15, resume=True))
    assert same_but_for_time(resumed) == same_but_for_time(alone)


@pytest.mark.slow
def test_demo_resumes_on_more_ranks_within_the_noise(
    pool: RankPool, alone: DemoResult, tmp_path: Path
) -> None:
    first = attrs.evolve(SMALL, ranks=2, steps=10, checkpoint=tmp_path, checkpoint_every=5)
    on_pool(pool, first)
    resumed = on_pool(pool, attrs.evolve(first, ranks=3, steps=15, resume=True))
    assert resumed.steps == 15
    assert resumed.auc == pytest.approx(alone.auc, abs=2e-3)


def test_demo_resumes_with_the_batches_that_it_was_saved_with(pool: RankPool, tmp_path: Path) -> None:
    first = attrs.evolve(SMALL, steps=5, checkpoint=tmp_path, checkpoint_every=5)
    on_pool(pool, first)
    with pytest.raises(RankError, match="was trained on other batches"):
        on_pool(pool, attrs.evolve(first, steps=15, batch_size=256, resume=True))


@slow
def test_demo_goes_on_from_the_last_checkpoint_after_a_rank_was_killed(
    pool: RankPool, tmp_path: Path
) -> None:
    settings = DemoSettings(ranks=2, steps=240, batch_size=512)
    arguments = ["--steps", "240", "--batch-size", "512", "--checkpoint", str(tmp_path)]
    arguments += ["--checkpoint-every", "20", "--restarts", "1", "--json", str(tmp_path / "result.json")]
    with demo(*arguments) as process:
        assert process.stdout is not None
        victims = (re.search(r"1 is process (\d+)", line) for line in process.stdout)
        victim = next(found for found in victims if found)
        while not list(tmp_path.glob("step_*")):  # many steps before the training ends
            assert process.poll() is None, process.communicate(timeout=TIMEOUT_S)
            time.sleep(0.001)
        os.kill(int(victim[1]), signal.SIGKILL)
        output, errors = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, errors
    assert "resumed from" in output
    result = json.loads((tmp_path / "result.json").read_text())
    undisturbed = on_pool(pool, settings)
    assert (result["examples"], result["auc"]) == (undisturbed.examples, undisturbed.auc)
