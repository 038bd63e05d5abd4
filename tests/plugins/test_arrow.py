"""Batches made of Arrow tables and of what pyarrow makes one of; wrong columns raise with their names."""

from __future__ import annotations

import builtins
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.sparse.test_foreign import BAGS, WEIGHTS, as_lists, assert_is, weights_as_lists

from shardwright.errors import DuplicateNameError, InvalidInputError, UnsupportedError
from shardwright_plugins.arrow import from_arrow


@given(
    st.integers(0, 4).flatmap(
        lambda num: st.dictionaries(
            st.text(max_size=3),
            st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3), min_size=num, max_size=num),
            max_size=3,
        )
    )
)
def test_from_arrow_holds_what_it_was_given(bags: dict[str, list[list[int]]]) -> None:
    table = pa.table({key: pa.array(own, pa.list_(pa.int64())) for key, own in bags.items()})
    assert as_lists(from_arrow(table)) == bags


def test_columns_of_one_name_raise() -> None:
    table = pa.table([pa.array([1]), pa.array([2])], names=["user", "user"])
    with pytest.raises(DuplicateNameError, match="2 columns are called 'user'"):
        from_arrow(table, ["user"])


def arrow_variants() -> dict[str, Any]:
    table = pa.table(BAGS)
    wide = pa.table({key: [[0, 0], *bags, None] for key, bags in BAGS.items()})
    return {
        "table": table,
        "record batch": table.to_batches()[0],
        "large lists": table.cast(pa.schema([(key, pa.large_list(pa.int64())) for key in BAGS])),
        "unsigned": table.cast(pa.schema([(key, pa.list_(pa.uint64())) for key in BAGS])),
        "nulls": pa.table({key: [bag or None for bag in bags] for key, bags in BAGS.items()}),
        "sliced": wide.slice(1, 3),
        "chunks": pa.concat_tables([wide.slice(1, 1), wide.slice(2, 2)]),
        "pandas": pd.DataFrame(BAGS, index=[4, 2, 3]),
        "dict": BAGS,
    }


@pytest.mark.parametrize("name", arrow_variants())
def test_from_arrow_takes_lists_of_any_kind(name: str) -> None:
    assert_is(from_arrow(arrow_variants()[name]))


def test_from_arrow_takes_single_ids_fixed_lists_and_columns_of_nulls() -> None:
    table = pa.table(
        {
            "user": pa.array([7, None, 9], pa.uint32()),
            "pair": pa.array([[1, 2], None, [3, 4]], pa.list_(pa.int16(), 2)),
            "none": pa.array([[], [], None]),
        }
    )
    expected = {"user": [[7], [], [9]], "pair": [[1, 2], [], [3, 4]], "none": [[], [], []]}
    assert_is(from_arrow(table), expected)


def test_from_arrow_weights_are_columns_of_their_own() -> None:
    table = pa.table({**BAGS, "by_user": WEIGHTS["user"], "by_item": WEIGHTS["item"]})
    batch = from_arrow(table, weights={"item": "by_item", "user": "by_user"})
    assert_is(batch)
    assert weights_as_lists(batch) == WEIGHTS


def test_from_arrow_keys_select_and_order_columns() -> None:
    batch = from_arrow(pa.table({**BAGS, "name": ["x", "y", "z"]}), ["item", "user"])
    assert_is(batch, {"item": BAGS["item"], "user": BAGS["user"]})
    assert batch.keys() == ["item", "user"]


@pytest.mark.parametrize(
    ("data", "options", "text"),
    [
        ({"user": ["x"]}, {}, r"column 'user': ids must be integers, .* got string. Hash strings"),
        ({"user": [[1.5]]}, {}, r"column 'user': ids must be integers, .* got double. Cast them"),
        ({"user": [[1, None]]}, {}, r"column 'user': 1 of the numbers in its bags are null"),
        ({"user": pa.array([2**63], pa.uint64())}, {}, r"column 'user': .*9223372036854775808"),
        ({"user": [[1]], "w": [["x"]]}, {"weights": {"user": "w"}}, r"column 'w': weights must be numbers"),
        ({"user": [[1]], "w": [[1.0, 2.0]]}, {"weights": {"user": "w"}}, r"'user', example 0: 1 ids and 2 w"),
        (5, {}, r"pyarrow makes no table of a int"),
    ],
)
def test_from_arrow_wrong_columns_raise_with_their_names(data: Any, options: Any, text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        from_arrow(pa.table(data) if isinstance(data, dict) else data, **options)


def test_from_arrow_without_pyarrow_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *arguments: Any, **options: Any) -> Any:
        if name.partition(".")[0] == "pyarrow":
            raise ImportError("no pyarrow")
        return real(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(UnsupportedError, match="pip install pyarrow"):
        from_arrow({"user": [[1]]})
