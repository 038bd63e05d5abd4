"""Empty batches that ranks send each other as text."""

from __future__ import annotations

import datetime
import json
import pickle
from collections import OrderedDict, namedtuple
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import attrs
import numpy as np
import pytest
import torch

from shardwright.errors import UnsupportedError
from shardwright.runtime.pipeline.batch_form import from_text, to_text
from shardwright.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor

Pair = namedtuple("Pair", ["dense", "sparse"])


class Split(Enum):
    TRAIN = "train"


@dataclass(frozen=True)
class Frozen:
    labels: torch.Tensor
    names: list[str] = field(default_factory=list)


@attrs.frozen
class Slotted:
    labels: torch.Tensor


class Itself:
    def __init__(self) -> None:
        self.itself, self.own = self, {}
        self.own["me"] = self


class Shouting:
    """An object that must be made without a call of its class."""

    def __init__(self) -> None:
        self.value = 1

    def __reduce__(self) -> Any:
        raise AssertionError("it is pickled")


@pytest.fixture(autouse=True)
def nothing_is_pickled(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*arguments: Any) -> Any:
        raise AssertionError("it is pickled")

    for name in ("loads", "load", "dumps", "dump", "Unpickler", "Pickler"):
        monkeypatch.setattr(pickle, name, refused)


def there_and_back(value: Any) -> Any:
    text = to_text(value)
    assert isinstance(text, str)
    return from_text(text)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        2.5,
        float("inf"),
        "é",
        b"\x00\xff",
        [1, ["a", None]],
        (1, (2,)),
        {"a": 1, 2: (3,), None: {}},
        OrderedDict([("b", 1), ("a", 2)]),
        torch.Size([2, 3]),
        torch.device("cpu"),
        torch.float16,
        np.int64(5),
        Split.TRAIN,
        Pair(1, [2]),
    ],
    ids=repr,
)
def test_value_comes_back(value: Any) -> None:
    back = there_and_back(value)
    assert type(back) is type(value)
    assert back == value


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(0, 3), (), (2, 3)])
def test_tensor_comes_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape).to(dtype)
    back = there_and_back({"x": tensor})["x"]
    assert (back.dtype, back.shape) == (dtype, tensor.shape)
    assert torch.equal(back, tensor)


def test_array_comes_back() -> None:
    array = np.arange(6, dtype=np.int16).reshape(2, 3)
    back = there_and_back((array, np.array(["a", "bc"])))
    np.testing.assert_array_equal(back[0], array)
    assert back[0].dtype == array.dtype
    assert back[1].tolist() == ["a", "bc"]


@pytest.mark.parametrize("is_weighted", [False, True])
def test_sparse_tensors_come_back(is_weighted: bool) -> None:
    weights = torch.tensor([0.5, 1.5]) if is_weighted else None
    lengths = torch.tensor([1, 0, 0, 1])
    keyed = KeyedJaggedTensor(["a", "b"], torch.tensor([3, 4]), weights, lengths=lengths)
    jagged = JaggedTensor(torch.tensor([3, 4]), weights, lengths=lengths)
    dense = KeyedTensor(["a", "b"], [1, 2], torch.ones(2, 3))
    first, second, third = there_and_back([keyed, jagged, dense])
    assert (first.keys(), first.stride(), third.length_per_key()) == (["a", "b"], 2, [1, 2])
    for back, value in ((first, keyed), (second, jagged)):
        assert torch.equal(back.values(), value.values())
        assert torch.equal(back.lengths(), value.lengths())
        assert (back.weights_or_none() is None) == (weights is None)
        assert weights is None or torch.equal(back.weights(), weights)
    assert torch.equal(third.values(), dense.values())


def test_batch_without_bags_has_its_keys() -> None:
    none = KeyedJaggedTensor(
        ["a", "b"], torch.empty(0, dtype=torch.int64), lengths=torch.empty(0, dtype=torch.int64)
    )
    back = there_and_back(none)
    assert (back.keys(), back.stride(), back.values().dtype) == (["a", "b"], 0, torch.int64)


def test_objects_come_back_without_a_call_of_their_class() -> None:
    back = there_and_back([Frozen(torch.zeros(0), ["x"]), Slotted(torch.zeros(0)), Shouting()])
    assert [type(value) for value in back] == [Frozen, Slotted, Shouting]
    assert (back[0].names, back[1].labels.shape, back[2].value) == (["x"], (0,), 1)


def test_objects_that_refer_to_each_other_still_do() -> None:
    back = there_and_back(Itself())
    assert back.itself is back
    assert back.own["me"] is back


@pytest.mark.parametrize(
    "value", [lambda: 1, datetime.date(2020, 1, 1), {1, 2}, np.array([None]), object(), len]
)
def test_what_has_no_plain_form_is_refused(value: Any) -> None:
    with pytest.raises(UnsupportedError, match="has no plain form"):
        to_text({"x": [value]})


def test_class_that_others_cannot_find_is_refused() -> None:
    class Local:
        def __init__(self) -> None:
            self.value = 1

    with pytest.raises(UnsupportedError, match=r"knows no class .*Local: import it on all ranks"):
        to_text(Local())


@pytest.mark.parametrize("name", ["antigravity:Any", "os:system", "os.path:join", "nowhere:X"])
def test_text_imports_and_calls_nothing(name: str) -> None:
    with pytest.raises(UnsupportedError, match="knows no class"):
        from_text(json.dumps(["object", [name, []]]))
