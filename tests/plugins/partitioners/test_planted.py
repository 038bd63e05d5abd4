"""Where a plan exists, one is found: over problems whose plan was drawn first."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from tests.plugins.partitioners import planted as program
from tests.plugins.partitioners.planted import LEAST_SLACK, MOST_SLACK, planted, searched, used_bytes

# `python -m tests.plugins.partitioners.planted 0 2000 --log planted.jsonl` searches as many as one likes, names those
# without a plan, and goes on where it ended.
PROBLEMS, PART = range(400, 480), 20


def check_planted(problem):
    """The plan that was drawn is one, and hardly leaves room."""
    used, capacity = used_bytes(problem.space, problem.plan), problem.space.capacity_bytes
    assert (used <= capacity).all()
    assert LEAST_SLACK * 0.9 <= 1 - used[:, 0].max() / capacity[0, 0] <= MOST_SLACK
    assert 10 <= len(problem.plan) <= 200
    assert 2 <= len(capacity) <= 64


def check_solved(seed):
    problem = planted(seed)
    check_planted(problem)
    result = searched(problem)
    assert result.proposal is not None, f"seed {seed}: {result.misfit}"
    assert (result.feedback.used_bytes <= problem.space.capacity_bytes).all()


@pytest.mark.parametrize("seed", [3, 8, 9, 11, 12, 13])
def test_planted_problem_gets_a_plan(seed):
    check_solved(seed)


def test_planted_problems_are_of_mixed_sharding_types():
    space, plan = (problem := planted(5)).space, problem.plan
    types = {space.options.type_of(option).name for option, _ in plan}
    assert types >= {"table_wise", "row_wise", "data_parallel", "table_row_wise", "table_column_wise"}
    assert np.ptp(used_bytes(space, plan)[:, 0]) < 1e-3 * space.capacity_bytes[0, 0]


def test_run_of_planted_problems_goes_on_where_its_log_ends(tmp_path, monkeypatch, capsys):
    log = tmp_path / "planted.jsonl"
    log.write_text(json.dumps({"seed": 3, "solved": False, "seconds": 2.0}) + "\n")
    monkeypatch.setattr(sys, "argv", ["planted", "3", "10", "--every", "5", "--log", str(log)])
    program.main()
    known = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(entry["seed"], entry["solved"]) for entry in known] == [(3, False), (8, True)]
    assert "1 of 2 solved" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", PROBLEMS[::PART])
def test_many_planted_problems_get_a_plan(first):
    for seed in range(first, first + PART):
        check_solved(seed)
