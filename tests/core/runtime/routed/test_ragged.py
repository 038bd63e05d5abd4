"""Ragged bags through kernels that take none, against a kernel that takes them as they are."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st
from tests.core.runtime.plans import EXAMPLES, Cut, Cuts, Loop, host_with_loops

from shardwright import Bags, RowsRange
from shardwright.host import use_host
from shardwright.runtime.routed.ragged import FillingLookup, taking_ragged


def groups_of(kernel):
    """A group of two tables whose rows are cut, of three slots, on the one rank."""
    tables = [
        Cut(5, 2, ("a", "b"), row_map=RowsRange(5, parts=2), kernel=kernel),
        Cut(4, 2, ("b",), row_map=RowsRange(4, parts=2), kernel=kernel),
    ]
    with use_host(host_with_loops()):
        (group,) = Cuts(tables, 1).plan().groups
    return group


def drawn(random, group, num_sources):
    """Ragged bags of a group: lengths of one or more, ids of the slot's block."""
    rows = [spec.block.num_rows for spec in group.blocks for _ in range(spec.num_slots)]
    counts = [[random.choice([0, 0, 1, 3]) for _ in rows] for _ in range(num_sources)]
    lengths, ids = [], []
    for own in counts:
        for num_rows, count in zip(rows, own, strict=True):
            for _ in range(count):
                lengths.append(random.randint(1, 3))
                ids += [random.randrange(num_rows) for _ in range(lengths[-1])]
    weights = torch.tensor([random.random() for _ in ids]) if random.random() < 0.5 else None
    return Bags(
        torch.tensor(ids, dtype=torch.int64),
        torch.tensor(lengths, dtype=torch.int32),
        weights,
        tuple(map(tuple, counts)),
        is_ragged=True,
    )


@pytest.mark.parametrize("kernel", ["loop", "loop_by_sample"])
@EXAMPLES
@given(st.integers(1, 3), st.randoms(use_true_random=False))
def test_filled_bags_make_the_sums_and_updates_of_ragged_ones(kernel, num_sources, random):
    plain, group = groups_of("loop"), groups_of(kernel)
    assert group.kind.is_ragged
    expected, lookup = (
        plain.kernel.build(plain.blocks, device="cpu"),
        group.kernel.build(group.blocks, device="cpu"),
    )
    for index in range(len(group.blocks)):
        values = torch.rand(expected.weight(index).shape, generator=torch.Generator().manual_seed(index))
        expected.weight(index).copy_(values)
        lookup.weight(index).copy_(values)
    filling = taking_ragged(lookup, group)
    assert isinstance(filling, FillingLookup)
    bags = drawn(random, group, num_sources)
    result, saved = filling.forward(bags, training=True)
    wanted, kept = expected.forward(bags, training=True)
    torch.testing.assert_close(result, wanted)
    gradient = torch.rand(len(wanted))
    filling.backward_scaled(saved, gradient, 1.0)
    expected.backward(kept, gradient)
    for index in range(len(group.blocks)):
        torch.testing.assert_close(lookup.weight(index), expected.weight(index))


def test_kernel_that_takes_ragged_bags_gets_them_as_they_are():
    class Ragged(Loop):
        takes_ragged_bags = True

    group = groups_of("loop")
    lookup = group.kernel.build(group.blocks, device="cpu")
    assert taking_ragged(lookup, evolve(group, kernel=Ragged())) is lookup
