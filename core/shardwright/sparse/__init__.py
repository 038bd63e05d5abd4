"""Sparse inputs and keyed outputs of embedding modules."""

from shardwright.contracts.compute_kernel import WEIGHTS
from shardwright.sparse.jagged_tensor import JaggedTensor
from shardwright.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from shardwright.sparse.keyed_tensor import KeyedTensor

__all__ = ["WEIGHTS", "JaggedTensor", "KeyedJaggedTensor", "KeyedTensor"]
