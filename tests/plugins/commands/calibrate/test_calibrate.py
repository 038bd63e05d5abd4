"""Calibration: constants that were known come back, and plans list nothing that was measured as assumed."""

from __future__ import annotations

import json
from pathlib import Path

import attrs
import numpy as np
import pytest
from tests.plugins.commands.every_command import WORKLOAD
from typer.testing import CliRunner

from shardwright.cli import app
from shardwright.errors import InvalidInputError
from shardwright_plugins.commands.calibrate import running
from shardwright_plugins.commands.calibrate.fitting import fit
from shardwright_plugins.commands.calibrate.kernels import CASES, KernelCase, KernelTimes
from shardwright_plugins.commands.calibrate.steps import StepCase
from shardwright_plugins.estimators.engine.machine import KERNEL, Machine, shipped_machine
from shardwright_plugins.estimators.engine.work import LOOKUP, UPDATE


@pytest.mark.parametrize("least", [{}, {"a": 1.5}, {"a": 2.0, "c": 0.001}])
def test_fit_recovers_constants(least: dict[str, float]) -> None:
    draw = np.random.default_rng(3)
    amounts = {name: draw.uniform(0, 10.0**power, 40) for power, name in enumerate("abc")}
    constants = {"a": 2.0, "b": 0.0, "c": 0.003}
    took = sum(amounts[name] * value for name, value in constants.items())
    found = fit("abc", amounts, took, least=least)
    assert found.constants == pytest.approx(constants, abs=1e-9)
    np.testing.assert_allclose(found.errors, 0, atol=1e-9)


def test_fit_never_gives_a_constant_below_its_bound() -> None:
    amounts = {"a": np.array([1.0, 2, 3]), "b": np.array([0.0, 1, 2])}
    found = fit("ab", amounts, np.array([3.0, 2, 1]), least={"b": 0.5}).constants
    assert found["a"] >= 0
    assert found["b"] >= 0.5


def test_fit_of_a_time_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidInputError):
        fit("a", {"a": np.ones(1)}, np.zeros(1))


def test_kernel_fit_finds_the_cache_and_the_times_of_a_made_up_kernel() -> None:
    count, cache = len(CASES), running.CACHES[2]
    blank = KernelTimes(
        CASES, np.ones(count), np.ones(count), np.array([4.0 * case.columns for case in CASES]),
        np.full(count, 4.0), updates_all=False,
    )  # fmt: skip
    constants = {name: 1e-6 * (number + 1) for number, name in enumerate(KERNEL)}
    amounts = blank.work(cache).amounts()
    lookup, update = (
        sum(amounts[name] * constants[name] for name in names) * blank.tables for names in (LOOKUP, UPDATE)
    )
    times = attrs.evolve(blank, lookup_ms=lookup, update_ms=update)
    found_cache, fits = running.fit_kernels({"made_up": times})
    assert found_cache == cache
    np.testing.assert_allclose(fits["made_up"].lookup.errors, 0, atol=1e-6)
    np.testing.assert_allclose(fits["made_up"].update.errors, 0, atol=1e-6)


def test_calibrate_writes_a_machine_that_plans_are_made_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardwright_plugins.commands.calibrate import kernels, steps

    monkeypatch.setattr(kernels, "CASES", (KernelCase(2, 50, 8, 16, 2), KernelCase(1, 80, 16, 8, 3)))
    monkeypatch.setattr(
        steps,
        "cases",
        lambda types: [StepCase(kind, 2, 60, 8, 4, 2) for kind in ("table_wise", "data_parallel")],
    )
    path, plan = tmp_path / "machine.json", tmp_path / "plan.json"
    workload = tmp_path / "workload.json"
    workload.write_text(json.dumps(WORKLOAD))
    run = CliRunner().invoke
    found = run(
        app, ["calibrate", "--output", str(path), "--kernel", "fused_torch,dense"], catch_exceptions=False
    )
    assert found.exit_code == 0
    machine = Machine.read(path)
    assert set(machine.kernels) == {"fused_torch", "dense"}
    assert machine.made["ranks"] == 2
    assert machine.unmeasured.keys() == {"inter_host_bw"}
    words = [
        "plan",
        str(workload),
        "--ranks",
        "2",
        "--device",
        "cpu",
        "--machine",
        str(path),
        "--output",
        str(plan),
    ]
    assert run(app, words, catch_exceptions=False).exit_code == 0
    inputs = json.loads(plan.read_text())["inputs"]
    assumed = {name for name, value in inputs.items() if value["provenance"] == "assumed"}
    assert not assumed & {*machine.topology, "estimator"}
    assert not [name for name in assumed if name.startswith("engine.")]
    for name, value in machine.topology.items():
        assert inputs[name] == {"value": value, "provenance": "detected"}
    assert run(app, ["check", str(plan)], catch_exceptions=False).exit_code == 0


def test_calibrate_of_another_device_is_refused(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["calibrate", "--output", str(tmp_path / "m.json"), "--device", "cuda"])
    assert found.exit_code != 0
    assert not (tmp_path / "m.json").exists()


def test_shipped_machine_says_where_it_was_measured() -> None:
    assert {"processor", "date", "ranks", "torch"} <= shipped_machine().made.keys()
