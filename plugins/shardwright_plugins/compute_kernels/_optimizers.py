"""Optimizers that kernels run, and memory of their state, without torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from shardwright.contracts.compute_kernel import KernelRequest
from shardwright.contracts.optimizer import WEIGHTS, RowRule
from shardwright.contracts.row_format import FLOATS
from shardwright.host.plugin_host import host
from shardwright.planning.tables.data_types import DataType
from shardwright.planning.tables.optimizers import OptimizerSpec

_FLOAT_BYTES = 4

PARAMETERS: Mapping[str, frozenset[str]] = {
    "sgd": frozenset(),
    "adagrad": frozenset({"eps"}),
    "row_wise_adagrad": frozenset({"eps"}),
    "adam": frozenset({"eps", "beta1", "beta2"}),
}
"""Optimizers that kernels have built in, and the parameters that they understand there beside the learning rate."""

STARTED: Mapping[str, frozenset[str]] = {
    name: known | {"initial_accumulator_value"} for name, known in PARAMETERS.items()
}
"""The same for kernels that set the initial values of states."""

ROW_WISE: frozenset[str] = frozenset({"row_wise_adagrad"})
"""Those of them with one value a row, which depends on the gradient of all its columns."""


def rule_or_reason(optimizer: OptimizerSpec) -> RowRule | str:
    """The registered optimizer with its parameters, or the reason why there is none."""
    return RowRule.of(optimizer, host().optimizers)


def rule_of(optimizer: OptimizerSpec) -> RowRule:
    """The registered optimizer with its parameters, of which a kernel said that it runs it."""
    rule = rule_or_reason(optimizer)
    assert isinstance(rule, RowRule)  # the kernel's supports()
    return rule


def is_plain(optimizer: OptimizerSpec, known: Mapping[str, Collection[str]] = PARAMETERS) -> bool:
    """True if it is one of those that are built in, and no other parameters have an effect than those known there."""
    own = known.get(optimizer.name)
    if own is None:
        return False
    rule = rule_of(optimizer)
    defaults = {**rule.optimizer.parameters, "stochastic_rounding": False}
    has_decay = bool(rule.parameters.get("weight_decay"))
    return all(
        name in own or value == defaults[name] or (name == "weight_decay_mode" and not has_decay)
        for name, value in rule.parameters.items()
    )


def can_run(optimizer: OptimizerSpec, known: Mapping[str, Collection[str]], who: str) -> Literal[True] | str:
    """``True`` if an optimizer is one of those that are built in, with the parameters known there, else the reason.

    Args:
        optimizer: optimizer.
        known: parameters of each that is built in.
        who: name of the kernel in messages.
    """
    if optimizer.name not in known:
        return f"{who} runs {', '.join(sorted(known))}, not {optimizer.name!r}"
    rule = rule_or_reason(optimizer)
    if isinstance(rule, str):
        return f"{who}: {rule}"
    if not is_plain(optimizer, known):
        more = {name: value for name, value in optimizer.parameters if name not in known[optimizer.name]}
        shown = ", ".join(f"{name}={value!r}" for name, value in more.items())
        return f"{who}: {optimizer.name!r} has no parameter {shown} here"
    return True


def can_run_rule(request: KernelRequest, who: str) -> Literal[True] | str:
    """``True`` if a kernel that runs any registered optimizer runs that of a request, else the reason."""
    assert request.optimizer is not None
    rule = rule_or_reason(request.optimizer)
    if isinstance(rule, str):
        return f"{who}: {rule}"
    if request.cuts_columns and rule.optimizer.reads_row == WEIGHTS:
        return (
            f"{request.optimizer.name!r} on {request.num_columns} of {request.embedding_dim} columns needs the weights "
            "of whole rows, and a block of cut columns has its own only"
        )
    return True


def needs_whole_rows(request: KernelRequest) -> bool:
    """True if the optimizer needs the gradients of whole rows, and a block has fewer columns."""
    if not request.cuts_columns or request.optimizer is None:
        return False
    rule = rule_or_reason(request.optimizer)
    return isinstance(rule, RowRule) and bool(rule.optimizer.reads_row)


def can_train(data_type: DataType) -> Literal[True] | str:
    """``True`` if torch can train tables of ``data_type``, else the reason."""
    if data_type in FLOATS:
        return True
    return f"torch trains {', '.join(sorted(FLOATS))} tables, not {data_type}"


def weight_bytes(request: KernelRequest, num_rows: int) -> int:
    """Bytes of a block's weights."""
    return num_rows * FLOATS[request.data_type].row_bytes(request.num_columns)


def state_bytes(request: KernelRequest, num_rows: int) -> int:
    """Bytes of a block's optimizer state; of an optimizer that is only the user's, as much as Adam's."""
    if request.optimizer is None:
        return 0
    rule = rule_or_reason(request.optimizer)
    columns = (
        2 * request.num_columns if isinstance(rule, str) else sum(rule.columns(request.num_columns).values())
    )
    return _FLOAT_BYTES * num_rows * columns


def trained_bytes(request: KernelRequest, num_rows: int) -> int:
    """Bytes of a block's weights and optimizer state."""
    return weight_bytes(request, num_rows) + state_bytes(request, num_rows)
