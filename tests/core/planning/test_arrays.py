"""Distinct values, as NumPy finds them."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.programs import printed_by

from shardwright.planning.arrays import distinct, without

NUMBERS = st.lists(st.integers(0, 12), max_size=30)


@given(values=NUMBERS)
def test_distinct_is_what_numpy_calls_unique(values):
    assert distinct(np.array(values, dtype=np.int64)).tolist() == np.unique(values).tolist()
    assert distinct(np.array(values, dtype=np.float64)).tolist() == sorted(set(map(float, values)))


@given(values=NUMBERS, others=NUMBERS)
def test_without_is_the_difference_of_sets(values, others):
    columns = (np.array(one, dtype=np.int64) for one in (values, others))
    assert without(*columns).tolist() == sorted(set(values) - set(others))


def test_distinct_imports_no_masked_arrays():
    source = """
import sys
import numpy as np
before = "numpy.ma" in sys.modules  # NumPy 1 imports them itself
from shardwright.planning.arrays import distinct, without
distinct(np.arange(3)), without(np.arange(3), np.arange(2))
assert ("numpy.ma" in sys.modules) == before
"""
    printed_by("-c", source)
