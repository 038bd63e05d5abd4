"""Optimizers by parameter names, with the gradients that TorchRec's leave behind."""

from __future__ import annotations

from collections.abc import Set

import torch

import shardwright as sw

__all__ = ["KeyedOptimizerWrapper"]


class KeyedOptimizerWrapper(sw.KeyedOptimizerWrapper):
    """Any torch optimizer, with its state by parameter names."""

    def init_state(self, sparse_grad_parameter_names: Set[str] | None = None) -> None:
        """Make the state of parameters that have none yet, and leave gradients of 0 behind.

        Args:
            sparse_grad_parameter_names: parameters whose gradients are sparse.
        """
        super().init_state(sparse_grad_parameter_names)
        for name, param in self.params.items():
            if param.requires_grad and param.grad is None:
                zeros = torch.zeros_like(param)
                param.grad = zeros.to_sparse() if name in (sparse_grad_parameter_names or ()) else zeros
