"""Guard over optimizers of tables that are cut over ranks: a step on parts must be the parts of a step on the whole.

An optimizer that takes norms or means inside its step (LAMB, LARS, Adafactor, Muon) would take those of a rank's part.
Before it makes its first step over such tables, a copy of it steps twice over a small matrix and over the matrix's
parts: what it does there is what it would do to tables.
"""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from typing import Any
from weakref import finalize

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwright.error_reports import reporting_errors
from shardwright.errors import UnsupportedError
from shardwright.optim.keyed import KeyedOptimizer
from shardwright.runtime.sharded.tables.sharded_parameter import ShardedParameter

_ROWS, _COLUMNS = 6, 4
_STEPS = 2
_RATE = 0.1  # learning rate of these steps
_CUT = ("rows", "columns")


def check_optimizer(optimizer: Optimizer) -> None:
    """Check that an optimizer's steps over tables that are cut are those over the whole tables.

    Raises:
        UnsupportedError: they are not; the same on all ranks.
    """
    for group in optimizer.param_groups:
        cut: dict[int, str] = {}
        for own in group["params"]:
            if type(own) is ShardedParameter and own.part is not None and not own.part.update:
                cut |= {dim: own.part.table for dim in own.part.cut_dims if dim not in cut}
        for dim, table in sorted(cut.items()):
            if not _steps_alike(optimizer, group, dim):
                with reporting_errors():
                    raise UnsupportedError(
                        f"{type(optimizer).__name__} is given table {table}, which is cut by {_CUT[dim]} over the "
                        f"ranks, but its step over a part of the {_CUT[dim]} is not that part of its step over all: it "
                        "takes norms or means inside the step, which would be a rank's own. Give it the dense "
                        "parameters only, and tables to an optimizer inside their kernel (fused_params) or to one that "
                        "works on each element; or plan the table table_wise"
                    )


def _steps_alike(optimizer: Optimizer, group: dict[str, Any], dim: int) -> bool:
    """Step over a matrix and over its two parts along a dimension; tell if the results are the same."""
    # Values and gradients of rows and columns are far apart, so that parts have other norms than the whole.
    scales = torch.arange(1.0, 1 + _ROWS)[:, None] ** 2 * torch.arange(1.0, 1 + _COLUMNS) ** 2
    signs = 1.0 - 2.0 * (torch.arange(_ROWS * _COLUMNS).view(_ROWS, _COLUMNS) % 3 == 0)
    values, gradients = scales * signs / 10, [scales.flip(0), (scales * signs).flip(1)]
    try:
        with torch.enable_grad():
            (whole,) = _stepped(optimizer, group, [values], [[own] for own in gradients])
            cut = [own.tensor_split((1,), dim) for own in (values, *gradients)]
            parts = _stepped(optimizer, group, list(cut[0]), [list(own) for own in cut[1:]])
    except Exception:  # it takes no such matrix, or steps in another way: nothing is known of it
        return True
    return torch.allclose(whole, torch.cat(parts, dim), rtol=1e-3, atol=1e-6, equal_nan=True)


def _stepped(
    optimizer: Optimizer, group: dict[str, Any], values: list[Tensor], gradients: list[list[Tensor]]
) -> list[Tensor]:
    """The values after steps of a copy of an optimizer over parameters of its own."""
    parameters = [torch.nn.Parameter(own.clone()) for own in values]
    kind = type(optimizer)
    twin = kind.__new__(kind)
    # Its own attributes, some of which it may change; but neither hooks, nor a step() that a scheduler has wrapped.
    twin.__dict__ = {
        name: copy.copy(value) if isinstance(value, dict | list | set) else value
        for name, value in optimizer.__dict__.items()
        if name != "step"
    }
    twin.__dict__ |= {name: OrderedDict() for name in twin.__dict__ if name.endswith("_hooks")}
    twin.state, twin.is_twin = defaultdict(dict), True  # type: ignore[attr-defined]  # or it would be checked, too
    # At a rate that a schedule begins with, or that is small, a difference would be one of rounding.
    rate = {"lr": _RATE} if isinstance(group.get("lr"), float) else {}
    twin.param_groups = [{**group, **rate, "params": parameters}]
    for own in gradients[:_STEPS]:
        for parameter, gradient in zip(parameters, own, strict=True):
            parameter.grad = gradient.clone()
        twin.step()
    return [own.detach() for own in parameters]


class Twins:
    """Optimizers that were checked.

    Attributes:
        checked: the number of groups that each had, by its identity.
    """

    def __init__(self) -> None:
        self.checked: dict[int, int] = {}

    def check(self, optimizer: Optimizer) -> None:
        """Check an optimizer before its first step, and when it has more groups.

        Raises:
            UnsupportedError: its step over tables that are cut would be another than over whole ones.
        """
        if hasattr(optimizer, "is_twin"):
            return
        if id(optimizer) not in self.checked:
            finalize(optimizer, self.checked.pop, id(optimizer), None)
        self.checked[id(optimizer)] = 0  # should it be refused, so is its next step
        if not isinstance(optimizer, KeyedOptimizer):  # which makes others step, or a kernel
            check_optimizer(optimizer)
        self.checked[id(optimizer)] = len(optimizer.param_groups)
