"""Conformance tests of row indexes, which kernels whose ids are keys look rows up by.

Legend: N keys, R rows of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from shardwright.contracts.lookup import RowIndex
from shardwright_testing.kernels.keys import SIGHTINGS, keys_of

CAPACITY = 8
"""Rows of the blocks that are tested."""


class RowIndexTests:
    """The tests of a row index: give the fixture ``make_index``, a function that makes one of ``R`` rows.

    They run on the CPU.
    """

    def test_keys_seen_often_enough_have_a_row_each(self, make_index: Callable[[int], RowIndex]) -> None:
        """Within three steps; what is born is said once, and a lookup without training finds the same rows."""
        index, keys, born = make_index(CAPACITY), keys_of(CAPACITY), list[Tensor]()
        for _ in range(SIGHTINGS):
            found, new = index.resolve(keys.repeat(2), training=True)
            born.append(new)
        rows = _rows_of(index, keys)
        assert rows.sort().values.tolist() == list(range(CAPACITY)), (
            f"{CAPACITY} keys, seen {SIGHTINGS} times in a block of {CAPACITY} rows, have the rows {rows.tolist()}"
        )
        assert torch.equal(found, rows.repeat(2)), (
            f"a step found the rows {found.tolist()}, a lookup after it {rows.repeat(2).tolist()}"
        )
        assert torch.cat(born).sort().values.tolist() == list(range(CAPACITY)), (
            f"the rows {torch.cat(born).tolist()} were born, each of {CAPACITY} must be once"
        )
        assert index.rows_in_use().tolist() == list(range(CAPACITY)), (
            f"rows_in_use() is {index.rows_in_use().tolist()}, all {CAPACITY} rows have keys"
        )

    def test_lookup_without_training_changes_nothing(self, make_index: Callable[[int], RowIndex]) -> None:
        """A key that was never trained has no row, and what is known of rows stays."""
        index, strangers = _filled(make_index(CAPACITY), keys_of(3)), keys_of(5, first=1000)
        before = _copy(index.state())
        for _ in range(SIGHTINGS):
            found, born = index.resolve(torch.cat([strangers, keys_of(3)]), training=False)
            assert found[:5].tolist() == [-1] * 5, f"keys never trained have the rows {found[:5].tolist()}"
            assert not len(born), f"a lookup without training bears the rows {born.tolist()}"
        after = index.state()
        changed = [name for name in before if not torch.equal(before[name], after[name])]
        assert not changed, f"a lookup without training changed {changed}"

    def test_full_index_keeps_the_keys_of_the_step_and_counts_evictions(
        self, make_index: Callable[[int], RowIndex]
    ) -> None:
        """Whatever it evicts or refuses, also in a step of more keys than rows; else a row stays one key's."""
        index, rows_of = make_index(CAPACITY), dict[int, int]()
        for step in range(12):
            num_new = CAPACITY if step % 3 == 2 else CAPACITY - 4
            keys = torch.cat(
                [keys_of(3), keys_of(num_new, first=10 + CAPACITY * step)]
            )  # old keys stay in use
            for _ in range(SIGHTINGS):
                kept, before = _rows_of(index, keys), index.num_evicted
                found, _ = index.resolve(keys, training=True)
                lost = [int(key) for key, old, new in zip(keys, kept, found, strict=True) if 0 <= old != new]
                assert not lost, f"keys {lost} lost the rows that the same step looks them up in"
                has = found[found >= 0].tolist()
                assert len(set(has)) == len(has), f"two keys have one row: {found.tolist()}"
                gone = [key for key in rows_of if int(_rows_of(index, torch.tensor([key]))) != rows_of[key]]
                assert index.num_evicted - before >= len(gone), (
                    f"{len(gone)} keys lost their rows, num_evicted grew by {index.num_evicted - before}"
                )
                rows_of = {key: row for key, row in rows_of.items() if key not in gone} | _pairs(keys, found)
        assert len(index.rows_in_use()) == len(rows_of) <= CAPACITY, (
            f"rows_in_use() has {len(index.rows_in_use())} rows, {len(rows_of)} keys have one"
        )

    def test_keys_move_with_what_is_known_of_them(self, make_index: Callable[[int], RowIndex]) -> None:
        """From one block to two and back, among rows that no key has: ``load`` says which row each was."""
        keys = keys_of(CAPACITY - 1)
        whole = _filled(make_index(CAPACITY), keys).state()
        name = next(iter(whole))
        halves = [
            _moved(make_index(CAPACITY), {other: value[part] for other, value in whole.items()}, keys)
            for part in (slice(None, None, 2), slice(1, None, 2))
        ]
        joined = {other: torch.cat([half.state()[other] for half in halves]) for other in whole}
        again = _moved(make_index(CAPACITY), joined, keys)
        found = _rows_of(again, keys)
        assert (found >= 0).all(), (
            f"of {len(keys)} keys {int((found < 0).sum())} have no row after they moved twice"
        )
        assert again.state()[name].flatten()[found].tolist() == keys.tolist(), (
            f"{name} does not have the key of each row"
        )


def _rows_of(index: RowIndex, keys: Tensor) -> Tensor:
    return index.resolve(keys, training=False)[0]


def _pairs(keys: Tensor, found: Tensor) -> dict[int, int]:
    return {int(key): int(row) for key, row in zip(keys, found, strict=True) if row >= 0}


def _copy(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in state.items()}


def _filled(index: RowIndex, keys: Tensor) -> RowIndex:
    for _ in range(SIGHTINGS):
        index.resolve(keys, training=True)
    return index


def _moved(index: RowIndex, state: Mapping[str, Tensor], keys: Tensor) -> RowIndex:
    """Load rows of other blocks, and check that keys and all else that is known of them came along."""
    given = _copy(state)
    _filled(index, keys_of(2, first=2000))  # which it forgets
    source = index.load(state)
    used = index.rows_in_use()
    assert source[used].ge(0).all(), (
        f"rows {used.tolist()} have keys; load() says they were {source[used].tolist()}"
    )
    name, *_ = given
    wanted = sorted(set(given[name].flatten().tolist()) & set(keys.tolist()))
    assert sorted(given[name][source[used]].flatten().tolist()) == wanted, (
        f"load() takes over the rows {source[used].tolist()}, of all {len(wanted)} keys there is room for"
    )
    for other, value in index.state().items():
        assert torch.equal(value[used], given[other][source[used]]), f"load() gives rows another {other}"
    return index
