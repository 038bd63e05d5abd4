"""Batches of any form."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass

import attrs
import pytest
import torch

from shardwright.sparse import JaggedTensor, KeyedJaggedTensor
from shardwright_plugins.pipeline.batch_tree import (
    follow,
    is_same,
    leaves,
    mapped,
    moved,
    path_text,
    without_examples,
)


def features(*, is_weighted: bool = False) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(
        keys=["a", "b"],
        values=torch.arange(5),
        lengths=torch.tensor([1, 0, 2, 2, 0, 0]),
        weights=torch.rand(5) if is_weighted else None,
    )


Pair = namedtuple("Pair", ["dense", "sparse"])


@dataclass(frozen=True)
class Frozen:
    sparse: KeyedJaggedTensor
    labels: torch.Tensor


@attrs.frozen
class Slotted:
    sparse: KeyedJaggedTensor
    labels: torch.Tensor


class Plain:
    def __init__(self, sparse: KeyedJaggedTensor, labels: torch.Tensor) -> None:
        self.sparse, self.labels, self.itself = sparse, labels, self


FORMS = {
    "tuple": lambda sparse: (torch.ones(3, 2), sparse),
    "list in dict": lambda sparse: {"x": [sparse, "name", None], "y": torch.ones(3)},
    "named tuple": lambda sparse: Pair(torch.ones(3, 2), [sparse]),
    "frozen dataclass": lambda sparse: Frozen(sparse, torch.ones(3)),
    "attrs with slots": lambda sparse: {"inside": Slotted(sparse, torch.ones(3))},
    "an object that knows itself": lambda sparse: Plain(sparse, torch.ones(3)),
    "itself": lambda sparse: sparse,
}


@pytest.mark.parametrize("form", FORMS)
def test_leaf_is_found_and_its_path_leads_to_it_in_another_batch(form):
    one, other = features(), features()
    batch = FORMS[form](one)
    (path,) = [path for path, leaf in leaves(batch) if leaf is one]
    assert follow(FORMS[form](other), path) is other


def test_long_list_of_names_is_not_searched_and_a_mixed_tuple_is():
    sparse = features()
    names: list[object] = ["name"] * 100
    assert list(leaves({"names": [*names, sparse]})) == []
    assert [leaf for _, leaf in leaves((3, "name", sparse))] == [sparse]


def test_path_reads_as_python():
    ((path, _),) = leaves({"x": [0, Slotted]} | {"y": (None, features())})
    assert path_text(path) == "batch['y'][1]"
    paths = [path_text(path) for path, _ in leaves(Plain(features(), torch.ones(3)))]
    assert paths == ["batch.sparse", "batch.labels"]


@pytest.mark.parametrize("form", [form for form in FORMS if form != "an object that knows itself"])
def test_mapped_changes_leaves_and_nothing_else(form):
    batch = FORMS[form](features())
    assert mapped(batch, lambda leaf: leaf) is batch
    doubled = mapped(batch, lambda leaf: leaf * 2 if isinstance(leaf, torch.Tensor) else leaf)
    assert type(doubled) is type(batch)
    for (path, after), (other, before) in zip(leaves(doubled), leaves(batch), strict=True):
        assert path == other
        assert after is before if not isinstance(before, torch.Tensor) else bool((after == 2).all())
    assert all(bool((leaf == 1).all()) for _, leaf in leaves(batch) if isinstance(leaf, torch.Tensor))


@pytest.mark.parametrize("is_weighted", [False, True])
def test_without_examples_keeps_all_but_the_examples(is_weighted):
    sparse = features(is_weighted=is_weighted)
    empty = without_examples({"sparse": sparse, "dense": torch.ones(3, 2), "scale": torch.ones(7), "x": 1})
    assert empty["sparse"].keys() == ["a", "b"]
    assert empty["sparse"].stride() == 0
    assert empty["sparse"].values().dtype == sparse.values().dtype
    assert (empty["sparse"].weights_or_none() is not None) == is_weighted
    assert empty["dense"].shape == (0, 2)
    assert (empty["scale"].shape, empty["x"]) == ((7,), 1)


def test_same_means_the_same_tensors():
    one = features(is_weighted=True)
    assert is_same(one, one)
    assert is_same(one, one.to("cpu"))
    assert not is_same(one, features(is_weighted=True))
    assert not is_same(one, KeyedJaggedTensor(["a", "c"], one.values(), one.weights(), one.lengths()))
    assert not is_same(one, KeyedJaggedTensor(["a", "b"], one.values(), None, one.lengths()))
    assert not is_same(one, KeyedJaggedTensor(["a", "b"], one.values(), one.weights(), one.lengths().clone()))


def test_moved_uses_a_to_of_the_batch_and_leaves_what_is_there():
    class Own:
        def __init__(self) -> None:
            self.labels = torch.ones(2)

        def to(self, device: torch.device, non_blocking: bool) -> str:
            return f"{device}, {non_blocking}"

    batch = (torch.ones(2), features(), JaggedTensor(torch.ones(1), lengths=torch.tensor([1])))
    assert moved(batch, torch.device("cpu")) is batch
    assert moved(Own(), torch.device("meta")) == "meta, True"
