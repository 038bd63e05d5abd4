"""Which way is taken, and that both give the same."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.sparse import JaggedTensor, KeyedJaggedTensor


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
