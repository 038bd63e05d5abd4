"""Updates of rows in the backward pass with plain torch, for kernels whose rows are tensors.

Legend: R rows of a tensor, N ids, D columns, C columns of a gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from shardwright.contracts.lookup import Bags, BlockSpec
from shardwright.contracts.optimizer import ROW
from shardwright.optim.by_rows import updated_rows
from shardwright.runtime.step.backward.row_gradients import row_gradients
from shardwright_plugins.compute_kernels._optimizers import STARTED, is_plain, needs_whole_rows, rule_of
from shardwright_plugins.compute_kernels.plain_torch._row_updates import row_update

_MASK = (1 << 32) - 1

# Rounding comes after the update.
_WRITTEN = {name: known | {"stochastic_rounding"} for name, known in STARTED.items()}


class RowOptimizer:
    """The optimizer of a group's rows: its learning rate, and the number of its steps.

    Args:
        block: any block of the group.
    """

    def __init__(self, block: BlockSpec) -> None:
        request = block.request
        assert request.optimizer is not None  # the kernel's supports()
        is_whole = needs_whole_rows(request)
        self._spec, self._num_columns = request.optimizer, request.num_columns
        self._rule = rule_of(self._spec)
        # What is written with torch's fused operations is faster.
        self._is_written = is_plain(self._spec, _WRITTEN)
        self._gradient_dim = request.embedding_dim if is_whole else request.num_columns
        self._own = slice(block.block.columns.start, block.block.columns.stop) if is_whole else slice(None)
        self.states_per_row = frozenset(self._rule.states_of(ROW))
        self.learning_rate = self._spec.learning_rate
        self.num_steps = torch.zeros((), dtype=torch.float32, device="cpu")

    @property
    def columns(self) -> Mapping[str, int]:
        """Columns of each float32 state of a row."""
        return self._rule.columns(self._num_columns)

    def initial(self, name: str) -> float:
        """The value of a state before the first update."""
        return self._rule.initial(name)

    def first_state(self, num_rows: int, device: torch.device) -> dict[str, Tensor]:
        """State of rows before the first update, by name: ``[R, D]`` or ``[R, 1]`` float32."""
        return {
            name: torch.full((num_rows, width), self.initial(name), dtype=torch.float32, device=device)
            for name, width in self.columns.items()
        }

    def step(
        self,
        bags: Bags,
        gradient: Tensor,
        weights: Tensor,
        state: Mapping[str, Tensor],
        numbers_of: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Update rows, and their state, by the gradients of bags.

        Args:
            bags: bags whose ids are rows of ``weights``.
            gradient: float32, ``C`` values of each bag.
            weights: the rows, ``[R, D]``.
            state: state of the rows, ``[R, D]`` or ``[R, 1]``.
            numbers_of: function that gives rows the numbers by which they are rounded at random, alike on all ranks
                that have copies; needed for optimizers with ``stochastic_rounding``.
        """
        rows, values = row_gradients(bags, gradient.view(bags.num_bags, self._gradient_dim))
        self.apply(rows, values, weights, state, numbers_of)

    def apply(
        self,
        rows: Tensor,
        values: Tensor,
        weights: Tensor,
        state: Mapping[str, Tensor],
        numbers_of: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Update rows, and their state, by their gradients; the arguments are those of :meth:`step` otherwise.

        Args:
            rows: numbers of the rows, ``[N]``; of one that is there twice, the outcome is one of the two.
            values: float32 gradient of each, ``[N, C]``.
            weights: the rows, ``[R, D]``.
            state: state of the rows.
            numbers_of: function that gives rows the numbers by which they are rounded at random.
        """
        self.num_steps += 1
        step = float(self.num_steps)
        new = self._updated(weights[rows].float(), rows, values, state, step)
        if numbers_of is not None and self._rule.rounds_stochastically and weights.dtype is not torch.float32:
            new = rounded(new, weights.dtype, numbers_of(rows), step)
        weights[rows] = new.to(weights.dtype)

    def _updated(
        self, old: Tensor, rows: Tensor, gradient: Tensor, state: Mapping[str, Tensor], step: float
    ) -> Tensor:
        """New float32 values of rows, whose state advances."""
        if self._is_written:
            return old - row_update(self._spec, state, rows, gradient, self._own, self.learning_rate, step)
        states = {name: values[rows] for name, values in state.items()}
        numbers = self._rule.numbers(self.learning_rate, step)
        new, later = updated_rows(self._rule, old, gradient, self._own, states, numbers)
        for name, values in later.items():
            state[name][rows] = values
        return new

    def named_state(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """State of some rows as a lookup shows it: with the number of steps, where there is any."""
        return {"step": self.num_steps, **state} if state else {}


class RunsRowOptimizer:
    """The part of lookups that hands their row optimizer its learning rate and the number of its steps."""

    _optimizer: RowOptimizer

    def load_step(self, step: float) -> None:
        """Set the number of updates done."""
        self._optimizer.num_steps.fill_(step)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Use another learning rate from now on."""
        self._optimizer.learning_rate = learning_rate


def rounded(values: Tensor, dtype: torch.dtype, rows: Tensor, step: float) -> Tensor:
    """Round float32 values to a 16-bit type, up or down at random, so that their mean stays.

    The chance is drawn from a value's bits, its row and column, and the step: copies on several ranks round alike.

    Args:
        values: ``[N, D]`` float32.
        dtype: ``torch.float16`` or ``torch.bfloat16``.
        rows: number of each row, the same on all ranks that have a copy, ``[N]``.
        step: number of the update.
    """
    # Bits of the significand that the type has not: 23 - 10 and 23 - 7.
    num_lost = 13 if dtype is torch.float16 else 16
    bits = values.contiguous().view(torch.int32).to(torch.int64)
    column = torch.arange(values.shape[1], device=values.device)
    mixed = _mixed(_mixed(rows[:, None] + (int(step) << 20)) ^ (column * 0x9E3779B1) ^ bits)
    # Adding less than a unit of the last kept bit and cutting rounds up as often as the cut part is large.
    raised = bits + (mixed & ((1 << num_lost) - 1))
    cut = (raised & ~((1 << num_lost) - 1)).to(torch.int32).view(torch.float32)
    return torch.where(values.isfinite(), cut, values).to(dtype)


def _mixed(numbers: Tensor) -> Tensor:
    """Mix the bits of 32-bit numbers: murmur3's finaliser (Appleby 2011)."""
    mixed = numbers & _MASK
    mixed = ((mixed ^ (mixed >> 16)) * 0x85EBCA6B) & _MASK
    mixed = ((mixed ^ (mixed >> 13)) * 0xC2B2AE35) & _MASK
    return mixed ^ (mixed >> 16)
