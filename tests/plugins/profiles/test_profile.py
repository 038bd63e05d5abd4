"""Profiles of samples, beside what NumPy counts in them, and plans with what they found."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import strategies as st
from tests.drawn import drawn
from typer.testing import CliRunner

import shardwright as sw
from shardwright.cli import app
from shardwright_plugins.profiles import Profile, cache_statistics

USER, ITEM = (
    sw.TableSpec("user", 50, 8, ["id"]),
    sw.TableSpec("item", 200, 8, ["seen", "bought"], module="tower"),
)
WORKLOAD = {
    "batch_size_per_rank": 8,
    "tables": [
        {"name": "user", "num_embeddings": 50, "embedding_dim": 8, "feature_names": ["id"]},
        {
            "name": "item",
            "num_embeddings": 200,
            "embedding_dim": 8,
            "feature_names": ["seen", "bought"],
            "module": "tower",
        },
    ],
}


def drawn_lists(seed: int, samples: int) -> dict[str, list[list[int]]]:
    random = np.random.default_rng(seed)
    most = {"id": (1, 50), "seen": (5, 200), "bought": (2, 200)}
    return {
        name: [random.integers(0, rows, random.integers(0, longest + 1)).tolist() for _ in range(samples)]
        for name, (longest, rows) in most.items()
    }


def steps_of(lists: dict[str, list[list[int]]], size: int) -> list[dict[str, list[list[int]]]]:
    number = len(lists["id"]) // size
    return [
        {name: own[step * size : (step + 1) * size] for name, own in lists.items()} for step in range(number)
    ]


@drawn(seed=st.integers(0, 10**6), algorithm=st.sampled_from(["lru", "lfu"]), quick=8, thorough=60)
def test_profile_counts_as_numpy_does(seed: int, algorithm: str) -> None:
    steps = steps_of(drawn_lists(seed, 24), 8)
    profile = Profile([USER, ITEM], algorithm=algorithm)
    for step in steps:
        profile.add(sw.KeyedJaggedTensor.from_lists(step))
    rules = profile.constraints()
    assert list(rules) == ["user", "tower.item"]
    for table in (USER, ITEM):
        rule = rules[table.path]
        per_bag = [
            np.mean([len(bag) for step in steps for bag in step[name]]) for name in table.feature_names
        ]
        assert rule.pooling_factors == pytest.approx(per_bag)
        assert rule.num_poolings is None
        assert rule.cache_params is not None
        ids = [
            np.concatenate([bag for name in table.feature_names for bag in step[name]]).astype(int)
            for step in steps
        ]
        expected = cache_statistics(ids, table.num_embeddings, algorithm=algorithm, num_bins=100)
        assert rule.cache_params.stats == expected


@pytest.mark.parametrize(
    ("ids", "error"),
    [({"id": [[1], [50]]}, sw.InvalidInputError), ({"ids": [[1], [2]]}, sw.UnknownNameError)],
)
def test_profile_refuses_what_is_no_use_of_its_tables(ids: Any, error: type[Exception]) -> None:
    told = r"^'id' of table 'user' .*: batch 0 of .* from 1 to 50; the table has 50 rows|Did you mean 'ids'"
    with pytest.raises(error, match=told):
        Profile([USER]).add(sw.KeyedJaggedTensor.from_lists(ids))


def test_profile_of_nothing_says_so() -> None:
    with pytest.raises(sw.InvalidInputError, match="no samples"):
        Profile([USER]).constraints()


def run(*arguments: Any) -> Any:
    return CliRunner().invoke(app, ["profile", *map(str, arguments)], env={"COLUMNS": "200"})


def written(folder: Path, lists: dict[str, list[list[int]]], cuts: list[int]) -> list[Path]:
    """Parquet files of the rows between cuts, in small groups of rows."""
    table, files = pyarrow.table(lists), []
    for number, (first, last) in enumerate(zip([0, *cuts], [*cuts, len(table)], strict=True)):
        files.append(folder / f"{number}.parquet")
        pyarrow.parquet.write_table(table.slice(first, last - first), files[-1], row_group_size=5)
    (folder / "tables.json").write_text(json.dumps(WORKLOAD))
    return files


def test_profile_command_reads_steps_across_files_and_plan_takes_what_it_writes(tmp_path: Path) -> None:
    lists = drawn_lists(3, 100)
    files = written(tmp_path, lists, [13, 70])
    rules = tmp_path / "rules.json"
    done = run(tmp_path / "tables.json", *files, "--output", rules, "--ranks", 2)
    assert done.exit_code == 0, done.output
    assert done.output.startswith("6 steps of 16 samples, 2 tables")
    profile = Profile([USER, ITEM])
    for step in steps_of(lists, 16):
        profile.add(sw.KeyedJaggedTensor.from_lists(step))
    expected = {path: rule.to_data() for path, rule in profile.constraints().items()}
    assert json.loads(rules.read_text()) == json.loads(json.dumps(expected))
    plan = tmp_path / "plan.json"
    arguments = [
        "plan",
        tmp_path / "tables.json",
        "--ranks",
        2,
        "--device",
        "cpu",
        "--constraints",
        rules,
        "--output",
        plan,
    ]
    planned = CliRunner().invoke(app, list(map(str, arguments)))
    assert planned.exit_code == 0, planned.output
    assert "pooling_factors" not in json.loads(plan.read_text())["inputs"]  # of which none is assumed


def test_profile_command_looks_at_no_more_steps_than_it_is_told(tmp_path: Path) -> None:
    files = written(tmp_path, drawn_lists(4, 100), [])
    done = run(tmp_path / "tables.json", *files, "--output", tmp_path / "r.json", "--batches", 3)
    assert done.output.startswith("3 steps of 8 samples")


@pytest.mark.parametrize("fault", ["text", "missing", "column", "short"])
def test_profile_command_names_what_is_wrong_with_the_data(tmp_path: Path, fault: str) -> None:
    lists = drawn_lists(5, 9 if fault == "short" else 40)
    if fault == "column":
        lists["bougth"] = lists.pop("bought")
    (file,) = written(tmp_path, lists, [])
    if fault == "text":
        file.write_text("no parquet")
    if fault == "missing":
        file.unlink()
    done = run(tmp_path / "tables.json", file, "--output", tmp_path / "rules.json")
    expected = {
        "column": "Did you mean 'bougth'",
        "short": "have 1 whole step of 8 samples; a profile needs 2 at least",
    }.get(fault, "0.parquet cannot be read")
    assert isinstance(done.exception, sw.ShardwrightError)
    assert expected in str(done.exception)
    assert not (tmp_path / "rules.json").exists()


CYCLE = [[number % 4] for number in range(40)]  # a row is used again after three others


@pytest.mark.parametrize(("rows_held", "misses"), [(1, 1.0), (3, 1.0), (4, 0.0), (10, 0.0)])
def test_cycle_hits_as_soon_as_the_cache_holds_all_of_it(rows_held: int, misses: float) -> None:
    stats = cache_statistics(CYCLE, 10)
    assert stats.expected_miss_rate(rows_held / 10) == misses
    assert stats.expected_lookups == 1


def test_lfu_keeps_what_is_used_most_and_lru_what_was_used_last() -> None:
    batches = [[0] if number % 3 else [1 + number] for number in range(90)]  # a hot row among rows used once
    lfu, lru = (cache_statistics(batches, 100, algorithm=name) for name in ("lfu", "lru"))
    assert lfu.expected_miss_rate(0.01) == pytest.approx(1 / 3)
    assert lru.expected_miss_rate(0.01) == pytest.approx(2 / 3)
    assert lru.expected_miss_rate(0.02) == pytest.approx(1 / 3)
    assert lfu.expected_miss_rate(1.0) == 0.0


@pytest.mark.parametrize(
    ("batches", "told"),
    [
        ([[1]], "a sample of 1 batches says nothing of reuse"),
        ([[1], [2, 10]], "batch 1 of the sample has ids from 2 to 10; the table has 10 rows"),
        ([[-1], [2]], "batch 0 of the sample has ids from -1 to -1"),
        ([[1], [1.5]], "batch 1 of the sample is float64: give whole numbers"),
        ([None, [1]], "batch 0 of the sample is object: give whole numbers"),
        ([[1, [2, 3]], [1]], "batch 0 of the sample is no array of ids"),
    ],
)
def test_sample_that_is_too_small_or_of_another_table_is_refused(batches: Any, told: str) -> None:
    with pytest.raises(sw.InvalidInputError, match=told):
        cache_statistics(batches, 10)
