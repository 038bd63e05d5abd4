"""Calibration: constants that were known come back, and plans list nothing that was measured as assumed."""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import torch
from tests.plugins.commands.every_command import WORKLOAD
from typer.testing import CliRunner

from shardwright import Topology
from shardwright.cli import app
from shardwright.errors import InvalidInputError, UnsupportedError
from shardwright_plugins.commands.calibrate import efforts, kernels, links, running, steps
from shardwright_plugins.commands.calibrate.fitting import fit
from shardwright_plugins.commands.calibrate.hosts import (
    host_classes,
    mean_times,
    speeds_of_ranks,
)
from shardwright_plugins.commands.calibrate.kernels import CASES, KernelCase, KernelTimes
from shardwright_plugins.commands.calibrate.ranks import Ranks
from shardwright_plugins.commands.calibrate.steps import StepCase
from shardwright_plugins.estimators.engine.machine import BASE, KERNEL, Machine, shipped_machine
from shardwright_plugins.estimators.engine.work import LOOKUP, UPDATE
from shardwright_plugins.measuring import steps as measuring
from shardwright_plugins.measuring import timing
from shardwright_plugins.measuring.processor import processor
from shardwright_plugins.measuring.steps import Measured


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


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ("model name : Intel(R) Xeon(R) 8375C\ncpu family : 6\n", "Intel(R) Xeon(R) 8375C"),
        (
            "cpu family\t: 26\nmodel\t\t: 2\nmodel name\t: AMD EPYC\n\nmodel : 3\n",
            "AMD EPYC (family 26, model 2)",
        ),
        ("BogoMIPS : 50.00\n", platform.processor() or platform.machine()),
    ],
)
def test_processor_has_its_family_where_its_name_has_no_number(
    told: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: told)
    assert processor.__wrapped__() == name


@pytest.mark.parametrize("effort", steps.OF_KERNELS_ALONE)
def test_fit_finds_the_effort_that_steps_were_made_with(effort: str) -> None:
    machine, topology = shipped_machine(), Topology(2, "cpu")
    plans = [steps.plan_of(case, topology, "fused_torch") for case in steps.effort_cases(effort)]
    assert len(plans) == 4
    true = efforts.with_effort(machine, "fused_torch", effort, 1.75)
    took = np.array([steps.step_ms_by(true, plan) for plan in plans])
    found = efforts.fit_effort(machine, "fused_torch", effort, plans, took)
    assert found.constants == {effort: pytest.approx(1.75)}
    np.testing.assert_allclose(found.errors, 0, atol=1e-9)
    # Rows of all data types have it.
    both = attrs.evolve(
        machine, kernels={**machine.kernels, "fused_torch FP16": machine.kernels["fused_torch"]}
    )
    runs = [Measured(ms, {}, 0.0, 0.0) for ms in took]
    made = efforts.with_efforts(both, {("fused_torch", effort): (plans, runs), ("fused", effort): ([], [])})
    of_kernels = {name: own[effort] for name, own in made.kernels.items() if "torch" in name}
    assert of_kernels == dict.fromkeys(("fused_torch", "fused_torch FP16"), pytest.approx(1.75, rel=1e-3))
    assert made.kernels["fused"] == machine.kernels["fused"]


def test_calibrate_writes_a_machine_that_plans_are_made_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "CASES", (KernelCase(2, 50, 8, 16, 2), KernelCase(1, 80, 16, 8, 3)))
    monkeypatch.setattr(
        steps,
        "cases",
        lambda: [
            StepCase(kinds, 4, 2, 60, 8, 2) for kinds in (["table_wise"], ["table_wise", "data_parallel"])
        ],
    )
    monkeypatch.setattr(
        steps, "effort_cases", lambda effort: [StepCase(["row_wise"], 4, 2, 60, 8, 2)][: effort == "cut"]
    )
    path, plan = tmp_path / "machine.json", tmp_path / "plan.json"
    workload = tmp_path / "workload.json"
    workload.write_text(json.dumps(WORKLOAD))
    run = CliRunner().invoke
    words = [
        "calibrate",
        "--output",
        str(path),
        "--kernel",
        "fused_torch,dense,fused_numba",
        "--precision",
        "fp16",
    ]
    found = run(app, words, catch_exceptions=False)
    assert found.exit_code == 0
    machine = Machine.read(path)
    assert set(machine.kernels) == {"fused_torch", "fused_torch FP16", "dense", "dense FP16", "fused_numba"}
    # Of kernels that the steps were not measured with, if they do such steps; of dense there are none here.
    known = {name: set(own) - set(KERNEL) for name, own in machine.kernels.items()}
    assert {name: own for name, own in known.items() if own} == {"fused_numba": {"cut"}}
    assert machine.fits["fused_numba cut"]["experiments"] == 1
    assert "1 experiment," in found.output
    assert machine.made["ranks"] == 2
    assert len(machine.made["reference_ms"]) == 3  # at the start, before steps and at the end
    unmeasured = {"kernel fused_numba FP16", "inter_host_bw", "hbm_to_ddr_mem_bw"}
    assert machine.unmeasured.keys() == unmeasured
    words = ["plan", str(workload), "--ranks", "2", "--machine", str(path), "--output", str(plan)]
    assert run(app, words, catch_exceptions=False).exit_code == 0
    document = json.loads(plan.read_text())
    assert document["topology"]["compute_device"] == "cpu"  # of which the machine's document is
    inputs = document["inputs"]
    assumed = {name for name, value in inputs.items() if value["provenance"] == "assumed"}
    assert not assumed & {*machine.topology, "estimator"}
    # Of the engine's constants nothing is assumed but what other kernels take, which were not measured, and, on a busy
    # machine, that its speed changed meanwhile.
    assert not [name for name in assumed - {"engine.kernels", "engine.machine"} if name.startswith("engine.")]
    others = inputs["engine.kernels"]["value"]
    assert "fused" in others
    assert not others.keys() & machine.kernels.keys()
    for name, value in machine.topology.items():
        source = f"measured on {machine.made['processor']}, {machine.made['date']}, with 2 ranks"
        assert inputs[name] == {"value": value, "provenance": "measured", "source": source}
    assert run(app, ["check", str(plan)], catch_exceptions=False).exit_code == 0


def test_hosts_of_one_processor_and_about_one_speed_are_one_class() -> None:
    def took(factor: float, processor: str) -> tuple[KernelTimes, str]:
        ms = factor * np.array([1.0, 5.0])
        return KernelTimes(CASES[:2], ms, 2 * ms, np.ones(2), np.ones(2), updates_all=False), processor

    of_hosts = [took(2.0, "a"), took(1.05, "a"), took(1.02, "b"), took(1.0, "a")]
    of_ranks = [own for own in of_hosts for _ in range(2)]
    times = {"made_up": [one for one, _ in of_ranks]}
    found = host_classes(times, [name for _, name in of_ranks], 2)
    assert [(own.processor, own.hosts, own.speed) for own in found] == [
        ("a", (3, 1), pytest.approx((1 + 1 / 1.05) / 2)),
        ("b", (2,), pytest.approx(1 / 1.02)),  # between the two
        ("a", (0,), 0.5),
    ]
    speeds = [1.0, 1.0, 1.952, 1.952, 1.961, 1.961, 1.952, 1.952]  # as parts of the slowest host's
    assert speeds_of_ranks(found, 2) == pytest.approx(speeds, abs=1e-3)
    assert speeds_of_ranks(found[-1:], 2) == []
    slowest = mean_times(times["made_up"], found[-1].hosts, 2)
    np.testing.assert_allclose(slowest.lookup_ms, [2.0, 10.0])


def test_travel_between_hosts_is_taken_from_exchanges_and_not_from_kernels() -> None:
    links = {
        "intra_host_bw": 1e6,
        "inter_host_bw": 1e3,
        "intra_host_latency_ms": 0.0,
        "inter_host_latency_ms": 0.0,
    }
    topology = running._topology(Ranks(4, 2, True, lambda *_: []), links)
    plan = steps.plan_of(StepCase(["table_wise"], 64, 4, 100, 8, 2), topology, "fused_torch")
    run = Measured(1e6, dict.fromkeys(running.MEASURED, 1000.0), 0.0, 0.0)
    left = steps.without_travel(run, plan).phases_ms
    # Results of a rank: 64 samples, tables of 8, 8, 16 and 4 columns, float32; half of them come from the other host.
    assert left["forward_compute"] == left["backward_compute"] == 1000.0
    for phase in ("forward_communication", "backward_communication"):
        assert left[phase] == pytest.approx(1000 - 0.5 * 64 * 36 * 4 / 1e3)


def test_copies_are_those_of_the_rank_s_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def bandwidths(device: torch.device) -> dict[str, float]:
        measured.append(device)
        return {"hbm_mem_bw": 2e9, "hbm_to_ddr_mem_bw": 5e7}

    monkeypatch.setattr(links.dist, "barrier", lambda: None)
    monkeypatch.setattr(links.torch.accelerator, "current_accelerator", lambda **_: torch.device("cuda"))
    monkeypatch.setattr(links.torch.accelerator, "device_count", lambda: 4)
    monkeypatch.setattr(links, "device_bandwidths", bandwidths)
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert links.measure_copies() == {"device": "cuda", "hbm_mem_bw": 2e9, "hbm_to_ddr_mem_bw": 5e7}
    assert measured == [torch.device("cuda", 3)]
    monkeypatch.setattr(links.torch.accelerator, "current_accelerator", lambda **_: None)
    assert links.measure_copies() is None


COPIES = {"device": "cuda", "hbm_mem_bw": 2.0, "hbm_to_ddr_mem_bw": 0.5}


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (
            {**COPIES, "hbm_to_ddr_mem_bw": 0.25},
            ({"device": "cuda"}, {"hbm_mem_bw": 2.0, "hbm_to_ddr_mem_bw": 0.25}),
        ),
        ({**COPIES, "device": "xpu"}, ({}, {})),
        (None, ({}, {})),
    ],
)
def test_copies_of_the_slowest_rank_count_where_all_have_a_device_of_one_type(
    other: Any, expected: Any
) -> None:
    answers = {links.measure_links: [{"intra_host_bw": 1.0}] * 2, links.measure_copies: [dict(COPIES), other]}
    found = running._measured_links(Ranks(2, 2, True, answers.__getitem__))
    assert found == ({"intra_host_bw": 1.0}, *expected)


def test_calibrate_of_another_device_is_refused(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["calibrate", "--output", str(tmp_path / "m.json"), "--device", "cuda"])
    assert found.exit_code != 0
    assert not (tmp_path / "m.json").exists()


class _Reached(Exception):
    pass


@pytest.mark.parametrize(("refusing", "expected"), [((), "a"), (("a",), "b"), (("a", "b"), None)])
def test_steps_are_measured_by_the_first_kernel_that_reads_their_rows(
    refusing: tuple[str, ...], expected: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    ms = np.linspace(1, 2, len(CASES))
    times = KernelTimes(CASES, ms, ms, np.full(len(CASES), 32.0), np.zeros(len(CASES)), updates_all=False)

    def run(function: Any, *args: Any, **_: Any) -> list[Any]:
        if function is kernels.refusal_of:
            name, _, precision = args
            return ["no such rows" if precision == BASE and name in refusing else None]
        if function is kernels.measure_kernel:
            return [times]
        if function is time.monotonic:
            return [next(seconds)]
        return [{running.processor: "made up", links.measure_links: {}}.get(function)]

    seconds = iter([1e6, 1e6 + 3, 1e6 + 7])  # another host's clock; warm after six seconds of it

    def steps_of(ranks: Ranks, kernel: str, *_: Any, **__: Any) -> Any:
        raise _Reached(kernel)

    monkeypatch.setattr(running, "_measured_steps", steps_of)
    with pytest.raises(_Reached if expected else UnsupportedError, match=expected or f"rows of {BASE}"):
        running.calibrate(Ranks(1, 1, True, run), ["a", "b"], lambda what: None, precisions=["FP16"])


def test_steps_that_other_programs_or_chance_disturbed_are_measured_again_and_the_quicker_run_counts() -> (
    None
):
    cases = [StepCase(["table_wise"], 4, 2, 60 + number, 8, 2) for number in range(4)]
    first = [
        (5.0, 0.1, 0.0),
        (6.0, 2.0, 0.0),
        (7.0, 0.1, 0.5),
        (8.0, 2.0, 0.0),
    ]  # ms, quartiles apart, others' part
    runs, measured = iter([first, [(5.5, 0.1, 0.0), (7.5, 0.1, 0.0), (4.0, 0.1, 0.0)]]), []

    def run(function: Any, work: Any, **_: Any) -> list[Any]:
        measured.append([data["tables"][0]["num_embeddings"] for data, _ in work])
        return [[Measured(ms, {}, spread, others) for ms, spread, others in next(runs)]]

    ranks = Ranks(2, 2, True, run)
    links_found = {"intra_host_bw": 1e6, "intra_host_latency_ms": 0.0}
    plans, found = running._measured_steps(ranks, cases, "fused_torch", links_found, quick=False)
    assert measured == [[30, 30, 31, 31], [30, 31, 31]]
    assert [one.step_ms for one in found] == [5.0, 5.5, 7.0, 4.0]
    assert len(plans) == 4


def test_quick_calibration_measures_steps_once_however_busy_the_machine_is() -> None:
    asked = []

    def run(function: Any, work: Any, **options: Any) -> list[Any]:
        asked.append((len(work), options.get("most_tries")))
        return [[Measured(1.0, {}, 1.0, 0.9)] * len(work)]

    links_found = {"intra_host_bw": 1e6, "intra_host_latency_ms": 0.0}
    cases = [StepCase(["table_wise"], 4, 2, 60, 8, 2)]
    running._measured_steps(Ranks(2, 2, True, run), cases, "fused_torch", links_found, quick=True)
    assert asked[0] == (1, 1)
    assert not any(count for count, _ in asked[1:])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--kernel", "fused_torch,dense", "--precision", "fp16,nibbles"],
            r"rows of NIBBLES: fused_torch: .+; dense: ",
        ),
        (["--kernel", "fused_triton"], rf"rows of {BASE}: fused_triton: \w"),
    ],
)
def test_calibrate_refuses_rows_that_no_kernel_reads_before_it_measures(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def measured(*_: Any, **__: Any) -> Any:
        raise AssertionError("measured")

    monkeypatch.setattr(kernels, "measure_kernel", measured)
    words = ["calibrate", "--ranks", "1", "--output", str(tmp_path / "machine.json"), *words]
    with pytest.raises(UnsupportedError, match=said):
        CliRunner().invoke(app, words, catch_exceptions=False)


def test_programs_beside_the_ranks_are_told_host_by_host_where_two_have_one_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[Any] = []
    passed = {"idle": (1.0, 10.0, 1.0), "busy": (10.0, 10.0, 1.0)}  # busy and all seconds, and the rank's own

    def gather(into: list[Any], own: Any) -> None:
        told.append(own)
        into[: len(told)] = told

    monkeypatch.setattr(measuring.dist, "get_world_size", lambda: len(told) + 1)
    monkeypatch.setattr(measuring.dist, "all_gather_object", gather)
    for host, clocks in passed.items():
        monkeypatch.setattr(measuring, "this_host", lambda host=host: host)
        monkeypatch.setattr(measuring, "_clocks", lambda: (0.0, 0.0, 0.0))
        others = measuring.OtherPrograms()
        monkeypatch.setattr(measuring, "_clocks", lambda clocks=clocks: clocks)
        share = others.share()
    assert share == pytest.approx(0.9)


class Clock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def passes(self, seconds: float) -> Any:
        def work(*_: Any, **__: Any) -> tuple[None, None]:
            self.now_s += seconds
            return None, None

        return work


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    own = Clock()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: own.now_s)
    return own


def test_timer_tells_the_lower_quartile_of_each_part_without_what_is_before_and_the_first_rounds(
    clock: Clock,
) -> None:
    seconds = iter([9.0, 9.0, 1.0, 2.0, 3.0, 4.0, 5.0])  # the first two warm up
    found = timing.quartiles_ms(
        lambda: clock.passes(next(seconds))(), clock.passes(0.25), rounds=5, before=clock.passes(100)
    )
    assert found == pytest.approx([2000, 250])


class Lookups:
    """Lookups that take 2 s, their updates 3 s and 4 s."""

    def __init__(self, clock: Clock) -> None:
        self.forward, self.anticipate, self.backward = clock.passes(2), clock.passes(3), clock.passes(4)


def test_times_of_a_kernel_are_without_the_draw_of_its_ids(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def batches(case: KernelCase) -> Iterator[None]:
        while True:
            clock.passes(100)()
            yield None

    monkeypatch.setattr(kernels, "_batches", batches)
    monkeypatch.setattr(kernels.dist, "barrier", lambda: None)
    case = KernelCase(1, 10, 4, 2, 1)
    assert kernels._times(Lookups(clock), case, torch.zeros(1), 3) == pytest.approx((2000, 7000))  # type: ignore[arg-type]


def test_fixed_work_is_measured_with_memory_kept_as_that_of_experiments_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[str] = []

    def timed(*_: Any, **__: Any) -> list[float]:
        made.append("measured")
        return [2.5]

    monkeypatch.setattr(timing, "keep_memory", lambda: made.append("kept"))
    monkeypatch.setattr(timing, "quartiles_ms", timed)
    monkeypatch.setattr(timing.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(timing.dist, "all_reduce", lambda *_, **__: None)
    assert timing.reference_ms() == 2.5
    assert made == ["kept", "measured"]
