"""The parameters of sharded tables, whose gradients know of which part of a table they are.

Whoever reads ``grad`` gets a :class:`ShardGradient`, on each rank in the same order: a rank with fewer blocks of a
table than another has empty parameters in their place, which have a gradient when the others have.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    _foreach_supported_types,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from shardwright.errors import UnsupportedError
from shardwright.host.plugin_host import host
from shardwright.optim.keyed import KeyedOptimizer
from shardwright.runtime.sharded.tables.shard_gradients import AppliedGradient, Part, ShardGradient

_GRAD: Any = torch.Tensor.grad


class ShardedParameter(nn.Parameter):
    """This rank's block of a sharded table.

    Attributes:
        part: the table that it is a part of; ``None`` for a copy, which is a tensor like any other.
        dropped: number of the backward pass whose gradient was dropped last.
        stepping: number of the backward pass whose gradient an optimizer takes now, if one does.
    """

    part: Part | None = None
    dropped: int = 0
    stepping: int = -1

    @classmethod
    def of(cls, parameter: nn.Parameter, part: Part) -> ShardedParameter:
        """A parameter, made such a one in place: autograd goes on to know it."""
        parameter.__class__ = cls if issubclass(type(parameter), nn.Parameter) else _StoredParameter
        assert isinstance(parameter, cls)
        parameter.part = part
        return parameter

    @property
    def is_fused(self) -> bool:
        """True if its optimizer runs in the kernel."""
        return self.part is not None and bool(self.part.update)

    def register_hook(self, hook: Any) -> Any:
        """Hook the gradient, as torch does it.

        Raises:
            UnsupportedError: the optimizer runs in the kernel, so that autograd would never call the hook.
        """
        self._refuse_hook()
        return super().register_hook(hook)

    def register_post_accumulate_grad_hook(self, hook: Any) -> Any:
        """Hook what follows the gradient, likewise."""
        self._refuse_hook()
        return super().register_post_accumulate_grad_hook(hook)

    def _refuse_hook(self) -> None:
        if self.part is not None and self.is_fused:
            raise UnsupportedError(
                f"a hook on the gradient of table {self.part.table} would never be called: its kernel keeps the "
                "gradients of rows, or applies them, itself. Hook the collection's output, or change parameter.grad "
                "before the step with update='in_step'; a table with a kernel that shows gradients "
                f"({', '.join(_that_show_gradients())}) takes hooks"
            )

    @property
    def grad(self) -> Tensor | None:
        """The gradient of this rank's block, which is part of that of the whole table.

        With ``update="in_step"`` it is sparse, of the rows that have a gradient, in shared storage; setting it to
        ``None`` drops it. Of a table that was updated in the backward pass it has no elements. To an optimizer, in its
        step, it is a plain tensor, or ``None`` where the kernel has an optimizer.
        """
        raw, part = _GRAD.__get__(self), self.part
        if part is None or self.stepping == part.events.num_updates:
            return None if self.is_fused else raw
        if part.kept is not None:
            kept = part.kept.gradient(part.block)
            return None if kept is None else ShardGradient(part, kept[2], self.shape, kept[0], kept[1])
        if raw is not None:
            return ShardGradient(part, raw)
        is_there = part.events.num_updates > self.dropped and (part.is_idle or part.update)
        if not is_there or not self.requires_grad:
            return None
        if part.update == "in_backward":
            return AppliedGradient(_refusal(part.table), self)
        rows = torch.empty(0, dtype=torch.int64, device=self.device) if part.update else None
        return ShardGradient(part, self.detach(), self.shape, rows)

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        part, shown = (
            self.part,
            isinstance(value, AppliedGradient) or getattr(value, "part", None) is self.part,
        )
        if part is not None and value is None:
            self.dropped = part.events.num_updates
            if part.kept is not None:
                part.kept.drop(part.block)
        if part is None or value is None or not (part.update or (shown and part.is_idle)):
            _GRAD.__set__(self, value.local if isinstance(value, ShardGradient) else value)
        elif not shown:  # `grad /= 2` sets what it has changed in place
            raise UnsupportedError(
                f"the gradient of table {part.table}, which its kernel keeps or has applied, can be changed in place "
                "or dropped (grad = None), but not replaced"
            )

    @grad.deleter
    def grad(self) -> None:
        self.grad = None


class _StoredParameter(ShardedParameter):
    """A block whose kernel keeps its rows elsewhere than in memory, in a tensor that answers torch's functions itself.

    What it would answer may be older than the rows in the kernel's cache.
    """

    __repr__: Any = object.__repr__

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any) -> Any:
        raise UnsupportedError(
            f"{func} reads a parameter whose rows are not in memory: the model's state_dict() and full_state_dict() "
            "have them"
        )


# Optimizers take their fast forms on accelerators only if all their parameters are of types on this list.
_foreach_supported_types.append(ShardedParameter)


@cache
def watch_steps() -> None:
    """Give all of torch's optimizers plain gradients in their steps from now on: those of rows that they update."""
    register_optimizer_step_pre_hook(_before_step)
    register_optimizer_step_post_hook(_after_step)


def _before_step(optimizer: Optimizer, *_: Any) -> None:
    for own in _sharded_of(optimizer):
        assert own.part is not None  # it is no copy
        own.stepping = (
            own.part.events.num_updates
        )  # should the step raise, that is over with the next backward pass


def _after_step(optimizer: Optimizer, *_: Any) -> None:
    for own in _sharded_of(optimizer):
        own.stepping = -1


def _sharded_of(optimizer: Optimizer) -> Iterator[ShardedParameter]:
    if not isinstance(optimizer, KeyedOptimizer):  # which makes others step, or a kernel
        for group in optimizer.param_groups:
            yield from (
                own for own in group["params"] if issubclass(type(own), ShardedParameter) and own.part
            )


def _that_show_gradients() -> list[str]:
    kernels = host().compute_kernels
    return [repr(name) for name in kernels if not kernels[name].fuses_optimizer]


def _refusal(table: str) -> str:
    return (
        f"was given the gradient of table {table}, whose optimizer runs in the backward pass and has applied it "
        "already. Leave its parameters out, [p for _, p in "
        "shardwright.in_backward_optimizer_filter(model.named_parameters())]; or shard the table with "
        "update='in_step', an argument of its sharder and of DistributedModelParallel, or plan it with a compute "
        f"kernel that shows gradients ({', '.join(_that_show_gradients())}), so that they are scaled and clipped with "
        "the others; or give its fused_params a max_gradient, to clip each element. In bfloat16, which needs no "
        "GradScaler, nothing is unscaled"
    )
