"""A batch size per key: each operation is that of the keys one by one."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.utils import _pytree

from shardwright import InvalidInputError, KeyedJaggedTensor

BAGS = {"u": [[0, 1]], "i": [[2], [], [3, 4]], "z": [[5], [6]]}
PLACES = {"u": [0, 0, 0, 0], "i": [0, 1, 2, 1], "z": [0, 1, 1, 0]}


def keyed(*keys: str, weighted: bool = False, inverse: bool = True) -> KeyedJaggedTensor:
    bags = [bag for key in keys for bag in BAGS[key]]
    values = torch.tensor([value for bag in bags for value in bag])
    return KeyedJaggedTensor(
        list(keys),
        values,
        values / 2 if weighted else None,
        lengths=torch.tensor([len(bag) for bag in bags]),
        stride_per_key_per_rank=[[len(BAGS[key])] for key in keys],
        inverse_indices=(list(keys), torch.tensor([PLACES[key] for key in keys])) if inverse else None,
    )


def lists(batch: KeyedJaggedTensor) -> dict[str, list[list[int]]]:
    return {key: [bag.tolist() for bag in jagged.to_dense()] for key, jagged in batch.to_dict().items()}


def places(batch: KeyedJaggedTensor) -> dict[str, list[int]]:
    keys, rows = batch.inverse_indices()
    return dict(zip(keys, rows.tolist(), strict=True))


@pytest.mark.parametrize("weighted", [False, True])
def test_permute_split_and_concat_move_bags_sizes_and_places(weighted: bool) -> None:
    batch = keyed("u", "i", "z", weighted=weighted)
    turned = batch.permute([2, 0])
    assert lists(turned) == {"z": BAGS["z"], "u": BAGS["u"]}
    assert turned.stride_per_key() == [2, 1]
    assert places(turned)["z"] == PLACES["z"]
    assert lists(batch.permute([])) == {}
    first, rest = batch.split([1, 2])
    assert (lists(first), lists(rest)) == ({"u": BAGS["u"]}, {"i": BAGS["i"], "z": BAGS["z"]})
    assert (first.stride(), rest.stride_per_key(), rest.stride()) == (4, [3, 2], 4)
    joined = KeyedJaggedTensor.concat([keyed("z", weighted=weighted), keyed("u", "i", weighted=weighted)])
    assert list(lists(joined)) == ["z", "u", "i"]
    assert lists(joined) == BAGS
    assert places(joined) == PLACES
    if weighted:
        assert turned.weights().tolist() == [2.5, 3.0, 0.0, 0.5]


def test_concat_with_a_batch_of_one_size_takes_its_stride() -> None:
    same = KeyedJaggedTensor.from_lists({"a": [7, 8, 9]})
    joined = KeyedJaggedTensor.concat([same, keyed("u", "i", inverse=False)])
    assert joined.stride_per_key() == [3, 1, 3]
    assert lists(joined) == {"a": [[7], [8], [9]], "u": BAGS["u"], "i": BAGS["i"]}
    with pytest.raises(InvalidInputError, match="1 of 2 have inverse_indices"):
        KeyedJaggedTensor.concat([same, keyed("u")])


def test_without_places_the_stride_is_the_most_of_any_key() -> None:
    batch = keyed("u", "i", inverse=False)
    assert (batch.stride(), batch.inverse_indices_or_none()) == (3, None)
    with pytest.raises(InvalidInputError, match="it has no inverse indices"):
        batch.inverse_indices()


def test_offsets_and_sums_over_ranks_give_the_same() -> None:
    batch = KeyedJaggedTensor.from_offsets_sync(
        ["u", "i"],
        torch.arange(5),
        torch.tensor([0, 2, 3, 3, 5]),
        stride_per_key_per_rank=torch.tensor([[1, 0], [1, 2]]),
    )
    assert lists(batch) == {"u": BAGS["u"], "i": BAGS["i"]}
    assert batch.stride_per_key_per_rank() == [[1, 0], [1, 2]]
    assert KeyedJaggedTensor(
        ["u", "i"], torch.arange(5), offsets=torch.tensor([0, 2, 3, 3, 5]), stride_per_key=[1, 3]
    ).stride_per_key() == [1, 3]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("inverse", [False, True])
def test_moves_copies_and_trees_keep_sizes_and_places(weighted: bool, inverse: bool) -> None:
    batch = keyed("u", "i", "z", weighted=weighted, inverse=inverse)
    leaves, spec = _pytree.tree_flatten(batch)
    named, _ = _pytree.tree_flatten_with_path(batch)
    copies = [
        batch.to("cpu"),
        pickle.loads(pickle.dumps(batch)),
        _pytree.tree_unflatten(leaves, spec),
        _pytree.tree_map(lambda tensor: tensor.clone(), batch),
        _pytree.tree_unflatten(leaves, _pytree.treespec_loads(_pytree.treespec_dumps(spec))),
    ]
    for copy in copies:
        assert lists(copy) == BAGS
        assert copy.stride_per_key() == [1, 3, 2]
        assert (copy.inverse_indices_or_none() is None) != inverse
        assert not inverse or places(copy) == PLACES
    names = [str(path[0]) for path, _ in named]
    assert names == [
        ".values",
        ".lengths",
        *([".weights"] if weighted else []),
        *([".inverse_indices"] if inverse else []),
    ]
    moved = batch.to("meta")
    assert not inverse or moved.inverse_indices()[1].is_meta


def test_error_of_a_bag_names_key_and_example() -> None:
    with pytest.raises(InvalidInputError, match=r"lengths\[3\] \(key 'i', example 2\) is -1"):
        KeyedJaggedTensor(
            ["u", "i"],
            torch.arange(5),
            lengths=torch.tensor([2, 1, 3, -1]),
            stride_per_key_per_rank=[[1], [3]],
        ).validate()
