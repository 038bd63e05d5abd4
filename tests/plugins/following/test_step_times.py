"""Times of real steps, by a clock that only moves where the test moves it, and beside what was predicted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import pytest
import torch
from tests.plugins.following import models
from typer.testing import CliRunner

import shardwright as sw
from shardwright.cli import app
from shardwright.runtime.sharded.collections.sharded_collection import ShardedCollection
from shardwright_plugins.estimators.engine.machine import Machine, shipped_machine
from shardwright_plugins.following import GroupTimes, MeasuredTimes, RankTimes, StepTimes, clocks, step_times
from shardwright_plugins.following.comparison import compare_groups
from shardwright_plugins.following.predicted import Prices
from shardwright_plugins.following.times import KERNEL_PHASES, PHASES, placement_of


class Clock:
    """Seconds that pass only in :meth:`taking`."""

    def __init__(self) -> None:
        self.now = 1.0

    def perf_counter(self) -> float:
        return self.now

    def taking(self, seconds: float, owner: Any, name: str) -> None:
        """Make a call of an object's method take so long."""
        inner: Callable[..., Any] = getattr(owner, name)

        def slow(*args: Any, **kwargs: Any) -> Any:
            self.now += seconds
            return inner(*args, **kwargs)

        setattr(owner, name, slow)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for module in (clocks, step_times):
        monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=made.perf_counter))
    return made


def collection_of(model: sw.DistributedModelParallel) -> ShardedCollection:
    (found,) = (module for module in model.modules() if isinstance(module, ShardedCollection))
    return found


def test_phases_and_groups_have_the_time_that_their_calls_take(clock: Clock) -> None:
    model = models.alone("fused_torch", "fused_numba")
    engine = collection_of(model).engine
    clock.taking(0.001, engine.reader, "read")
    for seconds, lookup in zip((0.002, 0.004), engine.lookups, strict=True):
        clock.taking(seconds, lookup, "forward")
        clock.taking(10 * seconds, lookup, "backward_scaled")
    clock.taking(0.1, engine.arrangement, "outputs")
    clock.taking(0.2, engine.arrangement, "gradients")
    with StepTimes(model) as times:
        for seed in range(3):
            models.train(model, models.batch(seed))
            clock.now += 1.0  # between steps
    found = times.gather()
    (rank,) = found.ranks
    assert rank.phases_ms == pytest.approx(
        {
            "input_communication": 1.0,
            "forward_compute": 6.0,
            "forward_communication": 100.0,
            "backward_communication": 200.0,
            "backward_compute": 60.0,
        }
    )
    assert found.num_steps == 3
    assert rank.step_ms == pytest.approx(1000 + rank.tables_ms)
    own = {group.tables: list(group.phases_ms.values()) for group in rank.groups}
    names = [tuple(spec.table.name for spec in group.blocks) for group in engine.groups]
    assert sorted(names) == [("t0", "t2", "t4"), ("t1", "t3", "t5")]
    assert own == {names[0]: pytest.approx([2.0, 20.0]), names[1]: pytest.approx([4.0, 40.0])}


def test_model_is_not_measured_twice_at_a_time() -> None:
    model = models.alone()
    with StepTimes(model), pytest.raises(sw.InvalidInputError):
        StepTimes(model).start()
    with StepTimes(model) as times:
        models.train(model, models.batch(0))
    assert times.num_steps == 1


def test_times_begin_anew_when_the_model_is_resharded() -> None:
    model = models.alone("fused_torch")
    other = models.planner(1, "fused_numba").plan(models.bags(), models.SHARDERS)
    with StepTimes(model) as times:
        models.train(model, models.batch(0))
        model.reshard(other)
        models.train(model, models.batch(1))
        models.train(model, models.batch(2))
    found = times.gather()
    assert (found.num_steps, [group.kernel for group in found.ranks[0].groups]) == (2, ["fused_numba"])


def test_document_comes_back_as_it_was_written(tmp_path: Path) -> None:
    model = models.alone()
    with StepTimes(model) as times:
        models.train(model, models.batch(0))
    times.write(tmp_path / "times.json")
    assert MeasuredTimes.read(tmp_path / "times.json") == times.gather()


PHASES_MS = dict.fromkeys(PHASES, 1.0)
GROUP = {"tables": ["t0"], "kernel": "dense", "phases_ms": PHASES_MS, "update": "in_backward"}


def rank_with(**other: Any) -> dict[str, Any]:
    return {"ranks": [{"step_ms": 1.0, "phases_ms": PHASES_MS, "groups": [GROUP], **other}]}


@pytest.mark.parametrize(
    "change",
    [
        {"format": "other"},
        {"version": 2},
        {"ranks": [{}]},
        {"ranks": 3},
        {"ranks": []},
        {"num_steps": -3},
        rank_with(step_ms=-1.0),
        rank_with(step_ms=10**400),
        rank_with(phases_ms={}),
        rank_with(groups=[{**GROUP, "phases_ms": {}}]),
        rank_with(groups=[{**GROUP, "tables": [{}]}]),
        rank_with(groups=[{**GROUP, "kernel": 3}]),
        rank_with(groups=[{**GROUP, "update": None}]),
    ],
)
def test_document_of_another_form_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    model = models.alone()
    with StepTimes(model) as times:
        models.train(model, models.batch(0))
    data = {**json.loads(times.gather().to_json()), **change}
    (tmp_path / "times.json").write_text(json.dumps(data))
    with pytest.raises(sw.InvalidInputError):
        MeasuredTimes.read(tmp_path / "times.json")


def test_file_that_cannot_be_read_is_named_once(tmp_path: Path) -> None:
    with pytest.raises(sw.InvalidInputError) as found:
        MeasuredTimes.read(tmp_path / "missing.json")
    assert str(found.value).count("missing.json") == 1


def test_writer_gets_the_times_of_the_last_steps(clock: Clock) -> None:
    written: list[tuple[str, float, int]] = []
    writer = SimpleNamespace(add_scalar=lambda *scalar: written.append(scalar))
    model = models.alone()
    lookup = collection_of(model).engine.lookups[0]
    with StepTimes(model, writer=writer, every=2):
        for seed in range(5):
            clock.taking(0.001, lookup, "forward") if seed == 0 else None
            models.train(model, models.batch(seed))
    assert {step for *_, step in written} == {2, 4}
    assert {name for name, *_ in written} >= {"rank 0/step ms", "rank 0/t0, .../forward_compute ms"}


def test_update_in_the_optimizer_s_step_is_the_kernel_s(clock: Clock) -> None:
    model = models.alone(update="in_step")
    (lookup,) = collection_of(model).engine.lookups
    clock.taking(0.004, lookup, "apply")
    with StepTimes(model) as times:
        for seed in range(2):
            models.train(model, models.batch(seed))
            model.fused_optimizer.step()
            model.fused_optimizer.zero_grad()
    found = times.of_rank()
    assert found.groups[0].update == "in_step"
    assert found.groups[0].phases_ms["backward_compute"] == pytest.approx(4.0)
    assert found.phases_ms == pytest.approx({**dict.fromkeys(PHASES, 0.0), "backward_compute": 4.0})


WRITER = SimpleNamespace(add_scalar=print)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        *[(other, {}) for other in (models.bags, lambda: torch.nn.Linear(1, 1), lambda: None)],
        *[(models.alone, {"writer": WRITER, "every": every}) for every in (0, 1.5, True)],
        *[(models.alone, options) for options in ({"writer": 3}, {"every": 3})],
    ],
)
def test_what_cannot_be_measured_is_refused(model: Callable[[], Any], options: dict[str, Any]) -> None:
    with pytest.raises(sw.InvalidInputError):
        StepTimes(model(), **options)


def test_times_on_a_gpu_and_gathering_without_ranks_are_refused() -> None:
    on_device = models.alone()
    on_device.device = torch.device("cuda")
    with pytest.raises(sw.UnsupportedError):
        StepTimes(on_device)
    with StepTimes(models.alone()) as times, pytest.raises(sw.InvalidInputError):
        times.gather()


KERNELS = ("fused_torch", "fused_numba")


def plan(ranks: int = 2):
    return models.planner(ranks, *KERNELS).plan(models.bags(), models.SHARDERS)


def times_of(made, factor: float) -> MeasuredTimes:
    """Times that are a plan's prediction times a factor: a group a rank and kernel."""
    prices, shardings = Prices.by(made), made.plan[""]
    ranks = []
    for number in range(2):
        groups = []
        for kernel in KERNELS:
            tables = [
                name
                for name, own in shardings.items()
                if (own.ranks, own.compute_kernel) == ([number], kernel)
            ]
            said = {
                phase: factor * sum(prices.of_tables[phase][name][number] for name in tables)
                for phase in KERNEL_PHASES
            }
            groups += [GroupTimes(tuple(tables), kernel, said)] * bool(tables)
        phases = {phase: sum(own.phases_ms.get(phase, 0.0) for own in groups) for phase in PHASES}
        ranks.append(RankTimes(10.0, phases, tuple(groups)))
    return MeasuredTimes(7, ranks, placement_of(made))


def test_prediction_of_tables_adds_up_to_that_of_ranks() -> None:
    made = plan()
    prices = Prices.by(made)
    predicted = prices.of(made)
    assert predicted is not None
    for phase, of_tables in prices.of_tables.items():
        assert sum(of_tables.values()).tolist() == pytest.approx(predicted.phases_ms[phase], abs=1e-4)


def test_times_that_are_off_by_one_factor_are_right_after_it() -> None:
    made = plan()
    found = compare_groups(Prices.by(made), times_of(made, 3.0))
    assert [group.off_ms for group in found] == pytest.approx([0.0] * len(found), abs=1e-9)
    assert {round(group.factor, 6) for group in found} == {3.0}
    assert sorted(name for group in found for name in group.tables) == [
        f"t{n}" for n in range(models.NUM_TABLES)
    ]


def test_explain_tells_the_ranks_and_groups_of_measured_times(tmp_path: Path) -> None:
    made = plan()
    (tmp_path / "plan.json").write_text(made.to_json())
    (tmp_path / "times.json").write_text(times_of(made, 2.0).to_json())
    words = ["explain", str(tmp_path / "plan.json")]
    found = CliRunner().invoke(
        app, [*words, "--measured", str(tmp_path / "times.json")], catch_exceptions=False
    )
    head, *lines = found.stdout.splitlines()
    assert head.startswith("7 steps on 2 ranks")
    assert [line[:7] for line in lines[:2]] == ["rank 0:", "rank 1:"]
    assert re.search(r"\b2 times", lines[2])
    assert len(lines[3:]) == len(compare_groups(Prices.by(made), times_of(made, 2.0)))
    assert CliRunner().invoke(app, words).exit_code == 1
    both = [*words, "--table", "t0", "--measured", str(tmp_path / "times.json")]
    of_table = CliRunner().invoke(app, [*words, "--table", "t0"]).stdout
    assert CliRunner().invoke(app, both).stdout == found.stdout + of_table


def test_times_of_another_plan_are_refused() -> None:
    made = plan()
    times = times_of(made, 1.0)
    with pytest.raises(sw.InvalidInputError):
        compare_groups(Prices.by(made), attrs.evolve(times, ranks=times.ranks[:1]))
    unknown = attrs.evolve(times.ranks[0], groups=(GroupTimes(("other",), "fused_torch", {}),))
    with pytest.raises(sw.InvalidInputError):
        compare_groups(Prices.by(made), attrs.evolve(times, ranks=[unknown, times.ranks[1]]))


def test_times_of_the_same_tables_in_other_places_are_refused() -> None:
    made = plan()
    moved = {name: own.ranks for name, own in made.plan[""].items()}
    rules = {name: sw.ParameterConstraints(ranks=[1 - rank]) for name, (rank,) in moved.items()}
    planner = sw.EmbeddingShardingPlanner(sw.Topology(2, "cpu"), models.BATCH, constraints=rules)
    other = planner.plan(models.bags(), models.SHARDERS)
    with pytest.raises(sw.InvalidInputError):
        compare_groups(Prices.by(other), times_of(made, 1.0))


def refit_of(made, folder: Path, times: MeasuredTimes):
    (folder / "plan.json").write_text(made.to_json())
    (folder / "times.json").write_text(times.to_json())
    asked = ["explain", str(folder / "plan.json"), "--measured", str(folder / "times.json")]
    return CliRunner().invoke(app, [*asked, "--refit", str(folder / "machine.json")])


def test_refitted_machine_predicts_what_was_measured(tmp_path: Path) -> None:
    """Lookups took 3 times, updates half, and all else 2 times what is predicted."""
    made = models.planner(2, "fused_numba", estimator="engine").plan(models.bags(), models.SHARDERS)
    prices = Prices.by(made)
    predicted = prices.of(made)
    factors = {"forward_compute": 3.0, "backward_compute": 0.5}
    ranks = []
    for number in range(2):
        said = {phase: own[number] for phase, own in predicted.phases_ms.items()}
        phases = {phase: factors.get(phase, 2.0) * said.get(phase, 0.0) for phase in PHASES}
        phases["input_communication"] += 2 * sum(own for phase, own in said.items() if phase not in PHASES)
        ranks.append(RankTimes(10.0, phases, ()))
    done = refit_of(made, tmp_path, MeasuredTimes(7, ranks, placement_of(made)))
    assert done.exit_code == 0, done.output
    # Priced apart, and measured within other phases.
    assert "; fixed: " in done.stdout.splitlines()[1]
    machine = Machine.read(tmp_path / "machine.json")
    assert machine.made["refitted"]["steps"] == 7
    efforts = [
        {name: own.get("cut") for name, own in one.kernels.items()} for one in (machine, shipped_machine())
    ]
    assert efforts[0] == efforts[1]  # which are factors of the engine's constants
    found = Prices.by(made, f"engine:machine={tmp_path / 'machine.json'}").of(made)
    for phase in (*PHASES, "fixed"):
        expected = [factors.get(phase, 2.0) * own for own in predicted.phases_ms[phase]]
        assert found.phases_ms[phase] == pytest.approx(expected, rel=1e-3, abs=1e-4), phase


def test_machine_is_not_refitted_to_updates_in_the_optimizer_s_step(tmp_path: Path) -> None:
    made = models.planner(2, *KERNELS, estimator="engine").plan(models.bags(), models.SHARDERS)
    times = times_of(made, 2.0)
    groups = tuple(attrs.evolve(group, update="in_step") for group in times.ranks[0].groups)
    done = refit_of(
        made,
        tmp_path,
        attrs.evolve(times, ranks=[attrs.evolve(times.ranks[0], groups=groups), times.ranks[1]]),
    )
    assert done.exit_code != 0
    assert "in_step" in str(done.exception)
    assert not (tmp_path / "machine.json").exists()


def test_machine_is_not_refitted_by_a_plan_of_another_estimator(tmp_path: Path) -> None:
    made = plan()
    done = refit_of(made, tmp_path, times_of(made, 2.0))
    assert done.exit_code != 0
    assert not (tmp_path / "machine.json").exists()
