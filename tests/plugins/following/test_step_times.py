"""Times of real steps, by a clock that only moves where the test moves it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.plugins.following import models

import shardwright as sw
from shardwright.runtime.sharded.collections.sharded_collection import ShardedCollection
from shardwright_plugins.following import MeasuredTimes, StepTimes, clocks, step_times
from shardwright_plugins.following.times import PHASES


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
