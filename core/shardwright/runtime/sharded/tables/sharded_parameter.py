"""The parameters of sharded tables, which do not let themselves be clipped or unscaled as if they were whole.

Functions such as ``torch.nn.utils.clip_grad_norm_`` read the ``grad`` of each parameter. Of a table whose optimizer
runs in the backward pass that is ``None``, so that they would pass it over in silence; of another table it is that of
the rows that this rank has, so that each rank would come to another norm.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _foreach_supported_types

from shardwright.error_reports import reporting_errors
from shardwright.errors import UnsupportedError
from shardwright.host.plugin_host import host
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.step.backward.kept_gradients import KeptBlock, KeptUpdates
from shardwright.runtime.step.backward.scaled_losses import (
    ADVICE,
    FUSED_REFUSAL,
    IN_STEP_ADVICE,
    PARTED_REFUSAL,
)

_CLIPPING, _UNSCALING = "torch.nn.utils.clip_grad", "torch.amp.grad_scaler"
_GRAD: Any = torch.Tensor.grad
_BY_VALUE = "clip_grad_value_"
_BY_ELEMENT = (_BY_VALUE, "clip_grads_with_norm_", "_clip_grads_with_norm_")
"""Functions of the former that are right for any part of a gradient."""


class ShardedParameter(nn.Parameter):
    """This rank's block of a sharded table.

    Attributes:
        table: name of the table in errors; ``None`` for a copy, which is a tensor like any other.
        is_fused: its optimizer runs in the kernel; else its gradient is that of this rank's block alone.
        env: environment of the ranks; ``None`` for a copy.
        num_copies: number of ranks that have a copy of this block, with the same gradient.
        updates: kept gradients of its collection, where ``update="in_step"``.
        kept: those of this block; ``None`` where this rank has none of the table.
        kept_of_table: those of all blocks of the table on this rank.
    """

    table: str | None = None
    is_fused: bool = False
    env: ShardingEnv | None = None
    num_copies: int = 1
    updates: KeptUpdates | None = None
    kept: KeptBlock | None = None
    kept_of_table: Sequence[KeptBlock] = ()

    @classmethod
    def of(cls, parameter: nn.Parameter, table: str, *, is_fused: bool) -> ShardedParameter:
        """A parameter, made such a one in place: autograd goes on to know it."""
        parameter.__class__ = cls
        assert isinstance(parameter, cls)
        parameter.table, parameter.is_fused = table, is_fused
        return parameter

    def check_trained(self) -> None:
        """Check that a block whose optimizer runs in the kernel was not frozen and has no hooks.

        Raises:
            UnsupportedError: it was, or has some, which autograd would never call.
        """
        if self._backward_hooks or self._post_accumulate_grad_hooks:
            raise UnsupportedError(
                f"table {self.table} has a hook on its gradient, which is never called: its kernel keeps the gradients "
                "of rows, or applies them, itself. Hook the collection's output, or change parameter.grad before the "
                "step with update='in_step'; a table with a kernel that shows gradients "
                f"({', '.join(_that_show_gradients())}) takes hooks"
            )
        if not self.requires_grad:
            raise UnsupportedError(
                f"table {self.table} was frozen (requires_grad_(False)) after it was sharded, but its optimizer runs "
                "in the backward pass and would go on to update it. Look it up in torch.no_grad(), or unfreeze it and "
                "set the learning rate of its group in fused_optimizer.param_groups to 0"
            )

    @property
    def grad(self) -> Tensor | None:
        """The gradient of this rank's block; ``None`` where the optimizer runs in the backward pass.

        With ``update="in_step"`` it is a sparse tensor of the rows that have a gradient, in shared storage; setting it
        to ``None`` drops it.

        Raises:
            UnsupportedError: a function reads it that would do something wrong with it.
        """
        if self.updates is not None and _is_reader(sys._getframe(1), _UNSCALING):
            return None  # it is unscaled with those of all blocks
        if self.table is not None:
            refuse_reader(
                sys._getframe(1), self.table, is_fused=self.is_fused, in_step=self.updates is not None
            )
        if self.kept is not None:
            return self.kept.gradient()
        gradient: Tensor | None = _GRAD.__get__(self)
        return gradient

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if self.kept is None:
            _GRAD.__set__(self, value)
        elif value is None:
            self.kept.drop()
        elif not self.kept.shows(value):  # `grad /= 2` sets what it has changed in place
            raise UnsupportedError(
                f"the gradient of table {self.table}, which is kept for its optimizer's step, can be changed in place "
                "or dropped (grad = None), but not replaced"
            )

    @grad.deleter
    def grad(self) -> None:
        _GRAD.__delete__(self)


# Optimizers take their fast forms on accelerators only if all their parameters are of types on this list.
_foreach_supported_types.append(ShardedParameter)


def _is_reader(frame: FrameType, module: str) -> bool:
    return frame.f_globals.get("__name__") == module


def refuse_reader(reader: FrameType, table: str, *, is_fused: bool, in_step: bool = False) -> None:
    """Check that gradients of a sharded table are not read by a function that takes them for whole.

    Args:
        reader: frame of the function that reads.
        table: name of the table in errors.
        is_fused: the table's optimizer runs in the kernel.
        in_step: its gradients are kept for the optimizer's step.

    Raises:
        UnsupportedError: they are; the other ranks hear of it.
    """
    module = reader.f_globals.get("__name__")
    if module not in (_CLIPPING, _UNSCALING):
        return
    function = reader.f_code.co_qualname.partition(".")[0]
    if module == _CLIPPING and not is_fused and function in _BY_ELEMENT:
        return
    with reporting_errors():
        raise UnsupportedError(_refusal(f"{module}.{function}", table, is_fused=is_fused and not in_step))


def _that_show_gradients() -> list[str]:
    kernels = host().compute_kernels
    return [repr(name) for name in kernels if not kernels[name].fuses_optimizer]


def clipping_refusal(who: str, parameter: ShardedParameter) -> str:
    """The reason why a function cannot clip a block whose optimizer runs in the backward pass."""
    return _refusal(who, parameter.table or "", is_fused=True)


def _refusal(who: str, table: str, *, is_fused: bool) -> str:
    if who.startswith(_UNSCALING):
        reason = FUSED_REFUSAL if is_fused else PARTED_REFUSAL
        advice = f"{IN_STEP_ADVICE}. {ADVICE}" if is_fused else ADVICE
        return f"a GradScaler was given the optimizer of table {table}: {reason}. {advice}."
    by_value = who.endswith(_BY_VALUE)
    ours = _BY_VALUE if by_value else "clip_grad_norm_"
    if is_fused:
        limit = ", or give its fused_params a max_gradient" if by_value else ""
        return (
            f"{who} was given the parameters of table {table}, whose optimizer runs in the backward pass, so that "
            "there is no gradient to clip. Clip the others, [p for _, p in "
            "shardwright.in_backward_optimizer_filter(model.named_parameters())]; or shard the table with "
            "update='in_step', or plan it with a compute kernel that shows gradients "
            f"({', '.join(_that_show_gradients())}), and clip all by shardwright.{ours}{limit}"
        )
    if by_value:
        return (
            f"{who} was given the parameters of table {table}, whose gradients are kept for its optimizer's step as "
            "those of rows. Clip by shardwright.clip_grad_value_(model.parameters(), clip_value)"
        )
    return (
        f"{who} was given the parameters of table {table}, of which each rank has a part, so that each would take "
        "another norm. Clip by shardwright.clip_grad_norm_(model.parameters(), max_norm), which takes one norm over "
        "all parameters of all ranks"
    )
