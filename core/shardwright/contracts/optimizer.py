"""The contract of an optimizer of embedding rows: its state, and the update of a row written once, as array code."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from attrs import frozen

from shardwright.contracts.names import OpenNames
from shardwright.errors import nearest
from shardwright.planning.tables.optimizers import OptimizerSpec

if TYPE_CHECKING:
    from shardwright.host.registry import Registry

ELEMENT, ROW = "element", "row"
GRADIENTS, WEIGHTS = "gradients", "weights"


class Optimizer(ABC, metaclass=OpenNames):
    """Updates the rows of a table that a batch looked up; the others, and their state, are left alone.

    The update is a function of numbers or arrays, whichever a kernel has: an element of a row and its state, or whole
    rows. It uses arithmetic, and the functions of its first argument: ``xp.sqrt``, ``abs``, ``sign``, ``exp``, ``log``,
    ``maximum``, ``minimum`` and ``where``. So one text runs in torch, and is compiled by Numba. It uses no name from
    outside of it, no ``self``, and no branch: :meth:`variant` chooses between forms of an optimizer.

    State and arithmetic are float32 whatever the type of weights. Beside the states an optimizer names, a table has the
    number of its updates, ``step``; each updates all rows that got a gradient, by its sum over the batch.

    Example:
        >>> import shardwright as sw
        >>> class SignDescent(sw.Optimizer):
        ...     name = "sign_descent"
        ...     def numbers(self, parameters, learning_rate, step):
        ...         return (learning_rate,)
        ...     @staticmethod
        ...     def update(xp, weight, gradient, states, row, numbers):
        ...         return weight - numbers[0] * xp.sign(gradient), states
    """

    name: ClassVar[str]
    api: ClassVar[int] = 1
    aliases: ClassVar[tuple[str, ...]] = ()
    parameters: ClassVar[Mapping[str, Any]] = {}
    """The parameters that it takes beside the learning rate, and their defaults."""
    states: ClassVar[Mapping[str, str]] = {}
    """The names of its states, and what has one value of each: ``"element"`` or ``"row"``."""
    reads_row: ClassVar[str] = ""
    """Values of other elements of a row that an element's update depends on: none, ``"gradients"``, or ``"weights"``
    with their states and gradients. Blocks of cut columns are given the gradients of whole rows, but never weights."""

    def refusal(self, parameters: Mapping[str, Any]) -> str:
        """Explain why it does not take a combination of parameters; empty if it does."""
        return ""

    def variant(self, parameters: Mapping[str, Any]) -> Optimizer:
        """The form that it takes with these parameters: itself, unless it has several with other states."""
        return self

    def initial(self, parameters: Mapping[str, Any]) -> Mapping[str, float]:
        """Return initial values of states, where they are not 0."""
        return {}

    @abstractmethod
    def numbers(self, parameters: Mapping[str, Any], learning_rate: float, step: float) -> tuple[float, ...]:
        """Compute what is the same for all rows of an update, once.

        Args:
            parameters: all of its parameters.
            learning_rate: learning rate of the update.
            step: number of the update, from 1.

        Returns:
            Numbers, always as many.
        """

    @staticmethod
    def row_terms(
        xp: Any, weight: Any, gradient: Any, states: tuple[Any, ...], numbers: tuple[Any, ...]
    ) -> tuple[Any, ...]:
        """Compute the terms of an element whose means over a row are needed; only with ``reads_row``.

        Args:
            xp: functions of numbers or arrays.
            weight: the element; 0 if ``reads_row`` is ``"gradients"``.
            gradient: its gradient.
            states: its states that have a value an element; none if ``reads_row`` is ``"gradients"``.
            numbers: result of :meth:`numbers`.
        """
        return ()

    @staticmethod
    def row_update(
        xp: Any, states: tuple[Any, ...], means: tuple[Any, ...], numbers: tuple[Any, ...]
    ) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Update the states that have a value a row; only with ``reads_row``.

        Args:
            xp: functions of numbers or arrays.
            states: states that have a value a row.
            means: means of the terms over all columns of the table.
            numbers: result of :meth:`numbers`.

        Returns:
            The new states, and values of the row for :meth:`update`.
        """
        return states, ()

    @staticmethod
    @abstractmethod
    def update(
        xp: Any,
        weight: Any,
        gradient: Any,
        states: tuple[Any, ...],
        row: tuple[Any, ...],
        numbers: tuple[Any, ...],
    ) -> tuple[Any, tuple[Any, ...]]:
        """Update an element.

        Args:
            xp: functions of numbers or arrays.
            weight: the element.
            gradient: its gradient.
            states: its states that have a value an element.
            row: values of its row, from :meth:`row_update`.
            numbers: result of :meth:`numbers`.

        Returns:
            The new element and its new states.
        """


@frozen
class RowRule:
    """An optimizer with all its parameters, as kernels run it.

    Args:
        optimizer: form of the optimizer that the parameters choose.
        parameters: all of its parameters.
    """

    optimizer: Optimizer
    parameters: Mapping[str, Any]

    @classmethod
    def of(cls, spec: OptimizerSpec, optimizers: Registry[Optimizer]) -> RowRule | str:
        """The rule of a specification, or the reason why there is none.

        Args:
            spec: specification.
            optimizers: registered optimizers.
        """
        if spec.name not in optimizers:
            advice = nearest(spec.name, optimizers) + optimizers.not_loaded
            listed = ", ".join(sorted(optimizers)) or "none"
            return f"no optimizer {spec.name!r} is known, only {listed}{advice and '.' + advice}"
        optimizer = optimizers.create(spec.name)
        known = {**optimizer.parameters, "stochastic_rounding": False}
        for name, value in spec.parameters:
            if name not in known and not _is_neutral(name, value):
                return f"{spec.name!r} has no parameter {name}={value!r}.{nearest(name, known)}"
        given = {name: value for name, value in spec.parameters if name in known and value is not None}
        parameters = {**known, **given}
        refusal = optimizer.refusal(parameters)
        return f"{spec.name!r}: {refusal}" if refusal else cls(optimizer.variant(parameters), parameters)

    @property
    def states(self) -> Mapping[str, str]:
        """The names of its states, and what has one value of each."""
        return self.optimizer.states

    def states_of(self, what: str) -> tuple[str, ...]:
        """Names of the states that have one value of an ``"element"``, or of a ``"row"``."""
        return tuple(name for name, of in self.states.items() if of == what)

    def columns(self, num_columns: int) -> dict[str, int]:
        """Columns of each state, for rows of so many columns."""
        return {name: 1 if of == ROW else num_columns for name, of in self.states.items()}

    def initial(self, name: str) -> float:
        """The initial value of a state."""
        return float(self.optimizer.initial(self.parameters).get(name, 0.0))

    def numbers(self, learning_rate: float, step: float) -> tuple[float, ...]:
        """Numbers of an update."""
        return self.optimizer.numbers(self.parameters, learning_rate, step)

    @property
    def rounds_stochastically(self) -> bool:
        """True if 16-bit weights are to be rounded up or down at random, so that the mean is exact."""
        return bool(self.parameters["stochastic_rounding"])


# FBGEMM takes these for all optimizers.
_NEUTRAL = frozenset({"eps", "beta1", "beta2"})


def _is_neutral(name: str, value: Any) -> bool:
    """True if a parameter has no effect on an optimizer that does not know it."""
    return name in _NEUTRAL or value in (None, False, "none") or (value == 0 and math.isfinite(value))
