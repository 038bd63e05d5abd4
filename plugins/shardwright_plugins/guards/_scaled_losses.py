"""Guard over scaled losses, whose gradients are to be unscaled before any parameter takes them.

A gradient scaler multiplies the loss by a power of 2, and divides gradients by it before the optimizer's step. Tables
that are updated in the backward pass have taken the multiple by then. Tables that are updated in the step take it if
the scaler is not given their optimizer. So some gradients, of dense parameters and of tables, are kept at the end of a
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
from shardwright.runtime.sharded.tables.shard_gradients import ShardGradient

_FIRST, _EVERY = 3, 100
"""Backward passes that are looked at: the first ones, and each hundredth of the others."""
_MOST = 3
"""Parameters that are compared, the smallest."""
_ELEMENTS = 1024
"""Elements of a table's gradient that are compared."""


class ScaledLosses:
    """Some gradients of one model after a backward pass, until its optimizers make their steps.

    Args:
        table: description of a table of the collection.
        dense: the dense parameters.
        shards: this rank's parts of tables that are updated in the optimizer's step; none if the collection has a table
            that is updated in the backward pass.

    Attributes:
        kept: gradients of dense parameters after the last backward pass, by the identity of their parameter.
    """

    def __init__(self, table: str, dense: Sequence[nn.Parameter], shards: Sequence[nn.Parameter]) -> None:
        self._table, self._num_passes, self._pass = table, 0, -1
        chosen = sorted((own for own in dense if own.numel()), key=lambda own: own.numel())[:_MOST]
        self._dense, self._shards = [ref(own) for own in chosen], [ref(own) for own in shards]
        self._is_in_step = bool(shards)
        self.kept: dict[int, Tensor] = {}
        self._kept_shard: tuple[ref[nn.Parameter], Tensor] | None = None
        self._factors: dict[str, float] = {}  # of dense parameters and of tables, in the step under way

    def note_update(self) -> None:
        """Note that gradients of tables come in the backward pass under way."""
        number = torch._C._current_graph_task_id()
        if number == self._pass:
            return
        self._pass, self._num_passes = number, self._num_passes + 1
        self.kept, self._kept_shard, self._factors = {}, None, {}
        if self._num_passes <= _FIRST or self._num_passes % _EVERY == 0:
            # At the end of the pass, and there after the callback of the wrapper that averages.
            callbacks = Variable._execution_engine
            callbacks.queue_callback(partial(callbacks.queue_callback, self._keep))

    def _keep(self) -> None:
        for reference in self._dense:
            own = reference()
            if own is not None and own.grad is not None:
                self.kept[id(own)] = own.grad.detach().clone()
        for reference in self._shards:
            part = _part_of(reference())
            if part is not None:
                self._kept_shard = reference, part.clone()
                return

    def check_step(self, optimizer: Optimizer) -> None:
        """Compare gradients of dense parameters, before the step of their optimizer, with those that are kept.

        Raises:
            UnsupportedError: they were divided by a power of 2, and those of tables were not, or are taken.
        """
        for group in optimizer.param_groups:
            for own in group["params"]:
                if id(own) not in self.kept:
                    continue
                factor = _unscaled_by(self.kept.pop(id(own)), own.grad)
                self._factors["dense"] = max(factor, self._factors.get("dense", 1.0))
                if (
                    factor != 1 and not self._is_in_step and _has_scaler()
                ):  # else somebody divided them who means it
                    with reporting_errors():
                        raise UnsupportedError(
                            f"gradients of dense parameters were divided by {factor:g} between the backward pass and "
                            f"the step of {type(optimizer).__name__}, as a GradScaler does. But table {self._table} is "
                            "updated in the backward pass, and has taken the gradient of the scaled loss. Train in "
                            "bfloat16, which needs no scaler; or shard it with update='in_step', an argument of "
                            "DistributedModelParallel, and give fused_optimizer to the scaler, too. The table's "
                            "weights are wrong now: load them again"
                        )
        self._compare("The table's weights are wrong now: load them again")

    def check_tables(self) -> None:
        """Compare gradients of tables, before the step of their optimizer, with those that are kept.

        Raises:
            UnsupportedError: those of dense parameters were divided by a power of 2, and these were not.
        """
        if self._kept_shard is not None:
            reference, before = self._kept_shard
            now = _part_of(reference())
            if now is not None and before.any():
                self._factors["tables"] = _unscaled_by(before, now)
            self._kept_shard = None
        self._compare("No table was changed")

    def _compare(self, state: str) -> None:
        """Compare the factors of dense parameters and of tables, once both are known."""
        dense, tables = self._factors.get("dense", 1.0), self._factors.get("tables")
        if self._is_in_step and tables == 1 and dense != 1 and _has_scaler():
            with reporting_errors():
                raise UnsupportedError(
                    f"gradients of dense parameters were divided by {dense:g} between the backward pass and the step, "
                    f"as a GradScaler does, but those of table {self._table} were not: it would take the gradient of "
                    "the scaled loss. Give scaler.step() its optimizer, too: fused_optimizer, or a CombinedOptimizer "
                    f"of both. {state}"
                )


def _part_of(parameter: nn.Parameter | None) -> Tensor | None:
    """The first elements of the gradient of this rank's part of a table; ``None`` if it has none."""
    gradient = parameter.grad if parameter is not None else None
    if not isinstance(gradient, ShardGradient) or not gradient.local.numel():
        return None
    return gradient.local.flatten()[:_ELEMENTS]


def _has_scaler() -> bool:
    """True if this process has a gradient scaler of torch's that is on; asked for where gradients look so."""
    scalers = [own for own in gc.get_objects() if issubclass(type(own), torch.amp.GradScaler)]
    return any(own.is_enabled() for own in scalers)


def _unscaled_by(before: Tensor, now: Tensor | None) -> float:
    """The power of 2, above 1, by which a gradient was divided; 1 if it was not."""
    if now is None or now.shape != before.shape or now.layout is not torch.strided:
        return 1.0
    place = before.abs().argmax()
    now = now.detach()
    greatest, later = before.view(-1)[place].item(), now.reshape(-1)[place].item()
    if not later or not math.isfinite(greatest) or not math.isfinite(later):
        return 1.0
    factor = greatest / later
    is_power = factor > 1 and math.frexp(factor)[0] == 0.5
    return factor if is_power and torch.equal(before / factor, now) else 1.0
