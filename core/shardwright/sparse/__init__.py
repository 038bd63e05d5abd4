"""Sparse inputs and keyed outputs of embedding modules."""

from shardwright.sparse._jagged import NO_COLUMNS, WEIGHTS
from shardwright.sparse.jagged_tensor import JaggedTensor
from shardwright.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from shardwright.sparse.keyed_tensor import KeyedTensor

__all__ = ["NO_COLUMNS", "WEIGHTS", "JaggedTensor", "KeyedJaggedTensor", "KeyedTensor"]
