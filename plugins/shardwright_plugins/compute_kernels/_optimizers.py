"""Parameters of the built-in optimizers and memory of their state, without torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Literal

from shardwright.contracts.compute_kernel import KernelRequest
from shardwright.planning.tables.optimizers import OptimizerSpec
from shardwright.planning.tables.spec import DataType

_FLOAT_BYTES = 4

TRAINABLE: frozenset[DataType] = frozenset({DataType.FP32, DataType.FP16, DataType.BF16})
"""The element types of weights that plain torch looks up and updates."""

PARAMETERS: Mapping[str, frozenset[str]] = {
    "sgd": frozenset(),
    "adagrad": frozenset({"eps"}),
    "row_wise_adagrad": frozenset({"eps"}),
    "adam": frozenset({"eps", "beta1", "beta2"}),
}
"""The parameters each built-in optimizer understands, beside its learning rate."""

ROW_WISE: frozenset[str] = frozenset({"row_wise_adagrad"})
"""Optimizers with one value a row, which depends on the gradient of all its columns."""

# Values a row of the optimizer's float32 state, as a function of the columns held.
_STATE_VALUES: Mapping[str, Callable[[int], int]] = {
    "sgd": lambda columns: 0,
    "adagrad": lambda columns: columns,
    "row_wise_adagrad": lambda columns: 1,
    "adam": lambda columns: 2 * columns,
}

_NEUTRAL: Mapping[str, object] = {
    "weight_decay": 0,
    "eps": None,
    "beta1": None,
    "beta2": None,
    "stochastic_rounding": False,
}


def can_run(optimizer: OptimizerSpec, known: Collection[str], who: str) -> Literal[True] | str:
    """``True`` if ``optimizer`` is one of ``known`` with parameters it understands, else the reason."""
    if optimizer.name not in known:
        return f"{who} runs {', '.join(sorted(known))}, not {optimizer.name!r}"
    for name, value in optimizer.parameters:
        if name not in PARAMETERS[optimizer.name] and _NEUTRAL.get(name, object()) not in (None, value):
            return f"{who}: {optimizer.name!r} has no parameter {name}={value!r} here"
    return True


def needs_whole_rows(request: KernelRequest) -> bool:
    """True for a row-wise optimizer of cut columns: its value is a mean over all columns of the row."""
    return request.cuts_columns and request.optimizer is not None and request.optimizer.name in ROW_WISE


def can_train(data_type: DataType) -> Literal[True] | str:
    """``True`` if torch can train tables of ``data_type``, else the reason."""
    if data_type in TRAINABLE:
        return True
    trainable = ", ".join(sorted(known.value for known in TRAINABLE))
    return f"torch trains {trainable} tables, not {data_type.value}"


def weight_bytes(request: KernelRequest, num_rows: int) -> int:
    """Bytes of a block's weights."""
    return num_rows * -(-request.num_columns * request.data_type.bits // 8)


def state_bytes(request: KernelRequest, num_rows: int) -> int:
    """Bytes of a block's optimizer state; of an optimizer that is only the user's, as much as Adam's."""
    if request.optimizer is None:
        return 0
    values = _STATE_VALUES.get(request.optimizer.name, _STATE_VALUES["adam"])
    return _FLOAT_BYTES * num_rows * values(request.num_columns)


def trained_bytes(request: KernelRequest, num_rows: int) -> int:
    """Bytes of a block's weights and optimizer state."""
    return weight_bytes(request, num_rows) + state_bytes(request, num_rows)
