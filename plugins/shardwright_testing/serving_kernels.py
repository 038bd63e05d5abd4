"""Conformance tests of compute kernels that look rows up and do not train them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

import attrs
import pytest
import torch

from shardwright.contracts import ComputeKernel, RowFormat
from shardwright.contracts.lookup import BlockSpec, Lookup
from shardwright.contracts.row_format import FLOATS
from shardwright_testing.kernels.kernel_checks import check_declared, check_sums
from shardwright_testing.kernels.kernel_groups import draw, possible_requests, takes
from shardwright_testing.kernels.loops import CPU, Loops, block_spec, draw_sequences

SOURCES = ((3,), (2, 3), (4, 0, 1), (0, 0), (0,))
"""Batch sizes of the ranks whose bags a lookup gets."""


class ServingKernelTests:
    """The tests of a compute kernel that does not train: give the fixture ``compute_kernel``, an instance.

    They run on the CPU, over rows of the formats that the kernel brings and of floats. What the kernel says it does not
    support is left out. The formats have tests of their own, ``RowFormatTests``.
    """

    def test_declarations_can_be_planned_with(self, compute_kernel: ComputeKernel) -> None:
        """Requests that train are refused; of what is supported the numbers make sense."""
        served = 0
        names = [one.name for one in compute_kernel.row_formats]
        for asked in possible_requests(data_types=(*names, *FLOATS)):
            takes = not compute_kernel.refusal_of_rows(asked) and compute_kernel.supports(asked) is True
            assert not takes, f"{compute_kernel.name}: takes {asked}, and does not train"
            request = attrs.evolve(asked, optimizer=None, is_frozen=True)
            answer = compute_kernel.supports(request)
            assert answer is True or (isinstance(answer, str) and answer), (
                f"{compute_kernel.name}: supports() must be True or the reason why not, it is {answer!r}"
            )
            if answer is True and not compute_kernel.refusal_of_rows(request):
                served += 1
                check_declared(compute_kernel, request)
                rows = compute_kernel.row_format(request.data_type)
                assert rows is not None, f"{compute_kernel.name}: has no format of {request.data_type}"
                declared = sum(compute_kernel.memory_bytes(request, 100).values())
                assert declared >= 100 * rows.row_bytes(request.num_columns), (
                    f"{compute_kernel.name}: 100 rows of {request.data_type} take {declared} bytes"
                )
        assert served, f"{compute_kernel.name}: serves nothing"

    @pytest.mark.parametrize("is_weighted", [False, True])
    def test_forward_sums_the_rows_of_each_bag(
        self, compute_kernel: ComputeKernel, is_weighted: bool
    ) -> None:
        """Bags are empty, ids repeat, ranks have batches of different sizes or none; some are ragged."""
        for rows, blocks in _groups(compute_kernel, "SUM"):
            lookup, loops = built(compute_kernel, rows, blocks)
            for sources in SOURCES:
                batch = draw(blocks, sources, is_weighted=is_weighted)
                what = f"{compute_kernel.name}: sums of {rows.name} rows, batches of {sources}"
                check_sums(what, lookup, loops, batch, CPU, training=False)
                if compute_kernel.takes_ragged_bags:
                    check_sums(f"{what}, ragged", lookup, loops, batch.ragged(), CPU, training=False)

    def test_forward_of_sequences_is_the_ids_rows_in_their_order(self, compute_kernel: ComputeKernel) -> None:
        """Batches have any number of ranks and ids."""
        for rows, blocks in _groups(compute_kernel, "NONE"):
            lookup, loops = built(compute_kernel, rows, blocks)
            for num_sources, max_ids in product((1, 2, 3), (0, 6)):
                batch = draw_sequences(blocks, num_sources, max_ids=max_ids)
                what = f"{compute_kernel.name}: {rows.name} rows of sequences"
                check_sums(what, lookup, loops, batch, CPU, training=False)

    def test_rows_that_are_adopted_or_written_are_looked_up(self, compute_kernel: ComputeKernel) -> None:
        """Lookups read rows that were written into ``weight``, and a tensor that was given to ``adopt``."""
        for rows, blocks in _groups(compute_kernel, "SUM"):
            lookup, loops = built(compute_kernel, rows, blocks)
            batch = draw(blocks, (2,), is_weighted=False)
            for index, spec in enumerate(blocks):
                stored = _drawn(rows, spec, seed=7 + index)
                lookup.adopt(index, stored.clone())
                loops.weights[index] = rows.unpack(stored, spec.block.num_columns).double()
                same = torch.equal(lookup.weight(index), stored)
                assert same, f"{compute_kernel.name}: weight({index}) is not what adopt() was given"
            check_sums(
                f"{compute_kernel.name}: {rows.name}, adopted", lookup, loops, batch, CPU, training=False
            )


def built(kernel: ComputeKernel, rows: RowFormat, blocks: Sequence[BlockSpec]) -> tuple[Lookup, Loops]:
    """A lookup of some blocks, and loops over the values of their rows."""
    lookup, weights = kernel.build(blocks, device=CPU), []
    for index, spec in enumerate(blocks):
        stored = _drawn(rows, spec, seed=index)
        lookup.weight(index).copy_(stored)
        weights.append(rows.unpack(stored, spec.block.num_columns).double())
    return lookup, Loops(blocks, weights, kernel.batch_major)


def _drawn(rows: RowFormat, spec: BlockSpec, *, seed: int) -> torch.Tensor:
    """Stored rows of a block, cut from a table that is packed whole."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.rand(spec.block.num_rows, spec.table.embedding_dim, generator=generator) - 0.5
    columns = spec.block.columns
    return rows.columns(rows.pack(whole), spec.table.embedding_dim, columns.start, columns.stop)


def _groups(kernel: ComputeKernel, pooling: str) -> Iterator[tuple[RowFormat, list[BlockSpec]]]:
    """Blocks of several sizes, widths and cuts, in the groups that the kernel asks for, for each format."""
    shapes = ((5, 64, 2, None), (1, 64, 1, None), (3, 32, 1, (16, 32)), (4, 23, 1, None), (4, 8, 1, (1, 4)))
    found = False
    for rows in (*kernel.row_formats, *FLOATS.values()):
        blocks = [
            block_spec(
                count,
                dim,
                slots=slots,
                columns=columns,
                data_type=rows.name,
                pooling=pooling,
                optimizer=None,
                is_frozen=True,
            )
            for count, dim, slots, columns in shapes
        ]
        groups: dict[object, list[BlockSpec]] = {}
        for spec in blocks:
            if takes(kernel, [spec]):
                groups.setdefault(kernel.group_key(spec.request), []).append(spec)
        found = found or bool(groups)
        yield from ((rows, group) for group in groups.values())
    if not found:
        pytest.skip(f"{kernel.name} says it serves nothing on the CPU")
