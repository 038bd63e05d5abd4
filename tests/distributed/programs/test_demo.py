"""`shardwright demo` in real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
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


def test_demo_best_auc_is_that_of_the_true_probabilities(alone: DemoResult) -> None:
    held_out = list(Clicks(SMALL.seed, SMALL.batch_size).held_out_batches(SMALL.num_held_out, 0, 1))
    labels, logits = (
        np.concatenate([getattr(part, name) for part in held_out]) for name in ("labels", "true_logits")
    )
    assert alone.best_auc == pytest.approx(roc_auc_score(labels, logits), abs=1e-6)


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


def test_demo_resumes_with_the_batches_that_it_was_saved_with(pool: RankPool, tmp_path: Path) -> None:
    first = attrs.evolve(SMALL, steps=5, checkpoint=tmp_path, checkpoint_every=5)
    on_pool(pool, first)
    with pytest.raises(RankError, match="was trained on other batches"):
        on_pool(pool, attrs.evolve(first, steps=15, batch_size=256, resume=True))
