"""Lookup of the ``fused_numba`` kernel.

Legend: W sources, S slots, K blocks, D columns of a block, C columns of a slot's gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from itertools import accumulate
from typing import Any, TypeAlias

import numpy as np
import torch
from attrs import define
from torch import Tensor

from shardwright.contracts.lookup import Bags, BlockSpec, Lookup
from shardwright.contracts.optimizer import ELEMENT, ROW, RowRule
from shardwright.planning.arrays import Ints
from shardwright.planning.tables.optimizers import OptimizerSpec
from shardwright_plugins.compute_kernels._optimizers import STARTED, is_plain, rule_of
from shardwright_plugins.compute_kernels._threads import Share, in_threads, shares_of
from shardwright_plugins.compute_kernels.fused_numba import _look_up_loops as look_ups
from shardwright_plugins.compute_kernels.fused_numba import _sort_loops as sorts
from shardwright_plugins.compute_kernels.fused_numba import _update_loops as updates
from shardwright_plugins.compute_kernels.fused_numba._row_loops import LINE
from shardwright_plugins.compute_kernels.fused_numba._rules import loops_of_rule

_OPTIMIZERS = {
    "sgd": updates.SGD,
    "adagrad": updates.ADAGRAD,
    "row_wise_adagrad": updates.ROW_WISE_ADAGRAD,
    "adam": updates.ADAM,
}


@define(eq=False)
class Cells:
    """Bags as arrays; see :mod:`_look_up_loops`."""

    ids: Any
    id_weights: Any
    lengths: Any
    bags: Ints
    first_id: Ints
    counts: Ints
    is_matrix: bool
    places: Any = None
    by_row: list[_ByRow] | None = None

    @classmethod
    def of(cls, bags: Bags) -> Cells:
        lengths = _NO_LENGTHS if bags.lengths is None else bags.lengths.contiguous().numpy()
        per_cell = bags.table.reshape(-1)
        first_id = np.empty(per_cell.size + 1, np.int64)
        look_ups.first_ids(lengths, per_cell, first_id)
        return cls(
            ids=bags.ids.contiguous().numpy(),
            id_weights=_NO_FLOATS if bags.weights is None else bags.weights.contiguous().numpy(),
            lengths=lengths,
            bags=per_cell,
            first_id=first_id,
            counts=bags.table,
            is_matrix=bags.lengths is not None and not bags.is_ragged,
        )


_ByRow: TypeAlias = tuple[Share, Ints, Any, Ints, Any, Any]
"""A share of the blocks, its ids sorted by rows, see :func:`_sort_loops.sort_ids`, and room for a row's gradient."""


def _sorted_by_row(geometry: Geometry, cells: Cells, places: Ints, share: Share) -> _ByRow:
    # Room for all ids: pages that a share does not write take no memory.
    most, ends = int(cells.first_id[-1]), np.empty(share[1] - share[0], np.int64)
    rows, starts = np.empty(most, np.int32), np.empty(most, np.int64)
    factors = np.empty(most if cells.id_weights.size else 0, np.float32)
    sorts.sort_ids(
        geometry.blocks, share, cells.counts.shape[1], cells.ids, cells.id_weights, cells.lengths, cells.bags,
        cells.first_id, places, ends, rows, starts, factors,
    )  # fmt: skip
    return share, ends, rows, starts, factors, np.empty(geometry.widest_gradient, np.float32)


_NO_LENGTHS = np.empty(0, np.int32)
_NO_FLOATS = np.empty(0, np.float32)


class FusedNumbaLookup(Lookup):
    """The weights of all blocks in one tensor; loops read bags and gradients in the order in which they travel."""

    def __init__(self, blocks: Sequence[BlockSpec]) -> None:
        self.blocks = blocks
        optimizer = blocks[0].request.optimizer
        assert optimizer is not None  # the kernel's supports()
        self._learning_rate = optimizer.learning_rate
        rule = rule_of(optimizer)
        self.states_per_row = frozenset(rule.states_of(ROW))
        self._num_steps = np.zeros((), np.float32)
        self._geometry = Geometry(blocks, row_wise=bool(rule.optimizer.reads_row))
        self._weights = _floats(self._geometry.num_elements)
        self._states = {
            name: _floats(self._geometry.num_rows if of == ROW else self._geometry.num_elements).fill_(
                rule.initial(name)
            )
            for name, of in rule.states.items()
        }
        self._update: _BuiltIn | _OfPlugin = (
            _BuiltIn(optimizer, rule) if is_plain(optimizer, STARTED) else _OfPlugin(rule)
        )

    def forward(self, bags: Bags, *, training: bool) -> tuple[Tensor, Any]:
        geometry, cells = self._geometry, Cells.of(bags)
        places, size = geometry.places(cells.counts, is_matrix=cells.is_matrix)
        cells.places, result = places, self.room(size)
        out, weights = result.data_ptr(), self._weights.data_ptr()
        look_up = partial(
            look_ups.look_up, weights, geometry.slots, cells.ids, cells.id_weights, cells.lengths, cells.bags,
            cells.first_id, places, out,
        )  # fmt: skip
        in_threads(look_up, shares_of(lambda: geometry.slot_work(cells), geometry.slots.shape[0]))
        return result, cells if training else None

    def prepare(self, bags: Bags) -> Any:
        return Cells.of(bags)

    def backward(self, saved: Any, gradient: Tensor) -> Sequence[Tensor | None]:
        return self.backward_scaled(saved, gradient, 1.0)

    def backward_scaled(self, saved: Any, gradient: Tensor, scale: float) -> Sequence[Tensor | None]:
        self._num_steps += 1
        geometry = self._geometry
        gradient = gradient.contiguous()
        weights, gradients = self._weights.data_ptr(), gradient.data_ptr()
        optimizer, numbers, first, second = self._update.arguments(
            self._learning_rate, self._num_steps, self._states
        )

        def update(by_row: _ByRow) -> None:
            self._update.loops.update(
                optimizer, numbers, weights, first, second, geometry.blocks, gradients, np.float32(scale), *by_row,
            )  # fmt: skip

        in_threads(update, self._by_row(saved))
        return ()

    def anticipate(self, saved: Any) -> None:
        self._by_row(saved)

    def _by_row(self, cells: Cells) -> list[_ByRow]:
        """The ids of all blocks sorted by rows, each thread's share; made once."""
        if cells.by_row is None:
            geometry, places = self._geometry, cells.places
            if places is None or not geometry.gradients_are_alike:
                places, _ = geometry.places(cells.counts, is_matrix=cells.is_matrix, gradient=True)
            shares = shares_of(lambda: geometry.block_work(cells), geometry.blocks.shape[0])
            cells.by_row = in_threads(partial(_sorted_by_row, geometry, cells, places), shares)
        return cells.by_row

    def row_sums(self, bags: Bags, gradients: Sequence[Tensor], out: Tensor) -> bool:
        geometry, cells = self._geometry, Cells.of(bags)
        wanted, starts = geometry.row_sums
        pieces = [gradient if gradient.stride(1) == 1 else gradient.contiguous() for gradient in gradients]
        places = np.array([[piece.data_ptr(), piece.stride(0)] for piece in pieces], dtype=np.int64)

        def add_up(share: Share) -> None:
            start, stop, *_ = share
            updates.add_up_rows(
                places, geometry.blocks, wanted[start:stop], cells.ids, cells.id_weights, cells.lengths, cells.bags,
                cells.first_id, starts[start:stop], out.data_ptr(),
            )  # fmt: skip

        in_threads(add_up, shares_of(lambda: geometry.block_work(cells)[wanted], len(wanted), may_part=False))
        return True

    def update_rows(self, terms: Sequence[Tensor], scale: float) -> None:
        self._num_steps += 1
        geometry = self._geometry
        optimizer, numbers, first, second = self._update.arguments(
            self._learning_rate, self._num_steps, self._states
        )
        wanted, starts = geometry.row_sums
        sums = np.array([term.data_ptr() for term in terms], dtype=np.int64)

        def update(share: Share) -> None:
            start, stop, *_ = share
            room = np.empty(geometry.widest_gradient, np.float32)
            self._update.loops.update_all(
                optimizer, numbers, self._weights.data_ptr(), first, second, geometry.blocks, wanted[start:stop],
                sums, starts[start:stop], np.float32(scale), room,
            )  # fmt: skip

        in_threads(update, shares_of(lambda: geometry.elements[wanted], len(wanted), may_part=False))

    def weight(self, block: int) -> Tensor:
        return self._geometry.elements_of(self._weights, block)

    def optimizer_state(self, block: int) -> Mapping[str, Tensor]:
        if not self._states:
            return {}
        geometry, per_row = self._geometry, self.states_per_row
        states = {
            name: (geometry.rows_of if name in per_row else geometry.elements_of)(state, block)
            for name, state in self._states.items()
        }
        return {"step": torch.from_numpy(self._num_steps), **states}

    def load_step(self, step: float) -> None:
        self._num_steps.fill(step)

    def set_learning_rate(self, learning_rate: float) -> None:
        self._learning_rate = learning_rate


class _BuiltIn:
    """An update that the loops have built in."""

    def __init__(self, spec: OptimizerSpec, rule: RowRule) -> None:
        self._number, self.loops = _OPTIMIZERS[spec.name], updates
        get = rule.parameters.get
        self._eps, self._beta1, self._beta2 = get("eps", 0.0), get("beta1", 0.9), get("beta2", 0.999)

    def arguments(
        self, learning_rate: float, step: Any, states: Mapping[str, Tensor]
    ) -> tuple[int, Any, int, int]:
        """Optimizer, numbers, and addresses of the states, 0 where there is none; see :func:`_update_loops.update`."""
        beta1, beta2, number = self._beta1, self._beta2, float(step)
        numbers = (1 - beta1, beta2, 1 - beta2, 1 - beta1**number, 1 - beta2**number)
        first, second, *_ = *map(Tensor.data_ptr, states.values()), 0, 0
        return self._number, np.array([learning_rate, self._eps, *numbers], dtype=np.float32), first, second


class _OfPlugin:
    """An update that is compiled from what a registered optimizer says."""

    def __init__(self, rule: RowRule) -> None:
        self.loops, self._rule = loops_of_rule(rule), rule

    def arguments(
        self, learning_rate: float, step: Any, states: Mapping[str, Tensor]
    ) -> tuple[int, tuple[np.float32, ...], tuple[int, ...], tuple[int, ...]]:
        """As :meth:`_BuiltIn.arguments`; the addresses are of states of elements, and of rows."""
        numbers = tuple(map(np.float32, self._rule.numbers(learning_rate, float(step))))
        of_elements, of_rows = (
            tuple(states[name].data_ptr() for name in self._rule.states_of(what)) for what in (ELEMENT, ROW)
        )
        return updates.SGD, numbers, of_elements, of_rows  # the optimizer is not looked at


class Geometry:
    """Places of blocks, slots and rows in flat memory, computed once.

    Attributes:
        slots: ``[S, 3]``, see :func:`_look_up_loops.look_up`.
        blocks: ``[K, 7]``, see :func:`_update_loops.update`.
        num_elements: weights of all blocks, each of which begins with a cache line.
        elements: weights of each block: ``[K]``.
        num_rows: rows of all blocks.
        widest_gradient: the most columns a gradient has.
        gradients_are_alike: gradients have the columns of results, and so their places.
    """

    slots: Ints
    blocks: Ints

    def __init__(self, blocks: Sequence[BlockSpec], *, row_wise: bool) -> None:
        rows = [spec.block.num_rows for spec in blocks]
        dims = [spec.block.num_columns for spec in blocks]
        sizes = [count * dim for count, dim in zip(rows, dims, strict=True)]
        # Blocks begin with a cache line, so that a row is in as few of them as it can be.
        rooms = [-(-size // LINE) * LINE for size in sizes]
        bases, self.num_elements = _starts(rooms), sum(rooms)
        first_rows, self.num_rows = _starts(rows), sum(rows)
        first_slots = _starts([spec.num_slots for spec in blocks])
        own = [spec.table.embedding_dim if row_wise else dim for spec, dim in zip(blocks, dims, strict=True)]
        offsets = [spec.block.columns.start if row_wise else 0 for spec in blocks]
        stops = [start + spec.num_slots for start, spec in zip(first_slots, blocks, strict=True)]
        self.blocks = _table(first_slots, stops, bases, dims, own, offsets, first_rows)
        self.widest_gradient = max(own)
        self._sum_shapes = _table(rows, own)
        self.elements = np.array(sizes)
        per_slot = np.repeat(np.arange(len(blocks)), [spec.num_slots for spec in blocks])
        self.slots = _table(bases, dims, rows)[per_slot]
        self._dims = {False: self.slots[:, 1], True: self.blocks[per_slot, 4]}
        self.gradients_are_alike = dims == own
        self._spans = list(zip(first_rows, rows, bases, dims, strict=True))
        self._known: dict[Any, tuple[Ints, int]] = {}

    def places(self, counts: Ints, *, is_matrix: bool, gradient: bool = False) -> tuple[Ints, int]:
        """A cell's first bag, where its result (or gradient) begins, and from bag to bag; and the size of all.

        A matrix is ``[B_w, width]`` of each source; else results stand slot after slot, ``[bags, D]``.
        """
        if not is_matrix:  # the counts of sequences and ragged bags are new in every batch
            return self._places(counts, self._dims[gradient], is_matrix)
        key = (counts[:, 0].tobytes(), gradient)  # a source has as many in each slot
        try:
            return self._known[key]
        except KeyError:
            if len(self._known) > _MAX_KNOWN:  # another thread may do so at any time
                self._known.clear()
            found = self._known[key] = self._places(counts, self._dims[gradient], is_matrix)
            return found

    @staticmethod
    def _places(counts: Ints, dims: Ints, is_matrix: bool) -> tuple[Ints, int]:
        if not is_matrix:
            return look_ups.places_in_a_row(counts, dims)
        totals = (counts * dims).sum(1)
        starts = (np.cumsum(totals) - totals)[:, None] + (np.cumsum(dims) - dims)
        first_bags = (np.cumsum(counts) - counts.reshape(-1)).reshape(counts.shape)
        places = np.stack([first_bags, starts, np.full(counts.shape, dims.sum())], axis=2)
        return places.reshape(-1, 3), int(totals.sum())

    @cached_property
    def row_sums(self) -> tuple[Ints, Ints]:
        """All blocks; where each one's rows and marks begin in :meth:`FusedNumbaLookup.row_sums`, and its rows."""
        rows, own = self._sum_shapes.T
        sizes = np.concatenate([rows * own, rows])
        starts = (np.cumsum(sizes) - sizes).reshape(2, -1)
        return np.arange(len(rows)), _table(*starts, rows)

    def slot_work(self, cells: Cells) -> Ints:
        """Elements that each slot reads: ``[S]``."""
        num_ids = np.diff(cells.first_id).reshape(-1, len(self.slots)).sum(0)
        return np.asarray(num_ids * self.slots[:, 1])

    def block_work(self, cells: Cells) -> Ints:
        """Elements that each block's update reads: ``[K]``."""
        return np.add.reduceat(self.slot_work(cells), self.blocks[:, 0])

    def rows_of(self, values: Tensor, block: int) -> Tensor:
        """``[rows, 1]``: a block's part of one value a row; shared storage."""
        first, rows, _, _ = self._spans[block]
        return values[first : first + rows].view(rows, 1)

    def elements_of(self, values: Tensor, block: int) -> Tensor:
        """``[rows, D]``: a block's part of one value an element; shared storage."""
        _, rows, base, dim = self._spans[block]
        return values[base : base + rows * dim].view(rows, dim)


_MAX_KNOWN = 16


def _floats(size: Any) -> Tensor:
    """Zeros as the loops read and write them, whatever torch's defaults are."""
    return torch.zeros(size, dtype=torch.float32, device="cpu")


def _starts(sizes: Sequence[int]) -> list[int]:
    return [0, *accumulate(sizes)][:-1]


def _table(*columns: Sequence[int]) -> Ints:
    return np.array(columns, dtype=np.int64).T.copy()
