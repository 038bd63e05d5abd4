"""Searches that would never end: time limits, Ctrl-C, progress."""

from __future__ import annotations

import io
import math
import os
import signal
import sys
import time
from contextlib import contextmanager
from functools import partial

import pytest
from attrs import field, frozen
from tests.core.planning.conftest import WithBound

from shardwright import (
    Block,
    EmbeddingShardingPlanner,
    Extension,
    Layout,
    NoPlanError,
    ParameterConstraints,
    Proposer,
    RowMap,
    ShardingType,
    TableSpec,
    Topology,
    Watch,
)
from shardwright.host import host
from shardwright.planning.options.enumeration import prepare
from shardwright.planning.options.inputs import Request
from shardwright.planning.options.planning_plugins import PluginChoice
from shardwright.planning.tables.constraints import Constraints
from shardwright.planning.watch import gap_of

TABLES = [TableSpec(f"t{i}", 10 + i, 8, ["f"]) for i in range(12)]

# Three tables of 320 bytes on two ranks of 500: one at least must be cut, and whole ones are proposed first.
THREE = [TableSpec(name, 10, 8, ["f"]) for name in "abc"]
CUT_ONE = {
    "cap": 500,
    "storage_reservation": 0.0,
    "constraints": {"*": ParameterConstraints(sharding_types=["whole", "slices"])},
}


class Endless(Proposer):
    """Proposes all combinations, many more than there is time for, and does something after some of them."""

    name, preference = "endless", 0

    def __init__(self, after=0, then=lambda: None, pause_s=0.0):
        self.after, self.then, self.pause_s, self.count = after, then, pause_s, 0

    def proposals(self, space):
        options = space.options
        sizes = (options.first_option[1:] - options.first_option[:-1])[options.distinct_table]
        proposal = options.first_option[:-1][options.distinct_table].copy()
        place = 0 * proposal
        while True:
            yield (proposal + place).copy()
            self.count += 1
            time.sleep(self.pause_s)
            if self.count == self.after:
                self.then()
            table = 0
            while table < len(place) - 1 and place[table] == sizes[table] - 1:
                place[table] = 0
                table += 1
            place[table] = min(place[table] + 1, sizes[table] - 1)


@pytest.fixture
def clock(monkeypatch):
    """The planner's clock, by which only a proposer's pauses take time; holds the time, s."""
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr("shardwright.planning.planner.Watch", partial(Watch, clock=lambda: now[0]))
    monkeypatch.setattr(time, "sleep", sleep)
    return now


def planner(proposer, *, cap=1_000_000, **arguments):
    return EmbeddingShardingPlanner(Topology(2, "cpu", ddr_cap=cap), 64, proposer=proposer, **arguments)


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)


def test_plan_interrupted_returns_the_best_so_far():
    handler = signal.getsignal(signal.SIGINT)
    proposer = Endless(after=5, then=interrupt)
    made = planner(proposer)
    plan = made.plan_tables(TABLES)
    assert proposer.count == 5
    assert plan.document["objective"]["value_ms"] == made.report.result.plan.value_ms
    assert made.report.result.num_proposals == 5
    assert signal.getsignal(signal.SIGINT) is handler


def test_plan_at_its_time_limit_returns_the_best_so_far_with_what_is_proven(clock):
    proposer = Endless(pause_s=0.0625)
    plan = planner(proposer, seconds=0.25).plan_tables(TABLES)
    assert (proposer.count, clock) == (4, [0.25])
    objective = plan.document["objective"]
    assert objective["lower_bound_ms"] <= objective["value_ms"]
    assert plan.document["inputs"]["seconds_limit"] == {"value": 0.25, "provenance": "given"}


@frozen
class SlowRows(RowMap):
    """Rows that take long to count, and a note of each that were."""

    name = "slow_rows"
    num_rows: int
    num_parts: int
    counted: list = field(factory=list, eq=False)

    def part_of(self, ids):
        return ids % self.num_parts

    def local_row_of(self, ids):
        return ids // self.num_parts

    def rows_of(self, part):
        self.counted.append(part)
        time.sleep(0.2)
        return slice(part, self.num_rows, self.num_parts)


def slow_type(counted, then=lambda: None):
    class Slow(ShardingType):
        name, abbreviation = "slow", "SL"

        def layouts(self, table, topology, constraints):
            then()
            rows = SlowRows(table.num_embeddings, 60, counted)
            yield Layout([Block(part, table.all_columns) for part in rows])

    return Slow


def slowly(host_with, counted, then=lambda: None, **arguments):
    rules = {"*": ParameterConstraints(sharding_types=["slow"])}
    with host_with(sharding_types=[slow_type(counted, then)]):
        planner("each_alone", constraints=rules, **arguments).plan_tables(TABLES)


def test_plan_whose_options_take_longer_than_its_limit_says_what_took_it(host_with):
    counted = []
    text = (
        r"of 12 tables, the options of 0 were known when the time was over, after \d+\.\d s, of which sharding type "
        r"'slow' took \d+\.\d s; the next is 't0'.*num_rows_of"
    )
    with pytest.raises(NoPlanError, match=text):
        slowly(host_with, counted, seconds=0.1)
    assert len(counted) < 60  # of the first table's parts, each counted twice


def test_plan_interrupted_while_its_options_are_made_ends_at_once(host_with):
    counted = []
    with pytest.raises(KeyboardInterrupt):
        slowly(host_with, counted, interrupt)
    assert counted == []


def test_prepare_on_another_thread_ends_when_its_watch_is_interrupted(host_with):
    """As ranks plan together: signals reach the main thread, which plans nothing itself."""
    counted, watch = [], Watch()

    def note():
        watch.was_interrupted = True

    rules = Constraints({"*": ParameterConstraints(sharding_types=["slow"])})
    request = Request(Topology(2, "cpu", ddr_cap=1_000_000), rules, 64, None)
    with host_with(sharding_types=[slow_type(counted, note)]), pytest.raises(KeyboardInterrupt):
        prepare(TABLES, request, PluginChoice().resolve(host()), watch=watch)
    assert counted == []


def test_plan_without_a_plan_at_its_time_limit_says_so(clock):
    late = planner(Endless(pause_s=0.1), seconds=0.05, **CUT_ONE)
    with pytest.raises(
        NoPlanError, match=r"no plan found.*The search ended at its limit of 0\.05 s; allow it more"
    ):
        late.plan_tables(THREE)
    assert planner(Endless(pause_s=0.001), seconds=0.05, **CUT_ONE).plan_tables(THREE)


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("is_wanted", [True, False, None])
def test_plan_shows_its_progress_if_wanted_or_by_default_on_a_terminal(
    monkeypatch, host_with, is_wanted, is_terminal
):
    screen, heard = io.StringIO(), []
    monkeypatch.setattr(screen, "isatty", lambda: is_terminal)
    monkeypatch.setattr(sys, "stderr", screen)

    class Shown(Extension):
        name = "method:progress"

        def load(self):
            return shown

    @contextmanager
    def shown(watch):
        heard.append(watch.progress.value_ms)
        yield
        heard.append(watch.progress.value_ms)

    with host_with(extensions=[Shown]):
        made = planner(WithBound(), progress=is_wanted)
        made.plan_tables(TABLES)
    is_shown = is_terminal if is_wanted is None else is_wanted
    assert heard == ([math.inf, made.report.plan.value_ms] if is_shown else [])


def test_watch_interrupted_once_is_over_and_twice_raises():
    handler = signal.getsignal(signal.SIGINT)
    watch = Watch()
    with watch.interruptible():
        os.kill(os.getpid(), signal.SIGINT)
        assert watch.is_over
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is handler


def test_watch_leaves_the_handler_of_somebody_else_alone():
    seen: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: seen.append(number))
    try:
        with Watch().interruptible() as watch:
            os.kill(os.getpid(), signal.SIGINT)
        assert (seen, watch.was_interrupted) == ([signal.SIGINT], False)
    finally:
        signal.signal(signal.SIGINT, previous)


@pytest.mark.parametrize(
    ("value", "bound", "gap"), [(3.0, 2.0, 0.5), (2.0, 2.0, 0.0), (2.0, 0.0, math.inf), (0.0, 0.0, 0.0)]
)
def test_gap_of(value, bound, gap):
    assert gap_of(value, bound) == gap
