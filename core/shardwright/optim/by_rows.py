"""Optimizers of plugins run by torch: on rows that a kernel holds, and without sharding, as torch's optimizers.

Legend: R rows, N rows touched in a step, D columns held, C columns of the gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from shardwright.contracts.optimizer import ELEMENT, ROW, WEIGHTS, RowRule
from shardwright.errors import InvalidInputError, UnknownNameError
from shardwright.host.plugin_host import host
from shardwright.optim.rows import RowOptimizer
from shardwright.planning.tables.optimizers import OptimizerSpec


class _Functions:
    """The functions that the update of an optimizer may use, of torch's tensors."""

    sqrt, sign, exp, log = torch.sqrt, torch.sign, torch.exp, torch.log
    abs, where = torch.abs, torch.where

    @staticmethod
    def maximum(one: Any, other: Any) -> Tensor:
        """The larger of two numbers, element by element."""
        return torch.maximum(*_as_tensors(one, other))

    @staticmethod
    def minimum(one: Any, other: Any) -> Tensor:
        """The smaller of two numbers, element by element."""
        return torch.minimum(*_as_tensors(one, other))


def _as_tensors(one: Any, other: Any) -> tuple[Tensor, Tensor]:
    like = one if isinstance(one, Tensor) else other
    first, second = (
        own if isinstance(own, Tensor) else torch.full((), own, dtype=like.dtype, device=like.device)
        for own in (one, other)
    )
    return first, second


def rule_or_reason(spec: OptimizerSpec) -> RowRule | str:
    """The registered optimizer of a specification with its parameters, or the reason why there is none."""
    return RowRule.of(spec, host().optimizers)


def rule_of(spec: OptimizerSpec) -> RowRule:
    """The registered optimizer of a specification with its parameters.

    Raises:
        UnknownNameError: there is none of its name.
        InvalidInputError: it does not take one of the parameters.
    """
    rule = rule_or_reason(spec)
    if isinstance(rule, RowRule):
        return rule
    raise (InvalidInputError if spec.name in host().optimizers else UnknownNameError)(rule)


def updated_rows(
    rule: RowRule,
    weights: Tensor,
    gradient: Tensor,
    own: slice,
    states: Mapping[str, Tensor],
    numbers: Sequence[float],
) -> tuple[Tensor, Mapping[str, Tensor]]:
    """Make the update of some rows, without changing anything.

    Args:
        rule: optimizer and its parameters.
        weights: the rows, ``[N, D]`` float32.
        gradient: their gradients, ``[N, C]``.
        own: the columns of ``gradient`` that are the weights' own.
        states: state of the rows, ``[N, D]`` or ``[N, 1]``.
        numbers: numbers of the update.

    Returns:
        New rows and new states.
    """
    optimizer, xp, numbers = rule.optimizer, _Functions, tuple(numbers)
    of_elements: tuple[Any, ...] = tuple(states[name] for name in rule.states_of(ELEMENT))
    of_rows: tuple[Any, ...] = tuple(states[name] for name in rule.states_of(ROW))
    row: tuple[Any, ...] = ()
    if optimizer.reads_row:
        seen = (weights, of_elements) if optimizer.reads_row == WEIGHTS else (0.0, ())
        terms = optimizer.row_terms(xp, seen[0], gradient, seen[1], numbers)
        means = tuple(term.mean(1, keepdim=True) for term in terms)
        of_rows, row = optimizer.row_update(xp, of_rows, means, numbers)
    new, of_elements = optimizer.update(xp, weights, gradient[:, own], of_elements, row, numbers)
    names = (*rule.states_of(ELEMENT), *rule.states_of(ROW))
    return new, dict(zip(names, (*of_elements, *of_rows), strict=True))


@final
class RuleOptimizer(RowOptimizer):
    """A registered optimizer as a torch optimizer of unsharded tables: it updates the rows that a gradient touches.

    Args:
        params: tables, ``[R, D]``.
        spec: specification of the optimizer.
    """

    def __init__(self, params: Iterable[Any], spec: OptimizerSpec) -> None:
        self._rule = rule_of(spec)
        super().__init__(params, {"lr": spec.learning_rate, **self._rule.parameters})

    def _initial_state(self, param: Tensor, group: dict[str, Any]) -> dict[str, Tensor]:
        columns = self._rule.columns(param.shape[1])
        return {
            name: param.new_full((param.shape[0], width), self._rule.initial(name), dtype=torch.float32)
            for name, width in columns.items()
        }

    def _updated_rows(
        self, rows: Tensor, gradient: Tensor, index: Tensor, state: dict[str, Tensor], group: dict[str, Any]
    ) -> Tensor:
        states = {name: state[name][index] for name in self._rule.states}
        numbers = self._rule.numbers(group["lr"], float(state["step"]))
        new, later = updated_rows(self._rule, rows, gradient, slice(None), states, numbers)
        for name, values in later.items():
            state[name][index] = values
        return new
