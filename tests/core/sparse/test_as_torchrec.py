"""What TorchRec's batches hold besides ids in distinct bags, and do with it.

The expected values are what TorchRec 1.8.0 gave for the same calls.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shardwright import InvalidInputError, JaggedTensor, KeyedJaggedTensor, KeyedTensor


def test_float_values_are_held() -> None:
    values = torch.rand(3)
    batch = KeyedJaggedTensor(["a"], values, lengths=torch.tensor([1, 2]))
    assert torch.equal(batch["a"].values(), values)
    again = KeyedJaggedTensor.from_jt_dict(batch.to_dict())
    assert torch.equal(again.values(), values)


@pytest.mark.parametrize(
    "make", [JaggedTensor, lambda *own, **named: KeyedJaggedTensor(["a"], *own, **named)]
)
def test_lengths_beside_offsets_are_both_held(make: Any) -> None:
    lengths, offsets = torch.tensor([1, 2]), torch.tensor([0, 1, 3])
    batch = make(torch.arange(3), lengths=lengths, offsets=offsets)
    assert batch.lengths() is lengths
    assert batch.offsets() is offsets


def test_integer_weights_are_held() -> None:
    batch = KeyedJaggedTensor(["a"], torch.arange(3), torch.arange(3), torch.tensor([1, 2]))
    assert batch.weights().tolist() == [0, 1, 2]


def test_repeated_keys_are_held_and_the_last_one_is_found() -> None:
    batch = KeyedJaggedTensor(["a", "a"], torch.arange(3), lengths=torch.tensor([1, 2]))
    assert batch.keys() == ["a", "a"]
    assert batch["a"].values().tolist() == [1, 2]
    assert list(batch.to_dict()) == ["a"]
    assert batch.to_dict()["a"].values().tolist() == [1, 2]
    assert str(batch) == 'KeyedJaggedTensor({\n    "a": [[0]],\n    "a": [[1, 2]]\n})'


@pytest.mark.parametrize("weighted", [False, True])
def test_permute_repeats_keys(weighted: bool) -> None:
    values = torch.arange(3)
    weights = values / 2 if weighted else None
    batch = KeyedJaggedTensor(["a", "b"], values, weights, torch.tensor([1, 2])).permute([1, 0, 1])
    assert batch.keys() == ["b", "a", "b"]
    assert batch.values().tolist() == [1, 2, 0, 1, 2]
    assert batch.lengths().tolist() == [2, 1, 2]
    assert batch.length_per_key() == [2, 1, 2]
    assert batch["a"].values().tolist() == [0]
    if weighted:
        assert batch.weights().tolist() == [0.5, 1.0, 0.0, 0.5, 1.0]


def test_values_beyond_the_bags_are_held_and_belong_to_no_key() -> None:
    batch = KeyedJaggedTensor(
        ["a", "b"], torch.arange(5), torch.arange(5) / 2, offsets=torch.tensor([0, 1, 2, 3, 4])
    )
    assert batch.values().tolist() == [0, 1, 2, 3, 4]
    assert batch.length_per_key() == [2, 2]
    assert batch["b"].values().tolist() == [2, 3]
    assert batch.to_dict()["b"].weights().tolist() == [1.0, 1.5]
    assert batch.permute([1, 0]).values().tolist() == [2, 3, 0, 1]
    assert [part.values().tolist() for part in batch.split([1, 1])] == [[0, 1], [2, 3]]
    other = KeyedJaggedTensor(["z"], torch.arange(2), torch.arange(2) / 2, torch.tensor([1, 1]))
    joined = KeyedJaggedTensor.concat([batch, other])
    assert joined["z"].values().tolist() == [0, 1]
    assert joined["z"].weights().tolist() == [0.0, 0.5]


def test_known_sizes_are_taken_if_they_are_right() -> None:
    arguments: dict[str, Any] = {
        "keys": ["a", "b"],
        "values": torch.arange(3),
        "lengths": torch.tensor([1, 2]),
        "length_per_key": [1, 2],
        "lengths_offset_per_key": [0, 1, 2],
        "offset_per_key": (0, 1, 3),
        "index_per_key": {"a": 0, "b": 1},
        "jt_dict": {},
    }
    assert KeyedJaggedTensor(**arguments).offset_per_key() == [0, 1, 3]
    for name in ("length_per_key", "lengths_offset_per_key", "offset_per_key", "index_per_key"):
        wrong = {"a": 1, "b": 0} if name == "index_per_key" else [7, 8, 9]
        with pytest.raises(InvalidInputError, match=f"{name} is .*, but by keys and lengths it is"):
            KeyedJaggedTensor(**{**arguments, name: wrong})


def test_known_lengths_spare_reading_a_device() -> None:
    batch = KeyedJaggedTensor(
        ["a"],
        torch.empty(3, device="meta"),
        lengths=torch.empty(2, device="meta", dtype=torch.int64),
        length_per_key=[3],
    )
    assert batch.length_per_key() == [3]  # reading a meta tensor raises


def test_keyed_tensor_takes_known_places_if_they_are_right() -> None:
    arguments: dict[str, Any] = {
        "offset_per_key": [0, 1, 3],
        "index_per_key": {"a": 0, "b": 1},
    }
    assert KeyedTensor(["a", "b"], [1, 2], torch.ones(2, 3), **arguments).offset_per_key() == [0, 1, 3]
    with pytest.raises(InvalidInputError, match=r"offset_per_key is \[0, 2, 3\], but .* it is \[0, 1, 3\]"):
        KeyedTensor(["a", "b"], [1, 2], torch.ones(2, 3), offset_per_key=[0, 2, 3])
