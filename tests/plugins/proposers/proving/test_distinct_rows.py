"""Distinct rows of patterns."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright_plugins.proposers.proving.columns.distinct_rows import distinct_rows, sorted_rows


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), max_size=12))
def test_distinct_rows_are_each_once_in_the_order_in_which_they_come_first(rows):
    given_rows = np.array(rows, dtype=np.float64).reshape(-1, 2)
    assert distinct_rows(given_rows).tolist() == [list(row) for row in dict.fromkeys(rows)]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(-2, 2), st.integers(0, 2)), max_size=12))
def test_sorted_rows_are_each_once_in_rising_order(rows):
    given_rows = np.array(rows, dtype=np.float64).reshape(-1, 2)
    assert sorted_rows(given_rows).tolist() == [list(row) for row in sorted(set(rows))]


def test_sorted_rows_import_no_masked_arrays():
    source = """
import sys
import numpy as np
before = "numpy.ma" in sys.modules  # NumPy 1 imports them itself
from shardwright_plugins.proposers.proving.columns.distinct_rows import sorted_rows
before = before or "numpy.ma" in sys.modules  # what is around it
sorted_rows(np.eye(3))
assert ("numpy.ma" in sys.modules) == before
"""
    subprocess.run([sys.executable, "-c", source], check=True)
