"""Which way is taken, and that both give the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.sparse import JaggedTensor, KeyedJaggedTensor, _ops


class Operators(TorchDispatchMode):
    """Records the names of FBGEMM's operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.fbgemm: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "fbgemm":
            self.fbgemm.append(name)
        return func(*args, **(kwargs or {}))


def example() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 0, 0, 2]))


def test_operators_called_are_those_of_the_path(ops_path: str) -> None:
    kjt = example()
    with Operators() as operators:
        kjt.offsets()
        kjt.permute([1, 0])
        JaggedTensor(torch.tensor([1, 2]), offsets=torch.tensor([0, 2])).to_padded_dense(1)
    expected = ["asynchronous_complete_cumsum", "permute_2D_sparse_data", "jagged_to_padded_dense_forward"]
    assert operators.fbgemm == (expected if ops_path == "fbgemm" else [])


def test_permute_large_batch_on_a_cpu_joins_runs_with_the_same_result(
    ops_path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = str(example().permute([1, 0]))
    monkeypatch.setattr(_ops, "_CPU_VALUES_FOR_CAT", 0)
    with Operators() as operators:
        permuted = example().permute([1, 0])
    assert operators.fbgemm == []
    assert str(permuted) == expected
    permuted.validate()


def test_offsets_of_a_matrix_start_anew_in_each_row(ops_path: str) -> None:
    for dtype in (torch.int32, torch.int64):
        lengths = torch.tensor([[1, 2, 0], [4, 5, 6]], dtype=dtype)
        offsets = _ops.offsets_from_lengths(lengths, 18)
        assert offsets.dtype == dtype
        assert offsets.tolist() == [[0, 1, 3, 3], [0, 4, 9, 15]]
    assert _ops.offsets_from_lengths(torch.empty(2, 0, dtype=torch.int32), 0).tolist() == [[0], [0]]


def test_permute_keys_repeats_what_is_repeated(ops_path: str) -> None:
    # Not what a KeyedJaggedTensor may do, but what routing does for a feature of several tables.
    weights = torch.tensor([0.5, 1.5, 2.5])
    lengths, values, permuted_weights = _ops.permute_keys(
        [1, 0, 1], torch.tensor([[1], [2]]), torch.tensor([7, 8, 9]), weights, [1, 2]
    )
    assert lengths.tolist() == [[2], [1], [2]]
    assert values.tolist() == [8, 9, 7, 8, 9]
    assert permuted_weights is not None
    assert permuted_weights.tolist() == [1.5, 2.5, 0.5, 1.5, 2.5]


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], []),
        ([(0, 0, 1), (0, 1, 2)], [(0, 0, 3)]),
        ([(0, 1, 2), (0, 0, 1)], [(0, 1, 2), (0, 0, 1)]),
        ([(0, 0, 1), (1, 1, 1)], [(0, 0, 1), (1, 1, 1)]),
        ([(0, 0, 1), (0, 1, 0), (0, 1, 1), (0, 3, 1)], [(0, 0, 2), (0, 3, 1)]),
    ],
)
def test_merge_adjacent_joins_what_continues(
    spans: list[tuple[int, int, int]], expected: list[tuple[int, int, int]]
) -> None:
    assert _ops.merge_adjacent(spans) == expected
