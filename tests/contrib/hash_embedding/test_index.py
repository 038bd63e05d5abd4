"""The index of rows against loops over single ids."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import shardwright_hash_embedding
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from shardwright_hash_embedding import HashedIds, HashSettings, numba_search
from shardwright_hash_embedding.hashing import mixed
from shardwright_hash_embedding.index import HashIndex
from tests import readme
from tests.plugins.parts.brought import bringing

import shardwright as sw
from shardwright.host import PluginHost, use_host
from shardwright_plugins.compute_kernels.indexed_rows._lookup import first_values

NONE = -1
BATCHES = st.lists(st.lists(st.integers(-3, 12), max_size=8), max_size=12)
SETTINGS = st.builds(
    HashSettings,
    st.sampled_from(["lru", "lfu", "never"]),
    st.integers(1, 3),
    steps_to_live=st.sampled_from([0, 2, 16]),
)


class Loops:
    """What HashIndex does, id by id."""

    def __init__(self, num_rows: int, rules: HashSettings) -> None:
        self.num_rows, self.rules, self.step, self.num_evicted = num_rows, rules, 0, 0
        self.row_of: dict[int, int] = {}
        self.uses: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.trial: Counter[int] = Counter()
        self.born: set[int] = set()

    def see(self, ids: list[int], seen: list[int]) -> list[int]:
        self.step += 1
        self.born = set()
        lifetime = self.rules.steps_to_live
        if lifetime and self.step % max(1, lifetime // 8) == 0:
            for key in [key for key in self.row_of if self.last[key] < self.step - lifetime]:
                self.forget(key)
        counts = Counter[int]()
        for key, sightings in zip(ids, seen, strict=True):
            counts[key] += max(sightings, 0)
        for key in counts.keys() & self.row_of.keys():
            self.use(key, counts[key])
        new = {key: count for key, count in counts.items() if count and key not in self.row_of}
        if self.rules.min_sightings > 1:
            self.trial.update(new)
            new = {key: seen for key, seen in self.trial.items() if seen >= self.rules.min_sightings}
            waiting = sorted((-seen, key) for key, seen in self.trial.items() if key not in new)
            self.trial = Counter({key: -seen for seen, key in waiting[: self.num_rows]})
        for _, key in sorted((-count, key) for key, count in new.items()):
            self.bear(key, new[key])
        return [self.row_of.get(key, NONE) for key in ids]

    def use(self, key: int, count: int) -> None:
        self.uses[key] = self.uses.get(key, 0) + count
        self.last[key] = self.step

    def bear(self, key: int, count: int) -> None:
        free = sorted(set(range(self.num_rows)) - set(self.row_of.values()))
        if free:
            row = free[0]
        else:
            idle = [other for other in self.row_of if self.last[other] < self.step]
            if not idle or self.rules.evict == "never":
                return
            row = self.forget(min(idle, key=self.rank))
        self.row_of[key] = row
        self.born.add(key)
        self.use(key, count)

    def forget(self, key: int) -> int:
        self.num_evicted += 1
        del self.uses[key], self.last[key]
        return self.row_of.pop(key)

    def rank(self, key: int) -> tuple[int, int, int]:
        own = (self.last[key], self.uses[key])
        return (*(own if self.rules.evict == "lru" else own[::-1]), self.row_of[key])


@settings(max_examples=300)
@given(st.integers(1, 6), SETTINGS, BATCHES, st.booleans())
def test_index_gives_the_rows_that_loops_give(
    num_rows: int, rules: HashSettings, batches: list[list[int]], is_counted: bool
) -> None:
    index, loops = HashIndex(num_rows, rules, numba_search), Loops(num_rows, rules)
    for ids in batches:
        keys = torch.tensor(ids, dtype=torch.int64)
        seen = keys % 5 - 2 if is_counted else torch.ones_like(keys)
        rows, born = index.resolve(keys, training=True, columns={"count": seen} if is_counted else None)
        loops.see(ids, seen.tolist())
        assert rows.tolist() == [loops.row_of.get(key, NONE) for key in ids]
        assert set(index.keys[born].tolist()) == loops.born
        assert index.find(torch.arange(-3, 13)).tolist() == [
            loops.row_of.get(key, NONE) for key in range(-3, 13)
        ]
        for key, row in loops.row_of.items():
            assert (index.uses[row], index.last_use[row]) == (loops.uses[key], loops.last[key])
    assert (index.uses > 0).sum() == len(loops.row_of) <= num_rows
    assert index.num_evicted == loops.num_evicted


@pytest.mark.parametrize("steps_to_live", [0, 24])
@pytest.mark.parametrize("evict", ["lru", "lfu"])
def test_rows_that_make_room_are_those_of_loops_however_long_ago_all_were_looked_at(
    evict: str, steps_to_live: int
) -> None:
    """Of many rows some are known to make room next, while ids are used, born and given up."""
    rules, rng = HashSettings(evict, steps_to_live=steps_to_live), np.random.default_rng(0)
    index, loops = HashIndex(100, rules, numba_search), Loops(100, rules)
    for number in range(600):
        num_new = rng.integers(30) if number % 40 < 4 else rng.integers(3)
        ids = [*rng.integers(150, size=6).tolist(), *rng.integers(1000, 10_000, size=num_new).tolist()]
        rows, _ = index.resolve(torch.tensor(ids), training=True)
        loops.see(ids, [1] * len(ids))
        assert rows.tolist() == [loops.row_of.get(key, NONE) for key in ids]
    assert index.num_evicted == loops.num_evicted > 500


def test_row_that_was_given_up_and_has_another_id_makes_room_once() -> None:
    rules = HashSettings("lfu", steps_to_live=16)
    index, loops = HashIndex(100, rules, numba_search), Loops(100, rules)
    used = list(range(10, 100))
    for ids in (
        [*range(100), *range(100)],
        [1000],  # evicts one, so that others are known to make room next
        *[used] * 18,  # which are given up meanwhile
        list(range(2000, 2010)),
        list(range(3000, 3005)),
    ):
        rows, _ = index.resolve(torch.tensor(ids), training=True)
        loops.see(ids, [1] * len(ids))
        assert rows.tolist() == [loops.row_of.get(key, NONE) for key in ids]


def test_block_of_more_rows_than_slots_can_number_is_refused() -> None:
    with pytest.raises(sw.InvalidInputError, match="use more ranks"):
        HashIndex(1 << 31, HashSettings(), numba_search)


def test_mixed_is_the_finaliser_of_splitmix64() -> None:
    # The first outputs of splitmix64 seeded with 1234567, from its reference code's well-known test vector.
    state = np.cumsum(np.full(3, 0x9E3779B97F4A7C15, dtype=np.uint64)) + np.uint64(1234567)
    values = mixed(state.view(np.int64)).view(np.uint64)
    assert values.tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


def test_first_values_are_spread_evenly_and_differ_by_table_key_and_column() -> None:
    values, others = (
        first_values(torch.arange(2000), sw.ColumnRange(0, 16), table=table, scale=0.5).numpy()
        for table in ("users", "items")
    )
    assert abs(np.corrcoef(values.ravel(), others.ravel())[0, 1]) < 0.03
    cut = first_values(torch.arange(2000), sw.ColumnRange(12, 16), table="users", scale=0.5).numpy()
    assert np.array_equal(cut, values[:, 12:])
    assert values.dtype == np.float32
    assert np.abs(values).max() <= 0.5
    assert abs(values.mean()) < 0.01
    assert values.std() == pytest.approx(0.5 / np.sqrt(3), rel=0.02)
    assert len(np.unique(values)) > 0.99 * values.size


def test_ids_in_a_row_are_dealt_evenly() -> None:
    counts = np.bincount(HashedIds(100, parts=4).part_of(np.arange(40_000)))
    assert (abs(counts - 10_000) < 400).all()  # four standard deviations and more


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"evict": "mru"}, "no eviction 'mru'. Known: lfu, lru"),
        ({"evict": 3}, "evict must be the name of an eviction, got 3"),
        ({"min_sightings": 0}, "min_sightings must be a whole number from 1, got 0"),
        ({"steps_to_live": -1}, "steps_to_live must be a whole number from 0, got -1"),
        ({"steps_to_live": 1.5}, "steps_to_live must be a whole number from 0, got 1.5"),
        ({"count_column": 3}, "count_column must be the name of a column of ids, got 3"),
        ({"count_column": "weights"}, "count_column must be the name of a column of ids, got 'weights'"),
        ({"count_column": "values"}, "count_column must be the name of a column of ids, got 'values'"),
        ({"capacity": 3}, "unexpected keyword argument 'capacity'"),
    ],
)
def test_settings_that_cannot_be_raise(wrong: dict[str, object], text: str) -> None:
    with pytest.raises(sw.ShardwrightError, match=text):
        HashSettings.from_extras({"hash_embedding": wrong})


@pytest.mark.parametrize(
    ("of", "told"),
    [(lambda uses: uses[:1], r"\[1\]"), (lambda uses: 3, "3"), (lambda uses: uses / 0 * 0, "NaN")],
)
def test_score_that_is_none_of_each_row_is_refused(of: Any, told: str) -> None:
    mine = bringing("eviction:mine", lambda uses, last_use: of(uses))
    with use_host(PluginHost(plugins={"mine": mine})):
        index = HashIndex(2, HashSettings("mine"), numba_search)
    index.resolve(torch.tensor([1, 2]), training=True)
    with pytest.raises(
        sw.InvalidInputError, match=rf"the eviction 'mine' (must give .* 2 scores.*)?.*gave {told}"
    ):
        index.resolve(torch.tensor([3]), training=True)


def test_score_of_a_plugin_says_which_row_is_evicted() -> None:
    page = Path(shardwright_hash_embedding.__file__).parent.parent / "README.md"
    plugin = ModuleType("acme_decayed")
    exec(readme.source("acme_decayed.py", page), plugin.__dict__)
    with use_host(PluginHost(plugins={"acme_decayed": plugin})):
        index = HashIndex(2, HashSettings("decayed"), numba_search)
        for key in [1, 1, 1, *[2] * 3000, 3]:  # 2 is used more often and later than 1, and 3 needs a row
            index.resolve(torch.tensor([key]), training=True)
        assert sorted(index.keys.tolist()) == [2, 3]
        for _ in range(2):
            index.resolve(
                torch.tensor([4]), training=True
            )  # the uses of 2 count more than the one of 3, which is later
        assert sorted(index.keys.tolist()) == [2, 4]
