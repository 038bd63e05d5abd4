from __future__ import annotations

from itertools import combinations, permutations

from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.planning.tables.conflicts import smallest_conflict, too_many_for_their_ranks


def distinct(numbers):
    return len(set(numbers)) == len(numbers)


def test_smallest_conflict_of_what_is_possible_is_none():
    assert smallest_conflict([1, 2, 3], distinct) is None


def test_smallest_conflict_names_the_smallest_set_and_nothing_else():
    assert smallest_conflict([1, 2, 3, 2, 4], distinct) == (2, 2)


def test_smallest_conflict_of_the_impossible_is_empty():
    assert smallest_conflict([1, 2], lambda demands: False) == ()


def test_smallest_conflict_among_many_demands_cannot_lose_one():
    conflict = smallest_conflict(range(100), lambda numbers: len(numbers) < 60)
    assert conflict is not None
    assert len(conflict) == 60


def has_matching(allowed):
    ranks = sorted({rank for some in allowed.values() for rank in some})
    if len(ranks) < len(allowed):
        return False
    return any(
        all(rank in some for rank, some in zip(chosen, allowed.values(), strict=True))
        for chosen in permutations(ranks, len(allowed))
    )


@settings(max_examples=300)
@given(
    st.dictionaries(
        st.integers(0, 9), st.sets(st.integers(0, 3), max_size=3).map(sorted), min_size=1, max_size=5
    )
)
def test_too_many_for_their_ranks_agrees_with_all_assignments(allowed):
    crowded = too_many_for_their_ranks(allowed)
    assert (crowded is None) == has_matching(allowed)
    if crowded is not None:
        shares = [{unit: allowed[unit] for unit in crowded if unit != left} for left in crowded]
        assert not has_matching({unit: allowed[unit] for unit in crowded})
        assert all(not share or has_matching(share) for share in shares)


@settings(max_examples=200)
@given(st.lists(st.sets(st.integers(0, 5), min_size=1), min_size=1, max_size=6))
def test_smallest_conflict_has_the_size_that_trying_all_gives(sets):
    def agree(some):
        return not some or bool(set.intersection(*some))

    conflict = smallest_conflict(sets, agree)
    sizes = [size for size in range(1, len(sets) + 1) for some in combinations(sets, size) if not agree(some)]
    assert (len(conflict) if conflict is not None else None) == (min(sizes) if sizes else None)
