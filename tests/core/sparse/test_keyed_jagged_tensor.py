from __future__ import annotations

from itertools import chain

import pytest
import torch

from shardwright import JaggedTensor, KeyedJaggedTensor, UnknownNameError

pytestmark = pytest.mark.usefixtures("ops_path")


Bags = dict[str, list[list[int]]]


def keyed(
    bags: Bags,
    stride: int,
    values_dtype: torch.dtype = torch.int64,
    *,
    weighted: bool = False,
) -> KeyedJaggedTensor:
    flat = list(chain.from_iterable(bags.values()))
    values = torch.tensor(list(chain.from_iterable(flat)), dtype=values_dtype)
    return KeyedJaggedTensor(
        keys=list(bags),
        values=values,
        weights=values.to(torch.float16) / 4 if weighted else None,
        lengths=torch.tensor([len(bag) for bag in flat]),
        stride=stride,
    )


def lists(kjt: KeyedJaggedTensor) -> Bags:
    return {key: [bag.tolist() for bag in jt.to_dense()] for key, jt in kjt.to_dict().items()}


def test_permute_with_a_tensor_of_indices_is_the_same() -> None:
    kjt = keyed({"a": [[1]], "b": [[2, 3]], "c": [[]]}, 1)
    permuted = kjt.permute([2, 0, 1], torch.tensor([2, 0, 1], dtype=torch.int32))
    assert lists(permuted) == {"c": [[]], "a": [[1]], "b": [[2, 3]]}


@pytest.mark.parametrize("compute_offsets", [False, True])
def test_to_dict_offsets_start_at_zero_for_each_key(compute_offsets: bool) -> None:
    jts = keyed({"a": [[1], [2, 3]], "b": [[], [4]]}, 2).to_dict(compute_offsets)
    assert (jts["b"].offsets_or_none() is not None) == compute_offsets
    assert [jt.offsets().tolist() for jt in jts.values()] == [[0, 1, 3], [0, 0, 1]]


def test_from_jt_dict_joins_weights_and_mixed_index_dtypes() -> None:
    parts = {
        "a": JaggedTensor(
            torch.tensor([1], dtype=torch.int32), torch.tensor([0.5]), torch.tensor([1, 0], dtype=torch.int32)
        ),
        "b": JaggedTensor(torch.tensor([2, 3]), torch.tensor([1.5, 2.5]), offsets=torch.tensor([0, 0, 2])),
    }
    kjt = KeyedJaggedTensor.from_jt_dict(parts)
    assert lists(kjt) == {"a": [[1], []], "b": [[], [2, 3]]}
    assert kjt.weights().tolist() == [0.5, 1.5, 2.5]
    assert kjt.length_per_key_or_none() == [1, 2]


def test_from_jt_dict_feature_without_ids_keeps_ids_integers() -> None:
    parts = {
        "a": JaggedTensor(torch.tensor([]), lengths=torch.tensor([0])),
        "b": JaggedTensor(torch.tensor([2], dtype=torch.int32), lengths=torch.tensor([1])),
    }
    kjt = KeyedJaggedTensor.from_jt_dict(parts)
    assert not kjt.values().is_floating_point()
    assert lists(kjt) == {"a": [[]], "b": [[2]]}


def test_from_jt_dict_with_variable_stride_takes_keys_of_different_numbers_of_bags() -> None:
    ids, lengths = torch.arange(3), {"a": torch.tensor([1, 2]), "b": torch.tensor([1, 1, 1])}
    parts = {key: JaggedTensor(ids, lengths=of_key) for key, of_key in lengths.items()}
    kjt = KeyedJaggedTensor.from_jt_dict(parts, force_variable_stride=True)
    assert kjt.stride_per_key_per_rank() == [[2], [3]]
    assert [bags.lengths().tolist() for bags in kjt.to_dict().values()] == [[1, 2], [1, 1, 1]]


def test_sync_and_unsync_remember_and_forget_the_counts() -> None:
    kjt = keyed({"a": [[1]]}, 1)
    assert kjt.length_per_key_or_none() is None
    assert kjt.offset_per_key_or_none() is None
    assert kjt.sync() is kjt
    assert kjt.length_per_key_or_none() == [1]
    assert kjt.unsync() is kjt
    assert kjt.length_per_key_or_none() is None
    assert kjt.offset_per_key_or_none() is None


@pytest.mark.parametrize("given", ["lengths", "offsets"])
@pytest.mark.parametrize("take", ["permute", "split", "to", "concat", "to_dict"])
def test_what_is_taken_of_a_batch_that_was_filled_again_has_its_bags_of_now(given: str, take: str) -> None:
    numbers = {"lengths": ([1, 0, 3, 1], [2, 2, 0, 1]), "offsets": ([0, 1, 1, 4, 5], [0, 2, 4, 4, 5])}
    before, now = map(torch.tensor, numbers[given])
    kjt = KeyedJaggedTensor(["a", "b"], torch.arange(5), **{given: before})
    assert lists(kjt) == {"a": [[0], []], "b": [[1, 2, 3], [4]]}
    assert (kjt.length_per_key(), len(kjt.lengths()), len(kjt.offsets())) == ([1, 4], 4, 5)
    before.copy_(now)
    takes = {
        "permute": lambda: kjt.permute([1, 0]),
        "split": lambda: KeyedJaggedTensor.concat(kjt.split([1, 1])),
        "to": lambda: kjt._map(torch.clone),
        "concat": lambda: KeyedJaggedTensor.concat([kjt]),
        "to_dict": lambda: kjt,
    }
    assert lists(takes[take]()) == {"a": [[0, 1], [2, 3]], "b": [[], [4]]}


def test_accessors_give_copies_that_may_be_changed() -> None:
    kjt = keyed({"a": [[1]]}, 1)
    for give in (kjt.keys, kjt.length_per_key, kjt.offset_per_key, kjt.index_per_key):
        give().clear()
    assert (kjt.keys(), kjt.length_per_key(), kjt.offset_per_key()) == (["a"], [1], [0, 1])
    assert kjt.index_per_key() == {"a": 0}


def test_lengths_as_a_matrix_of_keys_and_examples_are_flattened() -> None:
    kjt = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3]), lengths=torch.tensor([[1, 0], [0, 2]]))
    assert kjt.lengths().tolist() == [1, 0, 0, 2]
    assert kjt.flatten_lengths() is kjt


def test_values_and_lengths_empty_floats_are_taken_as_no_ids() -> None:
    kjt = KeyedJaggedTensor(["a"], torch.tensor([]), lengths=torch.tensor([]))
    assert (kjt.values().dtype, kjt.lengths().dtype, kjt.stride()) == (torch.int64, torch.int64, 0)


def test_stride_without_keys_is_what_was_given() -> None:
    kjt = KeyedJaggedTensor([], torch.tensor([]), lengths=torch.tensor([]), stride=3)
    assert (kjt.stride(), kjt.stride_per_key(), kjt.to_dict()) == (3, [], {})


@pytest.mark.parametrize("is_weighted", [False, True])
def test_empty_has_no_keys(is_weighted: bool) -> None:
    kjt = KeyedJaggedTensor.empty(is_weighted, values_dtype=torch.int32, weights_dtype=torch.float64)
    assert (kjt.keys(), kjt.stride(), kjt.offsets().tolist()) == ([], 0, [0])
    assert kjt.values().dtype == torch.int32
    weights = kjt.weights_or_none()
    assert (weights is None) != is_weighted
    assert weights is None or weights.dtype == torch.float64


def test_to_keeps_contents_counts_and_index_dtypes() -> None:
    kjt = keyed({"a": [[1], [2, 3]]}, 2, torch.int32, weighted=True).sync()
    moved = kjt.to(torch.device("cpu"), dtype=torch.float64)
    assert moved is not kjt
    assert moved.length_per_key_or_none() == [3]
    assert (moved.values().dtype, moved.weights().dtype) == (torch.int32, torch.float64)
    assert kjt.weights().dtype == torch.float16
    assert lists(moved) == lists(kjt)


def test_str_with_weights_shows_both() -> None:
    assert str(keyed({"a": [[1], []], "b": [[2], [3]]}, 2, weighted=True)) == (
        "KeyedJaggedTensor({\n"
        '    "a": {\n        "values": [[1], []],\n        "weights": [[0.25], []]\n    },\n'
        '    "b": {\n        "values": [[2], [3]],\n        "weights": [[0.5], [0.75]]\n    }\n})'
    )


def test_str_of_many_keys_is_abbreviated() -> None:
    text = str(
        KeyedJaggedTensor([f"f{i}" for i in range(100)], torch.arange(100), lengths=torch.ones(100).int())
    )
    assert '"f29": [[29]],\n    ... (70 more)' in text
    assert "f30" not in text


def test_repr_names_keys_and_sizes_and_does_not_read_tensors() -> None:
    assert repr(keyed({"a": [[1], []]}, 2).to("meta")) == (
        "KeyedJaggedTensor(keys=['a'], stride=2, values=1, dtype=int64, weighted=False, device='meta')"
    )


def test_getitem_unknown_key_names_the_nearest() -> None:
    kjt = KeyedJaggedTensor(["product", "user"], torch.tensor([1]), lengths=torch.tensor([1, 0]))
    with pytest.raises(
        UnknownNameError, match=r"no key 'prodct'\. It has 2: product, user\. Did you mean 'product'"
    ):
        kjt["prodct"]
