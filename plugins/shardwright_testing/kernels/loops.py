"""Lookups as loops over single rows, in float64, and torch's optimizers: what every kernel is compared with."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias, cast

import numpy as np
import torch
from attrs import evolve, field, frozen
from torch import Tensor

from shardwright.contracts import ComputeKernel
from shardwright.contracts.compute_kernel import KernelRequest
from shardwright.contracts.lookup import Bags, BlockSpec, Lookup
from shardwright.errors import UnsupportedError
from shardwright.optim.fused import spec_to_torch
from shardwright.planning.layouts.layout import Block
from shardwright.planning.tables.optimizers import OptimizerSpec
from shardwright.planning.tables.spec import TableSpec
from shardwright_testing.kernels.keys import AllKeys, RowsOfKeys

CPU = torch.device("cpu")
Bag: TypeAlias = list[tuple[int, float]]
"""Ids with their weights."""

OPTIMIZERS = ("sgd", "adagrad", "row_wise_adagrad", "adam")
"""The optimizers that a kernel is tested with unless its tests name others."""


def block_spec(
    rows: int,
    dim: int = 8,
    *,
    slots: int = 1,
    columns: tuple[int, int] | None = None,
    optimizer: OptimizerSpec | None,
    data_type: str = "FP32",
    device: str = "cpu",
    pooling: str = "SUM",
    takes_any_id: bool = False,
    is_frozen: bool = False,
    extras: Mapping[str, Any] = MappingProxyType({}),
) -> BlockSpec:
    """A block of a table of its own, as the engine gives it to a kernel."""
    names = tuple(f"f{slot}" for slot in range(slots))
    table = TableSpec("t", rows, dim, names, data_type, pooling, optimizer=optimizer, is_frozen=is_frozen)
    span = table.columns(*(columns or (0, dim)))
    request = KernelRequest.of(
        table, len(span), device=device, on_this_machine=True, first_column=span.start, extras=extras
    )
    part = AllKeys(rows)[0] if takes_any_id else table.all_rows
    return BlockSpec(table, Block(part, span, rank=0), request, slots)


@frozen(eq=False)
class Batch:
    """Bags of ids and weights: `bags[source][slot][sample]` is a list of (id, weight).

    Of sequences, every bag has one id, and slots may have different numbers of them; so they may if bags are ragged.
    """

    bags: list[list[list[Bag]]]
    is_weighted: bool
    is_pooled: bool = True
    is_ragged: bool = False

    def flat(self) -> list[list[tuple[int, float]]]:
        """All bags, by source, slot and sample."""
        return [bag for slots in self.bags for samples in slots for bag in samples]

    def changed(self, change: Callable[[Bag], Bag]) -> Batch:
        """Change every bag by `change`, its ids weighted."""
        bags = [[[change(bag) for bag in samples] for samples in slots] for slots in self.bags]
        return Batch(bags, True, self.is_pooled, self.is_ragged)

    def ragged(self) -> Batch:
        """Without the bags that have no ids."""
        bags = [[[bag for bag in samples if bag] for samples in slots] for slots in self.bags]
        return Batch(bags, self.is_weighted, is_ragged=True)

    def as_bags(self, device: torch.device = CPU) -> Bags:
        """Convert to bags, as the engine gives them to a lookup."""
        pairs = [pair for bag in self.flat() for pair in bag]
        return Bags(
            ids=torch.tensor([id for id, _ in pairs], dtype=torch.int64, device=device),
            lengths=torch.tensor([len(bag) for bag in self.flat()], dtype=torch.int32, device=device)
            if self.is_pooled
            else None,
            weights=torch.tensor([weight for _, weight in pairs], device=device)
            if self.is_weighted
            else None,
            counts=tuple(tuple(len(samples) for samples in slots) for slots in self.bags),
            is_ragged=self.is_ragged,
        )


def draw_batch(
    blocks: Sequence[BlockSpec],
    batch_sizes: Sequence[int],
    *,
    is_weighted: bool,
    seed: int = 0,
    max_length: int = 4,
) -> Batch:
    """Few rows and many ids: bags are empty, and ids repeat in and between bags."""
    generator = torch.Generator().manual_seed(seed)

    def number(stop: int) -> int:
        return int(torch.randint(stop, (), generator=generator))

    rows = [spec.block.num_rows for spec in blocks for _ in range(spec.num_slots)]
    return Batch(
        [
            [
                [
                    [
                        (number(num_rows), (number(7) - 3) / 2 if is_weighted else 1.0)
                        for _ in range(number(max_length + 1))
                    ]
                    for _ in range(size)
                ]
                for num_rows in rows
            ]
            for size in batch_sizes
        ],
        is_weighted,
    )


def draw_sequences(
    blocks: Sequence[BlockSpec], num_sources: int, *, seed: int = 0, max_ids: int = 6
) -> Batch:
    """Draw up to `max_ids` ids for each source and slot, each a bag of its own."""
    drawn = draw_batch(blocks, (1,) * num_sources, is_weighted=False, seed=seed, max_length=max_ids)
    return Batch(
        [[[[pair] for pair in bag] for (bag,) in slots] for slots in drawn.bags], False, is_pooled=False
    )


@frozen(eq=False)
class Loops:
    """The blocks of a group, looked up row by row, and updated as torch does without sharding.

    Args:
        blocks: the blocks.
        weights: weights of each block, `[rows, columns]` float64.
        batch_major: the order of results.
        whole_rows: gradients have the columns of the whole table.
    """

    blocks: Sequence[BlockSpec]
    weights: list[Tensor]
    batch_major: bool
    whole_rows: bool = False
    optimizers: dict[int, _Unsharded] = field(factory=dict)

    def copied(self) -> Loops:
        """Copy the blocks as they are now."""
        weights = [weight.clone() for weight in self.weights]
        return evolve(self, weights=weights, optimizers=copy.deepcopy(self.optimizers))

    @property
    def block_of_slot(self) -> list[int]:
        """The block that each slot looks up."""
        return [index for index, spec in enumerate(self.blocks) for _ in range(spec.num_slots)]

    def gradient_dim(self, block: int) -> int:
        """The columns of a gradient that comes to a block."""
        request = self.blocks[block].request
        return request.embedding_dim if self.whole_rows else request.num_columns

    def _places(
        self, batch: Batch, *, of_gradients: bool
    ) -> Iterator[tuple[int, list[tuple[int, float]], int, int]]:
        """Block, bag, and where its vector lies among the flat results or gradients."""
        dims = [
            self.gradient_dim(block) if of_gradients else self.blocks[block].request.num_columns
            for block in self.block_of_slot
        ]
        base = 0
        for slots in batch.bags:
            sizes = [len(samples) * dim for samples, dim in zip(slots, dims, strict=True)]
            for slot, samples in enumerate(slots):
                for sample, bag in enumerate(samples):
                    if self.batch_major and batch.is_pooled and not batch.is_ragged:
                        start = base + sample * sum(dims) + sum(dims[:slot])
                    else:
                        start = base + sum(sizes[:slot]) + sample * dims[slot]
                    yield self.block_of_slot[slot], bag, start, start + dims[slot]
            base += sum(sizes)

    def size(self, batch: Batch, *, of_gradients: bool) -> int:
        """Count the values of the results or gradients of a batch."""
        return max([stop for *_, stop in self._places(batch, of_gradients=of_gradients)], default=0)

    def sums(self, batch: Batch) -> Tensor:
        """Flat float64: the sum of each bag."""
        result = torch.zeros(self.size(batch, of_gradients=False), dtype=torch.float64)
        for block, bag, start, stop in self._places(batch, of_gradients=False):
            for row, weight in bag:
                result[start:stop] += self.weights[block][row] * weight
        return result

    def reorder(self, block: int, source: Tensor) -> None:
        """Put the rows of a block in another order: row `r` becomes what row `source[r]` was."""
        self.weights[block] = self.weights[block][source]
        if block in self.optimizers:
            self.optimizers[block].reorder(source)

    def row_gradients(self, batch: Batch, gradient: Tensor) -> dict[tuple[int, int], Tensor]:
        """Compute the gradient of each row, (block, row), that was looked up."""
        gradients: dict[tuple[int, int], Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64))
        for block, bag, start, stop in self._places(batch, of_gradients=True):
            for row, weight in bag:
                gradients[block, row] = gradients[block, row] + gradient[start:stop].double() * weight
        return dict(gradients)

    def weight_gradients(self, batch: Batch, gradient: Tensor) -> Tensor:
        """Flat float64: of each id the product of its row and its bag's gradient, ``[N]``."""
        found = []
        for block, bag, start, stop in self._places(batch, of_gradients=True):
            columns = self.blocks[block].block.columns
            own = gradient[start:stop].double()
            own = own[columns.start : columns.stop] if self.whole_rows else own
            found += [self.weights[block][row] @ own for row, _ in bag]
        return torch.stack(found) if found else torch.zeros(0, dtype=torch.float64)

    def update(self, batch: Batch, gradient: Tensor, learning_rate: float) -> None:
        """Update every row that was looked up."""
        gradients = self.row_gradients(batch, gradient)
        for block, spec in enumerate(self.blocks):
            assert spec.request.optimizer is not None, "blocks to be updated name their optimizer"
            rows, columns = self.weights[block].shape[0], spec.block.columns
            span = slice(columns.start, columns.stop) if self.whole_rows else slice(0, len(columns))
            whole = torch.zeros(rows, self.gradient_dim(block), dtype=torch.float64)
            for (of, row), value in gradients.items():
                if of == block:
                    whole[row] = value
            if block not in self.optimizers:
                self.optimizers[block] = _Unsharded.of(spec.request.optimizer, rows, whole.shape[1], span)
            self.weights[block] = self.optimizers[block].step(self.weights[block], whole, learning_rate)

    def optimizer_state(self, block: int) -> Mapping[str, Tensor]:
        """Return the state that the optimizer of a block keeps, by torch's names."""
        return self.optimizers[block].state if block in self.optimizers else {}


@frozen(eq=False)
class _Unsharded:
    """A block's table under the torch optimizer that does without sharding what a kernel does.

    Args:
        table: ``[R, D]`` float64, of all columns whose gradient the block gets.
        optimizer: torch optimizer that updates the table.
        span: the block's columns among them.
    """

    table: torch.nn.Parameter
    optimizer: torch.optim.Optimizer
    span: slice

    @classmethod
    def of(cls, spec: OptimizerSpec, rows: int, dim: int, span: slice) -> _Unsharded:
        """A table of zeros and its optimizer.

        Raises:
            UnknownNameError: none is registered under the specification's name.
        """
        table = torch.nn.Parameter(torch.zeros(rows, dim, dtype=torch.float64))
        return cls(table, spec_to_torch(spec, [table]), span)

    def step(self, weight: Tensor, gradient: Tensor, learning_rate: float) -> Tensor:
        """The block's weights after an update from ``weight``."""
        with torch.no_grad():
            self.table[:, self.span] = weight
        self.table.grad = gradient
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.step()
        return self.table.detach()[:, self.span].clone()

    @property
    def state(self) -> Mapping[str, Tensor]:
        """State of the optimizer: of rows, the block's columns."""
        found = self.optimizer.state[self.table]
        is_wide = {name: value.dim() == 2 and value.shape[1] > 1 for name, value in found.items()}
        return {name: value[:, self.span] if is_wide[name] else value for name, value in found.items()}

    def reorder(self, source: Tensor) -> None:
        """Put the rows in another order: row `r` becomes what row `source[r]` was."""
        found = self.optimizer.state[self.table]
        found.update({name: value[source] for name, value in found.items() if value.dim() == 2})


def lookup_of(kernel: ComputeKernel, blocks: Sequence[BlockSpec], device: torch.device) -> Lookup:
    """The kernel's lookup. It gets the columns of ids that the kernel asks for with all bags, 1 for each id."""
    lookup = kernel.build(blocks, device=device)
    forward = lookup.forward

    def checked(bags: Bags, **options: Any) -> tuple[Tensor, Any]:
        answer = forward(bags, **options)
        _check_result(kernel.name, blocks, bags, answer)
        return answer

    vars(lookup)["forward"] = checked
    asked = {name: dtype for spec in blocks for name, dtype in kernel.columns(spec.request).items()}

    def given(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(bags: Bags, *further: Any, **options: Any) -> Any:
            ones = {
                name: torch.ones_like(bags.ids, dtype=getattr(torch, dtype)) for name, dtype in asked.items()
            }
            return method(evolve(bags, columns=ones), *further, **options)

        return call

    for name in ("forward", "prepare", "prefetch", "row_sums") if asked else ():
        setattr(lookup, name, given(getattr(lookup, name)))
    return lookup


def build(
    kernel: ComputeKernel, blocks: Sequence[BlockSpec], *, seed: int = 1, device: torch.device = CPU
) -> tuple[Lookup, Loops]:
    """The kernel's lookup and the loops, with the same random weights; if ids are keys, those of all rows are known."""
    lookup = lookup_of(kernel, blocks, device)
    if kernel.row_state:
        lookup = cast("Lookup", RowsOfKeys(lookup, kernel.name))
    generator = torch.Generator().manual_seed(seed)
    for index in range(len(blocks)):
        weight = lookup.weight(index)
        weight.copy_(torch.rand(weight.shape, generator=generator) - 0.5)
    whole_rows = kernel.needs_whole_rows(blocks[0].request)
    weights = [lookup.weight(index).double().cpu().clone() for index in range(len(blocks))]
    return lookup, Loops(blocks, weights, kernel.batch_major, whole_rows)


def _check_result(kernel_name: str, blocks: Sequence[BlockSpec], bags: Bags, answer: object) -> None:
    """Check the result of a forward pass, which is to be a pair of the bags' sums and what ``backward`` needs.

    Args:
        kernel_name: name of the compute kernel.
        blocks: blocks that were looked up.
        bags: bags that were looked up.
        answer: value that the kernel returned.

    Raises:
        UnsupportedError: it is something else, or the sums are of another dtype or number.
    """
    given = answer if isinstance(answer, tuple | list) else (answer,)
    widths = np.array([own.block.num_columns for own in blocks for _ in range(own.num_slots)], dtype=np.int64)
    sums, size = given[0] if len(given) == 2 else None, int(bags.table.sum(0) @ widths)
    if not isinstance(sums, Tensor) or (sums.dtype, sums.numel()) != (torch.float32, size):
        shape = f" of {sums.dtype}, {list(sums.shape)}" if isinstance(sums, Tensor) else ""
        raise UnsupportedError(
            f"compute kernel {kernel_name!r} broke its contract: forward() for the tables "
            f"{', '.join(repr(own.table.name) for own in blocks)} returned "
            f"({', '.join(type(own).__name__ for own in given)}){shape}; it must return a pair: the sums, a tensor of "
            f"{size} elements of float32 for these bags, and what backward() needs"
        )
