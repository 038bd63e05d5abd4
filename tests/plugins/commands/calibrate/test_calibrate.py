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
from shardwright_plugins.commands.bench.truth.steps import Measured
from shardwright_plugins.commands.calibrate import running
from shardwright_plugins.commands.calibrate.fitting import fit
from shardwright_plugins.commands.calibrate.kernels import CASES, KernelCase, KernelTimes
from shardwright_plugins.commands.calibrate.steps import StepCase
from shardwright_plugins.estimators.engine.machine import KERNEL, Machine, shipped_machine
from shardwright_plugins.estimators.engine.step import ENGINE
from shardwright_plugins.estimators.engine.work import LOOKUP, OF_KERNELS, UPDATE


@pytest.mark.parametrize("beside", [None, 3.0])
def test_fit_recovers_constants(beside: float | None) -> None:
    draw = np.random.default_rng(3)
    amounts = {name: draw.uniform(0, 10.0**power, 40) for power, name in enumerate("abc")}
    constants = {"a": 2.0, "b": 0.0, "c": 0.003}
    took = sum(amounts[name] * value for name, value in constants.items())
    found = fit("abc", amounts, took, beside=None if beside is None else beside * took)
    assert found.constants == pytest.approx(constants, abs=1e-9)
    np.testing.assert_allclose(found.errors, 0, atol=1e-9)


def test_fit_counts_errors_beside_the_time_of_the_whole() -> None:
    # No constant gives both times. The first is a large part of a step and the second a small one.
    found = fit("a", {"a": np.ones(2)}, np.array([1.0, 2.0]), beside=np.array([1.0, 1000.0]))
    assert found.constants["a"] == pytest.approx(1, abs=1e-3)
    np.testing.assert_allclose(found.errors, [0, -0.001], atol=1e-3)


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
    any_call = 0.5
    times = attrs.evolve(blank, lookup_ms=lookup + any_call, update_ms=update + any_call)
    found_cache, fits = running.fit_kernels({"made_up": times})
    assert found_cache == cache
    np.testing.assert_allclose(fits["made_up"].lookup.errors, 0, atol=1e-6)
    np.testing.assert_allclose(fits["made_up"].update.errors, 0, atol=1e-6)


def test_phases_of_steps_give_back_the_constants_they_were_made_of() -> None:
    draw = np.random.default_rng(5)
    kinds = ("whole", "cut", "copy")
    constants = {name: draw.uniform(0.1, 1) for name in (*ENGINE, *KERNEL)}
    loads = [{name: draw.uniform(0, 10, 2) for name in constants} for _ in range(60)]
    for number, own in enumerate(loads):  # some have tables of one kind, or of two
        absent = [(), ("cut",), ("copy",), ("cut", "copy")][number % 4]
        own.update({f"{kind}_result": np.zeros(2) for kind in absent})
    factors, fixed = {"forward_compute": 1.5, "backward_compute": 0.5}, 4.0

    def phase_ms(own: dict, phase: str) -> float:
        """Of exchanges the mean over ranks, else the most of kernel and engine; a fixed time in both."""
        there = [kind for kind in kinds if own[f"{kind}_result"].any()]
        elements = sum(own[f"{kind}_result"].mean() for kind in kinds)
        moved = {"mixed_sent": {"whole", "cut"} <= set(there)}
        took = fixed
        for name in running.MEASURED[phase]:
            if name.startswith("mixed"):
                took += constants[name] * elements * moved.get(name, len(there) > 1)
            else:
                took += constants[name] * (own[name].max() if phase in factors else own[name].mean())
        kernel = sum(own[name] * constants[name] for name in OF_KERNELS.get(phase, ()))
        return float(took + factors.get(phase, 0) * np.max(kernel))

    runs = []
    for own in loads:
        phases = {phase: phase_ms(own, phase) for phase in running.MEASURED}
        runs.append(Measured(sum(phases.values()), phases, 0.0, 0.0))
    fits = running.fit_phases(loads, runs, {name: constants[name] for name in KERNEL})
    found = {name: value for own in fits.values() for name, value in own.constants.items()}
    for name in ENGINE:
        assert found[name] == pytest.approx(constants[name], rel=1e-6), name
    for phase, own in fits.items():
        assert own.constants["step"] == pytest.approx(fixed)
        assert own.constants.get(phase) == (pytest.approx(factors[phase]) if phase in factors else None)


def test_calibrate_writes_a_machine_that_plans_are_made_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardwright_plugins.commands.calibrate import kernels, steps

    monkeypatch.setattr(kernels, "CASES", (KernelCase(2, 50, 8, 16, 2), KernelCase(1, 80, 16, 8, 3)))
    monkeypatch.setattr(
        steps,
        "cases",
        lambda: [
            StepCase(kinds, 4, 2, 60, 8, 2) for kinds in (["table_wise"], ["table_wise", "data_parallel"])
        ],
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
    words = ["plan", str(workload), "--ranks", "2", "--machine", str(path), "--output", str(plan)]
    assert run(app, words, catch_exceptions=False).exit_code == 0
    document = json.loads(plan.read_text())
    assert document["topology"]["compute_device"] == "cpu"  # of which the machine's document is
    inputs = document["inputs"]
    assumed = {name for name, value in inputs.items() if value["provenance"] == "assumed"}
    assert not assumed & {*machine.topology, "estimator"}
    # Of the engine's constants nothing is assumed but what other kernels take, which were not measured.
    assert not [name for name in assumed - {"engine.kernels"} if name.startswith("engine.")]
    others = inputs["engine.kernels"]["value"]
    assert "fused" in others
    assert not others.keys() & machine.kernels.keys()
    for name, value in machine.topology.items():
        assert inputs[name] == {"value": value, "provenance": "detected"}
    assert run(app, ["check", str(plan)], catch_exceptions=False).exit_code == 0


def test_calibrate_of_another_device_is_refused(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["calibrate", "--output", str(tmp_path / "m.json"), "--device", "cuda"])
    assert found.exit_code != 0
    assert not (tmp_path / "m.json").exists()


def test_shipped_machine_says_where_it_was_measured() -> None:
    assert {"processor", "date", "ranks", "torch"} <= shipped_machine().made.keys()
