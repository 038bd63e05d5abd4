"""Columns beside the ids: whatever is done to a batch is done to them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.utils import _pytree

from shardwright import InvalidInputError, KeyedJaggedTensor

IDS = torch.tensor([5, 6, 7, 8])
COUNT, TIME = torch.tensor([1, 2, 3, 4]), torch.tensor([0.5, 1.5, 2.5, 3.5])


def batch(**others: Any) -> KeyedJaggedTensor:
    columns = {"count": COUNT, "time": TIME}
    arguments = {"lengths": torch.tensor([1, 0, 2, 1]), "columns": columns, **others}
    return KeyedJaggedTensor(["a", "b"], IDS, **arguments)


def lists(kjt: KeyedJaggedTensor) -> dict[str, list[float]]:
    return {name: column.tolist() for name, column in kjt.columns().items()}


def test_weights_are_the_column_of_that_name() -> None:
    assert lists(batch(weights=TIME, columns={"count": COUNT})) == lists(
        batch(columns={"weights": TIME, "count": COUNT})
    )
    assert batch(columns={"weights": TIME}).weights() is TIME
    assert batch(weights=TIME, columns=None).columns() == {"weights": TIME}


@pytest.mark.parametrize(
    "same",
    [
        lambda kjt: kjt.to("cpu"),
        lambda kjt: pickle.loads(pickle.dumps(kjt)),
        copy.deepcopy,
        lambda kjt: _pytree.tree_map(torch.clone, kjt),
        lambda kjt: KeyedJaggedTensor.concat(kjt.split([1, 1])),
        lambda kjt: KeyedJaggedTensor.from_jt_dict(kjt.to_dict()),
        lambda kjt: kjt.permute([1, 0]).permute([1, 0]),
    ],
    ids=["to", "pickle", "copy", "tree_map", "split", "to_dict", "permute"],
)
@pytest.mark.parametrize("is_weighted", [False, True])
def test_columns_survive_what_is_done_to_the_batch(is_weighted: bool, same: Any) -> None:
    kjt = batch(weights=TIME * 2 if is_weighted else None)
    assert lists(same(kjt)) == lists(kjt)
    assert str(same(kjt)) == str(kjt)


def test_columns_go_with_the_ids_of_their_key() -> None:
    assert lists(batch().permute([1])) == {"count": [2, 3, 4], "time": [1.5, 2.5, 3.5]}
    assert {name: own.tolist() for name, own in batch()["a"].columns().items()} == {
        "count": [1],
        "time": [0.5],
    }
    assert list(KeyedJaggedTensor.empty_like(batch()).columns()) == ["count", "time"]


def test_columns_of_keys_with_batch_sizes_of_their_own_are_permuted() -> None:
    kjt = batch(weights=TIME, stride_per_key_per_rank=[[1], [3]], columns={"count": COUNT})
    assert lists(kjt.permute([1, 0])) == {"weights": [1.5, 2.5, 3.5, 0.5], "count": [2, 3, 4, 1]}
    assert lists(_pytree.tree_map(torch.clone, kjt)) == lists(kjt)


def test_columns_are_among_the_tensors_of_a_batch() -> None:
    kjt = batch(weights=TIME)
    assert kjt.size_in_bytes() == 8 * (4 + 4 + 4) + 4 * (4 + 4)
    names = [_pytree.keystr(path) for path, _ in _pytree.tree_flatten_with_path(kjt)[0]]
    assert names == [".values", ".lengths", ".weights", ".count", ".time"]


@pytest.mark.parametrize(
    ("column", "text"),
    [
        (COUNT[:3], r"column 'count' is torch.int64 \[3\] for 4 values"),
        (COUNT.int(), r"column 'count' is torch.int32 \[4\]"),
        (TIME.double(), r"column 'count' is torch.float64 \[4\]"),
        (COUNT.view(4, 1), "count must"),
        ([1, 2, 3, 4], "count"),
    ],
)
def test_column_of_another_length_or_dtype_is_refused(column: Any, text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        batch(columns={"count": column})


@pytest.mark.parametrize(
    "columns", [{"values": COUNT}, {"weights": TIME}, {3: COUNT}, [COUNT], {"": COUNT}, COUNT]
)
def test_name_that_no_column_may_have_is_refused(columns: Any) -> None:
    with pytest.raises(InvalidInputError, match="is not possible: names are strings"):
        batch(weights=TIME, columns=columns)


def test_numpy_columns_are_taken() -> None:
    arrays = {"count": COUNT.numpy(), "owner": TIME.numpy()}
    assert lists(batch(columns=arrays)) == {"count": COUNT.tolist(), "owner": TIME.tolist()}


def test_concat_of_a_column_of_two_dtypes_is_refused() -> None:
    """Joined they would be float32, which holds no count beyond 2**24."""
    first, second = batch(columns={"count": COUNT}).split([1, 1])
    other = KeyedJaggedTensor(["b"], second.values(), lengths=second.lengths(), columns={"count": TIME[1:]})
    with pytest.raises(InvalidInputError, match="the column 'count' is float32 and int64"):
        KeyedJaggedTensor.concat([first, other])


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
def test_concat_with_a_column_of_no_numbers_keeps_the_other_dtype(dtype: torch.dtype) -> None:
    empty = KeyedJaggedTensor(
        ["c"],
        IDS[:0],
        lengths=torch.zeros(2, dtype=torch.int64),
        columns={"count": torch.tensor([], dtype=dtype)},
    )
    found = KeyedJaggedTensor.concat([empty, batch(columns={"count": COUNT})]).columns()["count"]
    assert (found.dtype, found.tolist()) == (torch.int64, COUNT.tolist())


def test_every_constructor_takes_columns() -> None:
    keys, columns = ["a", "b"], {"count": COUNT, "time": TIME}
    lengths = torch.tensor([1, 0, 2, 1])
    offsets = torch.tensor([0, 1, 1, 3, 4])
    for made in (
        KeyedJaggedTensor.from_lengths_sync(keys, IDS, lengths, columns=columns),
        KeyedJaggedTensor.from_offsets_sync(keys, IDS, offsets, columns=columns),
        KeyedJaggedTensor.from_lists(
            {"a": [[5], []], "b": [[6, 7], [8]]},
            columns={
                "count": {"a": [[1], []], "b": [[2, 3], [4]]},
                "time": {"a": [[0.5], []], "b": [[1.5, 2.5], [3.5]]},
            },
        ),
    ):
        assert lists(made) == lists(batch())
        assert {name: own.dtype for name, own in made.columns().items()} == {
            "count": torch.int64,
            "time": torch.float32,
        }


@pytest.mark.parametrize(
    ("column", "text"),
    [
        ({"a": [[1], []]}, "'b' has only one of both"),
        ({"a": [[1], []], "b": [[2], [4]]}, "key 'b', example 0: 2 ids and 1 count"),
        ({"a": [[1], []], "b": [[2, "x"], [4]]}, "count of key 'b', example 0: 'x' is no count"),
        ([[1], []], "a mapping from each feature"),
    ],
)
def test_column_of_lists_that_does_not_fit_is_refused(column: Any, text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        KeyedJaggedTensor.from_lists({"a": [[5], []], "b": [[6, 7], [8]]}, columns={"count": column})
