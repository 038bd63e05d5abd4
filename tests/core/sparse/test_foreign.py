"""Batches made of what others hold: nested lists, NumPy arrays and pandas; wrong ones raise where they are."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.errors import raises

from shardwright import DuplicateNameError, InvalidInputError, JaggedTensor, KeyedJaggedTensor

BAGS = {"user": [[7, 8], [], [9]], "item": [[1], [2, 2**62], []]}
WEIGHTS = {"user": [[0.5, 1.0], [], [2.0]], "item": [[1.5], [0.25, 3.0], []]}


def as_lists(batch: KeyedJaggedTensor) -> dict[str, list[list[int]]]:
    return {key: [bag.tolist() for bag in batch[key].to_dense()] for key in batch.index_per_key()}


def weights_as_lists(batch: KeyedJaggedTensor) -> dict[str, list[list[float]]]:
    return {key: [bag.tolist() for bag in batch[key].to_dense_weights()] for key in batch.index_per_key()}


def assert_is(batch: KeyedJaggedTensor, bags: dict[str, list[list[int]]] = BAGS) -> None:
    assert as_lists(batch) == bags
    assert batch.values().dtype is torch.int64
    assert batch.lengths().dtype is torch.int32


def variants() -> dict[str, Any]:
    """The same bags as others hold them."""
    arrays = {key: [np.array(bag, dtype=np.int64) for bag in bags] for key, bags in BAGS.items()}
    missing = {key: [bag or None for bag in bags] for key, bags in BAGS.items()}
    return {
        "lists": BAGS,
        "tuples": {key: tuple(map(tuple, bags)) for key, bags in BAGS.items()},
        "none": missing,
        "nan": {key: [bag or float("nan") for bag in bags] for key, bags in BAGS.items()},
        "arrays": arrays,
        "tensors": {
            key: [torch.tensor(bag, dtype=torch.int64) for bag in bags] for key, bags in BAGS.items()
        },
        "iterator": {key: iter(bags) for key, bags in BAGS.items()},
        "object array": {key: np.array([*bags, None], dtype=object)[:-1] for key, bags in BAGS.items()},
        "series": {key: pd.Series(bags) for key, bags in BAGS.items()},
        "frame": pd.DataFrame(BAGS),
        "frame of arrays": pd.DataFrame(arrays),
        "frame with an index": pd.DataFrame(missing, index=[5, 3, 4]),
        "frame of arrow": pa.table(missing).to_pandas(),
    }


@pytest.mark.parametrize("name", variants())
def test_from_lists_takes_bags_of_any_kind(name: str) -> None:
    assert_is(KeyedJaggedTensor.from_lists(variants()[name]))


@pytest.mark.parametrize(
    "column",
    [
        [7, 8, 9],
        [7, np.int32(8), torch.tensor([9])],
        np.array([7, 8, 9], dtype=np.uint16),
        np.array([[7], [8], [9]])[::1],
        torch.tensor([7, 8, 9], dtype=torch.int32),
        pd.Series([7, 8, 9]),
        pd.Series([7, 8, 9], dtype="Int64"),
    ],
)
def test_from_lists_takes_single_ids(column: Any) -> None:
    assert_is(KeyedJaggedTensor.from_lists({"user": column}), {"user": [[7], [8], [9]]})


def test_from_lists_missing_ids_of_pandas_are_empty_bags() -> None:
    column = pd.Series([7, pd.NA, 2**62 + 1], dtype="Int64")
    assert_is(KeyedJaggedTensor.from_lists({"user": column}), {"user": [[7], [], [2**62 + 1]]})


@pytest.mark.parametrize("make", [dict, pd.DataFrame], ids=["dict", "DataFrame"])
def test_from_lists_weights_stand_by_their_ids(make: Any) -> None:
    reordered = dict(reversed(WEIGHTS.items()))
    batch = KeyedJaggedTensor.from_lists(make(BAGS), make(reordered))
    assert weights_as_lists(batch) == WEIGHTS
    assert batch.weights().dtype is torch.float32


@given(
    st.integers(0, 4).flatmap(
        lambda num: st.dictionaries(
            st.text(max_size=3),
            st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=3), min_size=num, max_size=num),
            max_size=3,
        )
    )
)
def test_from_lists_holds_what_it_was_given(bags: dict[str, list[list[int]]]) -> None:
    assert as_lists(KeyedJaggedTensor.from_lists(bags)) == bags


@pytest.mark.parametrize(
    ("bags", "text"),
    [
        (5, r"from_lists: a mapping .* got int"),
        ([[7]], r"a mapping from each feature to its bags .* got list"),
        ({"user": 7}, r"key 'user': a list with a bag for each example is needed, got 7"),
        ({"user": "abc"}, r"key 'user': a list .* got 'abc'"),
        ({"user": [[7], "abc"]}, r"key 'user', example 1: a bag is .* got 'abc'"),
        ({"user": [[7], {7: 1}]}, r"key 'user', example 1: a bag is"),
        ({"user": [[7], [8, "abc"]]}, r"key 'user', example 1: 'abc' is no id.*Hash"),
        ({"user": [[7], [], [8.5]]}, r"key 'user', example 2: 8\.5 is no id"),
        ({"user": [[7], [None]]}, r"key 'user', example 1: None is no id"),
        ({"user": [[7], [[8]]]}, r"key 'user', example 1: \[8\] is no id"),
        ({"user": [[7], [2**63]]}, r"key 'user', example 1: 9223372036854775808 is no id: .* below 2\*\*63"),
        ({"user": [[7], [2**70]]}, r"key 'user', example 1: 1180591620717411303424 is no id"),
        ({"user": [True, False]}, r"key 'user', example 0: True is no id"),
        ({"user": np.array([1.0, 2.0])}, r"key 'user', example 0: .*1\.0.* is no id"),
        ({"user": np.array([1, 2**63], dtype=np.uint64)}, r"key 'user', example 1: .*9223372036854775808"),
        (
            {"user": np.zeros((2, 2, 2))},
            r"an array must be \[examples\] or \[examples, ids\], got \[2, 2, 2\]",
        ),
        ({"user": pd.Series([7, None, 9])}, r"example 0: .*7\.0.* is no id.*astype\('Int64'\)"),
        ({"user": [[7]], "item": [[7], [8]]}, r"key 'user' has 1 examples, key 'item' has 2"),
        ({3: [[7]]}, r"keys must be strings, got 3"),
    ],
)
def test_from_lists_wrong_bags_raise_with_key_and_example(bags: Any, text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        KeyedJaggedTensor.from_lists(bags)


@pytest.mark.parametrize(
    ("weights", "text"),
    [
        ({"user": WEIGHTS["user"]}, r"'item' has only one of both"),
        ({**WEIGHTS, "shop": [[], [], []]}, r"'shop' has only one of both"),
        ({**WEIGHTS, "user": [[0.5], [], [1.0]]}, r"key 'user', example 0: 2 ids and 1 weights"),
        ({**WEIGHTS, "user": [[0.5, 1.0]]}, r"key 'user' has ids of 3 examples, and weights of 1"),
        ({**WEIGHTS, "user": [[0.5, "x"], [], [1.0]]}, r"weights of key 'user', example 0: 'x' is no weight"),
    ],
)
def test_from_lists_wrong_weights_raise_with_key_and_example(weights: Any, text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        KeyedJaggedTensor.from_lists(BAGS, weights)


def test_columns_of_one_name_raise() -> None:
    with pytest.raises(DuplicateNameError, match="key 'user' occurs at positions 0 and 1"):
        KeyedJaggedTensor.from_lists(pd.DataFrame([[1, 2]], columns=["user", "user"]))


def test_constructor_arrays_that_torch_cannot_hold_as_they_are_are_copied() -> None:
    values = np.arange(6)[::-2]  # a step backwards
    lengths = np.array([1, 2])
    lengths.flags.writeable = False
    batch = KeyedJaggedTensor(["a"], values, lengths=lengths)
    assert batch.values().tolist() == [5, 3, 1]
    assert batch.lengths().tolist() == [1, 2]


def test_constructor_array_of_objects_is_an_error_that_names_from_lists() -> None:
    ragged = np.array([[1], [2, 3], None], dtype=object)[:-1]
    with pytest.raises(InvalidInputError, match=r"array of object.*from_lists"):
        KeyedJaggedTensor(["a"], ragged, lengths=np.array([1, 2]))


@pytest.mark.parametrize("keys", [np.array(["a"]), pd.Index(["a"]), {"a": 1}.keys()])
def test_keys_and_strides_as_others_hold_them_are_taken(keys: Any) -> None:
    batch = KeyedJaggedTensor(keys, torch.tensor([7]), lengths=torch.tensor([1]), stride=np.int64(1))
    assert as_lists(batch) == {"a": [[7]]}


def masked(values: Any, *places: Any) -> Any:
    array = np.ma.array(values)
    for place in places:
        array[place] = np.ma.masked
    return array


@pytest.mark.parametrize("column", [masked([7, 8, 9], 1), [7, np.ma.masked, 9], [[7], np.ma.masked, [9]]])
def test_from_lists_masked_bags_are_empty(column: Any) -> None:
    assert_is(KeyedJaggedTensor.from_lists({"user": column}), {"user": [[7], [], [9]]})


def test_arrays_of_which_nothing_is_masked_are_arrays() -> None:
    assert_is(KeyedJaggedTensor.from_lists({"user": masked([7, 8])}), {"user": [[7], [8]]})
    batch = KeyedJaggedTensor(["user"], masked([7, 8]), lengths=masked([1, 1]))
    assert as_lists(batch) == {"user": [[7], [8]]}


@pytest.mark.parametrize(
    ("bags", "weights"),
    [
        (masked([[7, 8], [9, 1]], (0, 1)), None),
        ([masked([7, 8], 1), np.array([9])], None),
        ([[7, np.ma.masked], [9]], None),
        ([[7, 8], [9]], [[0.5, np.ma.masked], [1.0]]),
        ([[7, 8], [9]], [masked([0.5, 1.0], 1), [1.0]]),
    ],
)
def test_from_lists_masked_numbers_in_a_bag_raise(bags: Any, weights: Any) -> None:
    with pytest.raises(InvalidInputError, match="key 'user', example 0"):
        KeyedJaggedTensor.from_lists({"user": bags}, None if weights is None else {"user": weights})


WRONG_TENSORS = {
    "mask": lambda values: masked(np.array(values), 0),
    "sparse_coo": lambda values: torch.tensor(values).to_sparse(),
    "nested": lambda values: torch.nested.nested_tensor([torch.tensor(values)], layout=torch.jagged),
}


@pytest.mark.parametrize("asked", WRONG_TENSORS)
@pytest.mark.parametrize("argument", ["values", "weights", "lengths", "offsets"])
@pytest.mark.parametrize("kind", [JaggedTensor, partial(KeyedJaggedTensor, ["user"])])
def test_masked_and_sparse_arguments_raise_naming_them(kind: Any, argument: str, asked: str) -> None:
    arguments: dict[str, Any] = {"values": [1, 2], "weights": [1.0, 2.0]}
    arguments |= {"offsets": [0, 2]} if argument == "offsets" else {"lengths": [2]}
    tensors = {name: torch.tensor(values) for name, values in arguments.items()}
    with raises(InvalidInputError, subject=argument, asked=asked):
        kind(**{**tensors, argument: WRONG_TENSORS[asked](arguments[argument])})


def test_from_lists_of_sparse_bags_raises() -> None:
    with raises(InvalidInputError, asked="sparse_coo"):
        KeyedJaggedTensor.from_lists({"user": torch.tensor([1, 0]).to_sparse()})


def test_concat_names_the_part_that_is_no_batch() -> None:
    good = KeyedJaggedTensor(["user"], torch.tensor([1]), lengths=torch.tensor([1]))
    wrong = KeyedJaggedTensor(["item"], torch.tensor([1]), offsets=torch.tensor([0, 5]))
    with raises(InvalidInputError, subject="part 1"):
        KeyedJaggedTensor.concat([good, wrong])
