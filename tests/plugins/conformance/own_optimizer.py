"""A kernel with an optimizer of its own, as a stranger writes one, and the torch optimizer that it stands for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tests.plugins.conformance.mistakes.mutants import Delegate

import shardwright as sw
from shardwright.host import host
from shardwright.optim.fused import renaming

NAME = "touched_momentum"


class TouchedMomentum(torch.optim.Optimizer):
    """Momentum of the rows that a step touches; the others, and theirs, are left alone."""

    def __init__(self, params: Any, lr: float = 0.1, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                momentum = self.state[param].setdefault("momentum", torch.zeros_like(param))
                rows = param.grad.abs().sum(dim=1).nonzero().flatten()
                momentum[rows] = group["beta"] * momentum[rows] + param.grad[rows]
                param[rows] -= group["lr"] * momentum[rows]


def unsharded(spec: sw.OptimizerSpec, params: Any) -> TouchedMomentum:
    return TouchedMomentum(params, lr=spec.learning_rate, beta=spec.get("beta", 0.9))


def register() -> None:
    sw.register_fused_optimizer(
        TouchedMomentum, NAME, renaming({"lr": "learning_rate", "beta": "beta"}), unsharded
    )


class _Lookup(Delegate):
    """A lookup that shows gradients, which are applied here."""

    def __init__(self, right: Any, spec: sw.OptimizerSpec, momenta: Sequence[torch.Tensor]) -> None:
        super().__init__(right)
        self._rate, self._beta, self._momenta = spec.learning_rate, spec.get("beta", 0.9), momenta

    def backward(self, saved: Any, gradient: torch.Tensor) -> Sequence[torch.Tensor]:
        for index, own in enumerate(self._right.backward(saved, gradient)):
            rows = own.abs().sum(dim=1).nonzero().flatten()
            self._momenta[index][rows] = self._beta * self._momenta[index][rows] + own[rows]
            self._right.weight(index)[rows] -= self._rate * self._momenta[index][rows]
        return ()

    def backward_scaled(self, saved: Any, gradient: torch.Tensor, scale: float) -> Sequence[torch.Tensor]:
        return self.backward(saved, gradient * scale)

    def parameters(self) -> Sequence[Any]:
        return ()

    def optimizer_state(self, block: int) -> Mapping[str, torch.Tensor]:
        return {"momentum": self._momenta[block]}

    def set_learning_rate(self, learning_rate: float) -> None:
        self._rate = learning_rate


class OwnOptimizer(sw.ComputeKernel):
    """Plain torch, float32, one optimizer."""

    name = "own_optimizer"

    def supports(self, request: sw.KernelRequest) -> Any:
        if request.optimizer is None or request.optimizer.name != NAME:
            return f"{NAME} is the only optimizer"
        return True if request.data_type.name == "FP32" else "weights are float32"

    def memory_bytes(self, request: sw.KernelRequest, num_rows: int) -> Mapping[str, int]:
        return {"device": 2 * 4 * num_rows * request.num_columns}

    def group_key(self, request: sw.KernelRequest) -> Any:
        return (request.num_columns, request.optimizer)

    def build(self, blocks: Sequence[sw.BlockSpec], *, device: Any) -> Any:
        shown = host().compute_kernels.create("dense").build(blocks, device=device)
        optimizer = blocks[0].request.optimizer
        assert optimizer is not None
        momenta = [torch.zeros_like(shown.weight(index)) for index in range(len(blocks))]
        return self.changed(_Lookup(shown, optimizer, momenta))

    def changed(self, lookup: Any) -> Any:
        return lookup


class ForgetsMomentum(OwnOptimizer):
    """Plain SGD under the name of another."""

    name = "forgets_momentum"

    def changed(self, lookup: Any) -> Any:
        lookup._beta = 0.0
        return lookup


class NamesItOtherwise(OwnOptimizer):
    """State under a name that an unsharded model does not read."""

    name = "names_it_otherwise"

    def changed(self, lookup: Any) -> Any:
        lookup.optimizer_state = lambda block: {"velocity": lookup._momenta[block]}
        return lookup
