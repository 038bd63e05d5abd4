"""Registered optimizers in the compiled loops of the ``fused_numba`` kernel.

The loops over rows are those of :mod:`_update_loops`, compiled once more with another update of a row in the place of
theirs: the optimizer's own functions, given an element at a time. So they need no memory of their own, and become
vector instructions like loops that were written for one optimizer. They are compiled in each process, since what Numba
keeps on disk would not be thrown away when an optimizer changes.

Legend: D columns of a block, C columns of its gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
from attrs import frozen
from numba import njit
from numba.extending import overload

from shardwright.contracts.optimizer import ELEMENT, ROW, WEIGHTS, RowRule
from shardwright_plugins.compute_kernels.fused_numba import _update_loops as loops
from shardwright_plugins.compute_kernels.fused_numba._row_loops import OPTIONS, read, write


def _compiled(function: Any) -> Any:
    """Compile a function on first use, in this process."""
    return njit(nogil=True, **OPTIONS)(function)


def _functions() -> ModuleType:
    """The functions that the update of an optimizer may use, of float32 numbers."""
    made: Any = ModuleType("xp")
    for name in ("sqrt", "abs", "sign", "exp", "log"):
        setattr(made, name, getattr(np, name))
    made.maximum = _compiled(lambda one, other: np.float32(one if one > other else other))
    made.minimum = _compiled(lambda one, other: np.float32(one if one < other else other))
    made.where = _compiled(lambda test, one, other: np.float32(one if test else other))
    return made


_XP = _functions()


@frozen
class RowLoops:
    """The loops over rows of one optimizer, as :mod:`_update_loops` has them for its own.

    Args:
        update: stands for :func:`_update_loops.update`, its states being tuples of addresses.
        update_all: stands for :func:`_update_loops.update_all`, likewise.
    """

    update: Callable[..., None]
    update_all: Callable[..., None]


@lru_cache(maxsize=32)
def loops_of(optimizer: type[Any], states: tuple[int, int], reads: str) -> RowLoops:
    """The loops of an optimizer's class.

    Args:
        optimizer: class of the optimizer.
        states: number of its states that have a value an element, and of those that have one a row.
        reads: values of a row that an element's update depends on, as in its contract.
    """
    own = {
        "_update_row": _row_update(optimizer, states, reads),
        "_prefetch_state": _compiled(_no_prefetch),
    }
    return RowLoops(*(_compiled_with(loop, own) for loop in (loops.update, loops.update_all)))


def loops_of_rule(rule: RowRule) -> RowLoops:
    """The loops of an optimizer with its parameters."""
    counts = (len(rule.states_of(ELEMENT)), len(rule.states_of(ROW)))
    return loops_of(type(rule.optimizer), counts, rule.optimizer.reads_row)


def _compiled_with(loop: Any, names: dict[str, Any]) -> Any:
    """Compile the function of a compiled loop with other functions under some of its global names."""
    plain = loop.py_func
    changed = FunctionType(plain.__code__, {**plain.__globals__, **names}, plain.__name__)
    return _compiled(changed)


def _no_prefetch(optimizer: int, first: Any, row: int, dim: int, number: int) -> None:
    """Leave it to the processor which state to fetch ahead."""


def _row_update(optimizer: type[Any], states: tuple[int, int], reads: str) -> Any:
    """Compile the update of one row; its arguments are those of :func:`_update_loops._update_row`.

    ``first`` and ``second`` are tuples of addresses: of states of elements, and of rows.
    """
    element, row_update = _compiled(optimizer.update), _compiled(optimizer.row_update)
    get, put = _reader(states[0]), _writer(states[0])
    get_of_row, put_of_row = _reader(states[1]), _writer(states[1])
    means_of, xp = _means(optimizer, states[0], reads), _XP

    @_compiled
    def update_row(
        optimizer: Any, numbers: Any, weights: Any, row: Any, dim: Any, total: Any, scale: Any, own: Any, offset: Any,
        first: Any, second: Any, number: Any,
    ) -> None:  # fmt: skip
        means = means_of(numbers, weights, row, total, scale, own, first)
        of_row, values = row_update(xp, get_of_row(second, number), means, numbers)
        put_of_row(second, number, of_row)
        for column in range(dim):
            gradient, state = scale * read(total, offset + column), get(first, row + column)
            weight, state = element(xp, read(weights, row + column), gradient, state, values, numbers)
            write(weights, row + column, np.float32(weight))
            put(first, row + column, state)

    return update_row


def _means(optimizer: type[Any], num_states: int, reads: str) -> Any:
    """Compile the means of an optimizer's terms over a row; of none where it reads none."""
    if not reads:

        @_compiled
        def no_means(
            numbers: Any, weights: Any, row: Any, total: Any, scale: Any, own: Any, first: Any
        ) -> Any:
            return ()

        return no_means
    terms, get, xp = _compiled(optimizer.row_terms), _reader(num_states), _XP
    has_weights, no_weight = reads == WEIGHTS, np.float32(0)

    @_compiled
    def terms_of(numbers: Any, weights: Any, row: Any, column: Any, gradient: Any, first: Any) -> Any:
        if has_weights:
            return terms(xp, read(weights, row + column), gradient, get(first, row + column), numbers)
        return terms(xp, no_weight, gradient, (), numbers)

    @_compiled
    def means(numbers: Any, weights: Any, row: Any, total: Any, scale: Any, own: Any, first: Any) -> Any:
        sums = _times(terms_of(numbers, weights, row, 0, scale * read(total, 0), first), np.float32(1))
        for column in range(1, own):
            sums = _plus(sums, terms_of(numbers, weights, row, column, scale * read(total, column), first))
        return _times(sums, np.float32(1) / np.float32(own))

    return means


def _plus(one: Any, other: Any) -> Any:
    """Add two tuples, number by number, in float32; known to compiled functions only."""
    raise NotImplementedError


def _times(one: Any, factor: Any) -> Any:
    """Multiply each number of a tuple, in float32; known to compiled functions only."""
    raise NotImplementedError


# Numba takes no star in a tuple; functions over tuples are made anew for each number of values.
@overload(_plus, strict=False)  # type: ignore[untyped-decorator]
def _plus_of_types(one: Any, other: Any) -> Any:
    if len(one) == 0:
        return lambda one, other: ()
    return lambda one, other: (np.float32(one[0] + other[0]),) + _plus(one[1:], other[1:])  # noqa: RUF005


@overload(_times, strict=False)  # type: ignore[untyped-decorator]
def _times_of_types(one: Any, factor: Any) -> Any:
    if len(one) == 0:
        return lambda one, factor: ()
    return lambda one, factor: (np.float32(one[0] * factor),) + _times(one[1:], factor)  # noqa: RUF005


def _reader(count: int) -> Any:
    """Compile the reading of a float32 at each of so many addresses, as a tuple."""
    if count == 0:
        return _compiled(lambda addresses, index: ())
    rest = _reader(count - 1)
    return _compiled(lambda addresses, index: (read(addresses[0], index),) + rest(addresses[1:], index))  # noqa: RUF005


def _writer(count: int) -> Any:
    """Compile the writing of a tuple's values as float32 to as many addresses."""
    if count == 0:
        return _compiled(lambda addresses, index, values: None)
    rest = _writer(count - 1)

    @_compiled
    def put(addresses: Any, index: Any, values: Any) -> None:
        write(addresses[0], index, np.float32(values[0]))
        rest(addresses[1:], index, values[1:])

    return put
