"""Guard over scaled losses of tables that are updated in the backward pass, which take the gradient as it comes.

A gradient scaler multiplies the loss by a power of 2, and divides gradients by it before the optimizer's step. Tables
that were updated by then have taken the multiple. So gradients of some dense parameters are kept at the end of a
backward pass and compared with those of the step: the same ones divided by a power of 2 were unscaled. Clipping divides
by other numbers.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Sequence
from functools import partial
from weakref import ref

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.optim import Optimizer

from shardwright.error_reports import reporting_errors
from shardwright.errors import UnsupportedError

_FIRST, _EVERY = 3, 100
"""Backward passes that are looked at: the first ones, and each hundredth of the others."""
_MOST = 3
"""Parameters that are compared, the smallest."""


class ScaledLosses:
    """The gradients of some dense parameters of one model after a backward pass that has updated its tables.

    Args:
        table: description of a table that is updated in the backward pass.
        dense: the dense parameters.

    Attributes:
        kept: gradients after the last backward pass, by the identity of their parameter.
    """

    def __init__(self, table: str, dense: Sequence[nn.Parameter]) -> None:
        self._table, self._num_passes, self._pass = table, 0, -1
        chosen = sorted((own for own in dense if own.numel()), key=lambda own: own.numel())[:_MOST]
        self._dense = [ref(own) for own in chosen]
        self.kept: dict[int, Tensor] = {}

    def note_update(self) -> None:
        """Note that tables are updated in the backward pass under way."""
        number = torch._C._current_graph_task_id()
        if number == self._pass:
            return
        self._pass, self._num_passes = number, self._num_passes + 1
        self.kept = {}
        if self._num_passes <= _FIRST or self._num_passes % _EVERY == 0:
            # At the end of the pass, and there after the callback of the wrapper that averages.
            callbacks = Variable._execution_engine
            callbacks.queue_callback(partial(callbacks.queue_callback, self._keep))

    @torch.no_grad()
    def _keep(self) -> None:
        alive = [own for own in (reference() for reference in self._dense) if own is not None]
        self.kept = {id(own): own.grad.clone() for own in alive if own.grad is not None}

    def check_step(self, optimizer: Optimizer) -> None:
        """Compare gradients, before the step of an optimizer, with those that are kept.

        Raises:
            UnsupportedError: they were divided by a power of 2.
        """
        for group in optimizer.param_groups:
            for own in group["params"]:
                if id(own) not in self.kept:
                    continue
                factor = _unscaled_by(self.kept.pop(id(own)), own.grad)
                if factor != 1 and _has_scaler():  # else somebody divided them who means it
                    with reporting_errors():
                        raise UnsupportedError(
                            f"gradients of dense parameters were divided by {factor:g} between the backward pass and "
                            f"the step of {type(optimizer).__name__}, as a GradScaler does. But table {self._table} is "
                            "updated in the backward pass, and has taken the gradient of the scaled loss. Train in "
                            "bfloat16, which needs no scaler; or shard it with update='in_step', an argument of "
                            "DistributedModelParallel, and give fused_optimizer to the scaler, too. The table's "
                            "weights are wrong now: load them again"
                        )


def _has_scaler() -> bool:
    """True if this process has a gradient scaler of torch's that is on; asked for where gradients look so."""
    scalers = [own for own in gc.get_objects() if issubclass(type(own), torch.amp.GradScaler)]
    return any(own.is_enabled() for own in scalers)


@torch.no_grad()
def _unscaled_by(before: Tensor, now: Tensor | None) -> float:
    """The power of 2, above 1, by which a gradient was divided; 1 if it was not."""
    if now is None or now.shape != before.shape or now.layout is not torch.strided:
        return 1.0
    place = before.abs().argmax()
    greatest, later = before.view(-1)[place].item(), now.reshape(-1)[place].item()
    if not later or not math.isfinite(greatest) or not math.isfinite(later):
        return 1.0
    factor = greatest / later
    is_power = factor > 1 and math.frexp(factor)[0] == 0.5
    return factor if is_power and torch.equal(before / factor, now) else 1.0
