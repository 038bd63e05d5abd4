"""Optimizers keyed by parameter names, optimizers of rows, and optimizers that run in the backward pass."""

from shardwright.optim.combined import CombinedOptimizer
from shardwright.optim.fused import optimizer_spec_of, register_fused_optimizer, renaming, spec_to_torch
from shardwright.optim.keyed import KeyedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper
from shardwright.optim.optimizers import apply_optimizer_in_backward, in_backward_optimizer_filter

__all__ = [
    "CombinedOptimizer",
    "KeyedOptimizer",
    "KeyedOptimizerWrapper",
    "OptimizerWrapper",
    "apply_optimizer_in_backward",
    "in_backward_optimizer_filter",
    "optimizer_spec_of",
    "register_fused_optimizer",
    "renaming",
    "spec_to_torch",
]
