"""Helpers about jagged tensors under TorchRec's names."""

from __future__ import annotations

from typing import Any

import torch
from shardwright_torchrec.sparse.jagged_tensors import (
    jt_is_equal,
    kjt_is_equal,
)

import shardwright as sw


def batch(**other: Any) -> sw.KeyedJaggedTensor:
    arguments = {"keys": ["a", "b"], "values": torch.arange(4), "lengths": torch.tensor([1, 2, 0, 1])}
    return sw.KeyedJaggedTensor(**{**arguments, **other})


OTHERS: list[dict[str, Any]] = [
    {"keys": ["b", "a"]},
    {"values": torch.arange(1, 5)},
    {"lengths": torch.tensor([2, 1, 0, 1])},
    {"weights": torch.ones(4)},
    {"stride_per_key": [1, 3]},
    {"inverse_indices": (["a", "b"], torch.zeros(2, 2).long())},
]


def test_batches_are_equal_if_all_they_hold_is() -> None:
    assert kjt_is_equal(batch(), batch())
    for other in OTHERS:
        assert not kjt_is_equal(batch(), batch(**other))
        assert kjt_is_equal(batch(**other), batch(**other))


def test_other_things_equal_no_batch() -> None:
    assert not kjt_is_equal(batch(), "a text")  # type: ignore[arg-type]
    assert jt_is_equal(batch()["a"], batch()["a"])
    assert not jt_is_equal(batch()["a"], batch(weights=torch.ones(4))["a"])
    assert not jt_is_equal(batch()["a"], "a text")  # type: ignore[arg-type]
