"""Tests of combinations: in each run as many as show each pair of values together, all in the slow one."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import pytest


def pairwise(combinations: Iterable[tuple[object, ...]]) -> list[object]:
    """Values for `parametrize`, several names a test.

    Args:
        combinations: all of them, each with the same number of values, at least two.

    Returns:
        All combinations. Every pair of values of two names that occurs in one of them occurs in one that is not
        marked slow.
    """
    every = list(combinations)
    quick = covering(every)
    return [
        pytest.param(*combination, marks=() if combination in quick else pytest.mark.slow)
        for combination in every
    ]


def in_turns(few: Sequence[object], many: Sequence[object]) -> list[object]:
    """Values for `parametrize` of two names: all combinations; in each run each of ``many`` once, ``few`` in turns."""
    return [
        pytest.param(one, other, marks=() if (first + second) % len(few) == 0 else pytest.mark.slow)
        for (first, one), (second, other) in itertools.product(enumerate(few), enumerate(many))
    ]


def each_once(*axes: Sequence[object]) -> list[object]:
    """Values for `parametrize`, a name an axis: all combinations; in each run each value once, short axes in turns."""
    longest = max(map(len, axes))
    quick = {tuple(axis[number % len(axis)] for axis in axes) for number in range(longest)}
    return [
        pytest.param(*combination, marks=() if combination in quick else pytest.mark.slow)
        for combination in itertools.product(*axes)
    ]


def covering(combinations: Iterable[tuple[object, ...]]) -> set[tuple[object, ...]]:
    """Some of the combinations, with every pair of values that occurs in any of them."""
    pairs = {combination: pairs_of(combination) for combination in combinations}
    missing = set().union(*pairs.values())
    chosen = set()
    while missing:
        best = max(pairs, key=lambda combination: len(pairs[combination] & missing))  # the first of equals
        missing -= pairs[best]
        chosen.add(best)
    return chosen


def pairs_of(combination: tuple[object, ...]) -> set[object]:
    """All pairs of values of a combination, each value with its place."""
    return set(itertools.combinations(enumerate(combination), 2))
