"""Copies whose groups are synchronised in different forms, in the same collectives: each is updated as unsharded."""

from __future__ import annotations

from itertools import product

import pytest
from tests.equality import Case, Table, assert_equals_unsharded, train_simulated
from tests.pairs import pairwise
from tests.plugins.compute_kernels.loops import kernel_names, kernel_of

from shardwright.contracts.compute_kernel import KernelRequest
from shardwright_plugins.dataflows.replicated import forms
from shardwright_testing.equality.training import NUM_STEPS

TABLES = ((6, ("a", "b")), (6, ("b",)), (7, ("c",)), (9, ("a",)), (9, ("c",)))  # rows and features


def in_turn(form, num_rows):
    """The form, which says that it is the cheapest for blocks of so many rows."""

    def bytes_moved(self):
        return int((self.copies.num_rows != num_rows).sum())

    return type(form.__name__, (form,), {"bytes_moved": property(bytes_moved)})


@pytest.mark.parametrize(
    ("kernel", "pooling", "optimizer"),
    pairwise(product(kernel_names(), ["SUM", "MEAN", "weighted", "NONE"], ["adam", "row_wise_adagrad"])),
)
def test_kernel_updates_tables_of_all_forms_as_unsharded(monkeypatch, kernel, pooling, optimizer):
    tables = [
        Table(rows, 4, features, "SUM" if pooling == "weighted" else pooling, "data_parallel", kernel)
        for rows, features in TABLES
    ]
    case = Case(tables, (3, 2, 4), optimizer=optimizer, is_weighted=pooling == "weighted")
    request = KernelRequest.of(case.specs()[0], 4, device="cpu", on_this_machine=True)
    if (answer := kernel_of(kernel).supports(request)) is not True:
        pytest.skip(answer)
    every = forms.FORMS
    monkeypatch.setattr(forms, "FORMS", [in_turn(*own) for own in zip(every, (6, 7, 9), strict=True)])
    results = train_simulated(case)
    # Headers; ids or rows, in one; dense gradients and their sums.
    assert_equals_unsharded(case, results, collectives=[4] * NUM_STEPS)
    assert all(len(result.copies) >= len(tables) for result in results)  # which are equal, bit for bit
