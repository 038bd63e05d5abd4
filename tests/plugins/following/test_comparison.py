"""Measured times beside a plan: which group is off, and by what."""

from __future__ import annotations

import re
from pathlib import Path

import attrs
import pytest
from tests.plugins.following import models
from typer.testing import CliRunner

import shardwright as sw
from shardwright.cli import app
from shardwright_plugins.estimators.engine.machine import Machine, shipped_machine
from shardwright_plugins.following import GroupTimes, MeasuredTimes, RankTimes
from shardwright_plugins.following.comparison import compare_groups
from shardwright_plugins.following.predicted import Prices
from shardwright_plugins.following.times import KERNEL_PHASES, PHASES, placement_of

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
