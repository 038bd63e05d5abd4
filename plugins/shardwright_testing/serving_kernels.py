"""Conformance tests of compute kernels that do not train: lookups in quantised tables."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import attrs
import pytest
import torch

from shardwright.contracts import ComputeKernel
from shardwright.contracts.lookup import BlockSpec, Lookup
from shardwright.modules.quantized.rows import QuantizedRows, quantize_rows
from shardwright.planning.tables.quantized import SERVED, stored_row_bytes
from shardwright.planning.tables.spec import DataType
from shardwright_testing.kernels.kernel_checks import check_declared, check_sums
from shardwright_testing.kernels.kernel_groups import draw, possible_requests, takes
from shardwright_testing.kernels.loops import CPU, Loops, block_spec, draw_sequences

SOURCES = ((3,), (2, 3), (4, 0, 1), (0, 0), (0,))
"""Batch sizes of the ranks whose bags a lookup gets."""


class ServingKernelTests:
    """The tests of a compute kernel that does not train: give the fixture ``compute_kernel``, an instance.

    They run on the CPU. What the kernel says it does not support is left out.
    """

    def test_declarations_can_be_planned_with(self, compute_kernel: ComputeKernel) -> None:
        """Requests that train are refused; of what is supported the numbers make sense."""
        served = 0
        for asked in possible_requests():
            assert compute_kernel.supports(asked) is not True, (
                f"{compute_kernel.name}: takes {asked}, untrained"
            )
            request = attrs.evolve(asked, optimizer=None, is_frozen=True)
            answer = compute_kernel.supports(request)
            assert answer is True or (isinstance(answer, str) and answer), (
                f"{compute_kernel.name}: supports() must be True or the reason why not, it is {answer!r}"
            )
            if answer is True:
                served += 1
                check_declared(compute_kernel, request)
                least = 100 * stored_row_bytes(request.data_type, request.num_columns)
                assert sum(compute_kernel.memory_bytes(request, 100).values()) >= least
        assert served, f"{compute_kernel.name}: serves nothing"

    @pytest.mark.parametrize("data_type", [one.value for one in SERVED])
    @pytest.mark.parametrize("is_weighted", [False, True])
    def test_forward_sums_the_rows_of_each_bag(
        self, compute_kernel: ComputeKernel, data_type: str, is_weighted: bool
    ) -> None:
        """Bags are empty, ids repeat, ranks have batches of different sizes or none; some are ragged."""
        for blocks in _groups(compute_kernel, data_type, "SUM"):
            lookup, loops = built(compute_kernel, blocks)
            for sources in SOURCES:
                batch = draw(blocks, sources, is_weighted=is_weighted)
                what = f"{compute_kernel.name}: sums of {data_type} rows, batches of {sources}"
                check_sums(what, lookup, loops, batch, CPU, training=False)
                if compute_kernel.takes_ragged_bags:
                    check_sums(f"{what}, ragged", lookup, loops, batch.ragged(), CPU, training=False)

    @pytest.mark.parametrize("data_type", [one.value for one in SERVED])
    def test_forward_of_sequences_is_the_ids_rows_in_their_order(
        self, compute_kernel: ComputeKernel, data_type: str
    ) -> None:
        """Batches have any number of ranks and ids."""
        for blocks in _groups(compute_kernel, data_type, "NONE"):
            lookup, loops = built(compute_kernel, blocks)
            for num_sources, max_ids in product((1, 2, 3), (0, 6)):
                batch = draw_sequences(blocks, num_sources, max_ids=max_ids)
                what = f"{compute_kernel.name}: {data_type} rows of sequences"
                check_sums(what, lookup, loops, batch, CPU, training=False)

    def test_rows_that_are_adopted_or_written_are_looked_up(self, compute_kernel: ComputeKernel) -> None:
        """Lookups read rows that were written into ``weight``, and a tensor that was given to ``adopt``."""
        for data_type in (one.value for one in SERVED):
            for blocks in _groups(compute_kernel, data_type, "SUM"):
                lookup, loops = built(compute_kernel, blocks)
                batch = draw(blocks, (2,), is_weighted=False)
                for index, spec in enumerate(blocks):
                    rows = _drawn(spec, seed=7 + index)
                    lookup.adopt(index, rows.packed().clone())
                    loops.weights[index] = rows.dequantized().double()
                    same = torch.equal(lookup.weight(index), rows.packed())
                    assert same, f"{compute_kernel.name}: weight({index}) is not what adopt() was given"
                check_sums(
                    f"{compute_kernel.name}: {data_type}, adopted", lookup, loops, batch, CPU, training=False
                )


def built(kernel: ComputeKernel, blocks: Sequence[BlockSpec]) -> tuple[Lookup, Loops]:
    """A lookup of some blocks, and loops over what their rows hold, dequantised."""
    lookup, weights = kernel.build(blocks, device=CPU), []
    for index, spec in enumerate(blocks):
        rows = _drawn(spec, seed=index)
        lookup.weight(index).copy_(rows.packed())
        weights.append(rows.dequantized().double())
    return lookup, Loops(blocks, weights, kernel.batch_major)


def _drawn(spec: BlockSpec, *, seed: int) -> QuantizedRows:
    """Rows of a block, cut from a table that is quantised whole."""
    generator = torch.Generator().manual_seed(seed)
    whole = torch.rand(spec.block.num_rows, spec.table.embedding_dim, generator=generator) - 0.5
    columns = spec.block.columns
    return quantize_rows(whole, spec.table.data_type).columns(columns.start, columns.stop)


def _groups(kernel: ComputeKernel, data_type: str, pooling: str) -> list[list[BlockSpec]]:
    """Blocks of several sizes, widths and cuts, in the groups that the kernel asks for."""
    shapes = ((5, 64, 2, None), (1, 64, 1, None), (3, 32, 1, (16, 32)), (4, 23, 1, None), (4, 8, 1, (1, 4)))
    blocks = [
        block_spec(
            rows,
            dim,
            slots=slots,
            columns=columns,
            data_type=data_type,
            pooling=pooling,
            optimizer=None,
            is_frozen=True,
        )
        for rows, dim, slots, columns in shapes
    ]
    served = [spec for spec in blocks if takes(kernel, [spec])]
    if not served:
        pytest.skip(f"{kernel.name} says it does not serve {DataType(data_type).value} on the CPU")
    groups: dict[object, list[BlockSpec]] = {}
    for spec in served:
        groups.setdefault(kernel.group_key(spec.request), []).append(spec)
    return list(groups.values())
