"""The parameters of sharded tables, which do not let themselves be clipped or unscaled as if they were whole.

Functions such as ``torch.nn.utils.clip_grad_norm_`` read the ``grad`` of each parameter. Of a table whose optimizer
runs in the backward pass that is ``None``, so that they would pass it over in silence; of another table it is that of
the rows that this rank has, so that each rank would come to another norm.
"""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _foreach_supported_types

from shardwright.error_listeners import reporting_errors
from shardwright.errors import UnsupportedError
from shardwright.host.plugin_host import host
from shardwright.runtime.step.scaled_losses import ADVICE, FUSED_REFUSAL, PARTED_REFUSAL

_CLIPPING, _UNSCALING = "torch.nn.utils.clip_grad", "torch.amp.grad_scaler"
_GRAD: Any = torch.Tensor.grad
_BY_ELEMENT = ("clip_grad_value_", "clip_grads_with_norm_", "_clip_grads_with_norm_")
"""Functions of the former that are right for any part of a gradient."""


class ShardedParameter(nn.Parameter):
    """This rank's block of a sharded table.

    Attributes:
        table: name of the table in errors; ``None`` for a copy, which is a tensor like any other.
        is_fused: its optimizer runs in the backward pass; else its gradient is that of this rank's block alone.
    """

    table: str | None = None
    is_fused: bool = False

    @classmethod
    def of(cls, parameter: nn.Parameter, table: str, *, is_fused: bool) -> ShardedParameter:
        """A parameter, made such a one in place: autograd goes on to know it."""
        parameter.__class__ = cls
        assert isinstance(parameter, cls)
        parameter.table, parameter.is_fused = table, is_fused
        return parameter

    def check_trained(self) -> None:
        """Check that a block whose optimizer runs in the backward pass was not frozen.

        Raises:
            UnsupportedError: it was.
        """
        if not self.requires_grad:
            raise UnsupportedError(
                f"table {self.table} was frozen (requires_grad_(False)) after it was sharded, but its optimizer runs "
                "in the backward pass and would go on to update it. Look it up in torch.no_grad(), or unfreeze it and "
                "set the learning rate of its group in fused_optimizer.param_groups to 0"
            )

    @property
    def grad(self) -> Tensor | None:
        """The gradient of this rank's block; ``None`` where the optimizer runs in the backward pass.

        Raises:
            UnsupportedError: a function reads it that would do something wrong with it.
        """
        if self.table is not None:
            refuse_reader(sys._getframe(1), self.table, is_fused=self.is_fused)
        gradient: Tensor | None = _GRAD.__get__(self)
        return gradient

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        _GRAD.__delete__(self)


# Optimizers take their fast forms on accelerators only if all their parameters are of types on this list.
_foreach_supported_types.append(ShardedParameter)


def refuse_reader(reader: FrameType, table: str, *, is_fused: bool) -> None:
    """Check that gradients of a sharded table are not read by a function that takes them for whole.

    Args:
        reader: frame of the function that reads.
        table: name of the table in errors.
        is_fused: the table's optimizer runs in the backward pass.

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
        raise UnsupportedError(_refusal(f"{module}.{function}", table, is_fused=is_fused))


def _that_show_gradients() -> list[str]:
    kernels = host().compute_kernels
    return [repr(name) for name in kernels if not kernels[name].fuses_optimizer]


def _refusal(who: str, table: str, *, is_fused: bool) -> str:
    if who.startswith(_UNSCALING):
        reason = FUSED_REFUSAL if is_fused else PARTED_REFUSAL
        return f"a GradScaler was given the optimizer of table {table}: {reason}. {ADVICE}."
    if is_fused:
        return (
            f"{who} was given the parameters of table {table}, whose optimizer runs in the backward pass, so that "
            "there is no gradient to clip. Clip the others, [p for _, p in "
            "shardwright.in_backward_optimizer_filter(model.named_parameters())], or plan this table with a compute "
            f"kernel that shows gradients ({', '.join(_that_show_gradients())})"
        )
    return (
        f"{who} was given the parameters of table {table}, of which each rank has a part, so that each would take "
        "another norm. Take it over all ranks: add up, over the ranks, torch.nn.utils.get_total_norm(gradients of the "
        "table) ** 2, add that of the dense parameters once, and give the root to "
        "torch.nn.utils.clip_grads_with_norm_()"
    )
