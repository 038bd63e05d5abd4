"""Replicated tables: every form makes the unsharded update, copies stay equal, the cheapest form is taken."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from attrs import evolve
from hypothesis import strategies as st
from tests.core.runtime.plans import (
    Cut,
    Cuts,
    host_with_loops,
    output_of,
    train_step,
    train_unsharded,
)
from tests.drawn import drawn
from tests.pairs import pairwise

from shardwright import ComputeKernel, KeyedJaggedTensor
from shardwright.host import use_host
from shardwright_plugins.dataflows import Replicate
from shardwright_plugins.dataflows.replicated import forms as replicated
from shardwright_plugins.dataflows.replicated.forms import FORMS, BatchForm, DenseForm, RowsForm
from shardwright_testing.simulated import run_simulated

SYNCHRONISING = ("updates of copies", "dense gradients", "sums of dense gradients")
STEPS = 3
TABLES = (  # t0 and t1 are of one size and share a group; t2 is alone
    Cut(5, 4, ("a", "b"), "SUM"),
    Cut(5, 3, ("b",), "MEAN"),
    Cut(8, 2, ("c",), "SUM", kernel="loop_by_sample"),
)


def case_of(kind, world_size, tables=TABLES):
    copies = [evolve(table, dataflow=Replicate(), ranks=tuple(range(world_size))) for table in tables]
    if kind == "sequence":
        copies = [evolve(table, pooling="NONE") for table in copies]
    return Cuts(copies, world_size, is_weighted=kind == "weighted")


def batches_of(case, batch_sizes, *, max_length=3):
    sizes = batch_sizes[: case.world_size]
    return [
        [case.batch(size, seed=10 * step + rank, max_length=max_length) for rank, size in enumerate(sizes)]
        for step in range(STEPS)
    ]


def train(case, batches):
    """For each rank: outputs, its own blocks, its state dict, and the bytes sent to others to synchronise."""
    module = case.module()

    def work(env):
        sharded = case.shard(env, module)
        first = len(env.communicator.sent_bytes)
        steps = enumerate(by_rank[env.rank] for by_rank in batches)
        outputs = [train_step(case, sharded, batch, step, env.rank) for step, batch in steps]
        blocks = [
            lookup.weight(index).clone()
            for lookup in sharded.engine.lookups
            for index in range(len(lookup.blocks))
        ]
        sent = sum(
            size
            for label, by_rank in env.communicator.sent_bytes[first:]
            if label in SYNCHRONISING
            for to, size in enumerate(by_rank)
            if to != env.rank
        )
        return outputs, blocks, sharded.full_state_dict(), sent

    return run_simulated(work, case.world_size)


def assert_trained(case, batches, results):
    expected = train_unsharded(case, batches)
    reference = case.module()
    for rank, (outputs, blocks, state, _) in enumerate(results):
        torch.testing.assert_close(outputs[0], output_of(case, reference(batches[0][rank])).detach())
        for mine, first in zip(blocks, results[0][1], strict=True):
            assert torch.equal(mine, first)  # bit for bit
        torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-5)


def only(monkeypatch, *forms):
    """Let steps choose among `forms`; returns the list of (form, bytes it says all ranks send), for each taken."""
    declared = []

    def recording(form):
        class Recording(form):
            def update(self):
                declared.append((form, self.bytes_moved))
                return super().update()

        return Recording

    monkeypatch.setattr(replicated, "FORMS", [recording(form) for form in forms])
    return declared


def assert_declared(declared, results):
    """Every rank takes each form once a step: what it is told then is what all ranks send together."""
    world_size = len(results)
    sent = world_size * sum(sent for *_, sent in results)
    assert sent == sum(size for _, size in declared)
    assert sent or world_size == 1


@pytest.mark.parametrize(
    ("form", "kind", "world_size"), pairwise(product(FORMS, ["pooled", "weighted", "sequence"], [2, 3]))
)
def test_each_form_makes_the_unsharded_update_on_equal_copies_with_the_bytes_it_declares(
    monkeypatch, form, kind, world_size
):
    case = case_of(kind, world_size)
    batches = batches_of(case, (4, 2, 3))
    declared = only(monkeypatch, form)
    results = train(case, batches)
    assert_trained(case, batches, results)
    assert_declared(declared, results)


@pytest.mark.parametrize("kind", ["pooled", "weighted", "sequence"])
@pytest.mark.parametrize(
    ("rows", "batch_sizes", "max_length", "cheapest"),
    [
        (500, (2, 1), 8, {"pooled": BatchForm, "weighted": BatchForm, "sequence": BatchForm}),
        (500, (40, 30), 2, {"pooled": BatchForm, "weighted": BatchForm, "sequence": BatchForm}),
        (2, (40, 30), 3, {"pooled": DenseForm, "weighted": DenseForm, "sequence": DenseForm}),
        (9, (40, 0), 3, {"pooled": DenseForm, "weighted": DenseForm, "sequence": DenseForm}),
    ],
    ids=["long bags", "short bags", "few rows", "ids on one rank"],
)
def test_form_that_takes_least_by_its_bytes_is_taken(
    monkeypatch, rows, batch_sizes, max_length, cheapest, kind
):
    case = case_of(kind, len(batch_sizes), [Cut(rows, 6, ("a",))])
    batches = batches_of(case, batch_sizes, max_length=max_length)
    counted = {}
    for form in FORMS:
        only(monkeypatch, form)
        counted[form] = sum(sent for *_, sent in train(case, batches))
    only(monkeypatch, *FORMS)
    results = train(case, batches)
    assert_trained(case, batches, results)
    assert sum(sent for *_, sent in results) == counted[cheapest[kind]]
    assert cheapest[kind] is min(FORMS, key=lambda form: form.effort * counted[form])
    assert counted[cheapest[kind]] < max(counted.values())


def test_touched_rows_are_sent_where_most_bags_are_empty(monkeypatch):
    case = case_of("pooled", 2, [Cut(500, 6, ("a",))])
    lengths = torch.tensor([1, 0, 0, 0, 1, 0, 0, 0]).int()
    batches = [
        [KeyedJaggedTensor(["a"], torch.tensor([7 * step, rank]), lengths=lengths) for rank in range(2)]
        for step in range(STEPS)
    ]
    declared = only(monkeypatch, *FORMS)
    assert_trained(case, batches, train(case, batches))
    assert {form for form, _ in declared} == {RowsForm}


def test_kernel_whose_sums_differ_between_ranks_makes_no_batch_update_of_copies(monkeypatch):
    """FBGEMM's on CUDA: each rank would add up the whole batch's gradients in an order of its own."""
    case = case_of("pooled", 2, [Cut(200, 6, ("a",))])
    batches = batches_of(case, (4, 3), max_length=40)
    declared = only(monkeypatch, *FORMS)
    assert_trained(case, batches, train(case, batches))
    assert {form for form, _ in declared} == {BatchForm}
    declared.clear()
    monkeypatch.setattr(ComputeKernel, "gives_equal_bits", lambda *_: False)
    assert_trained(case, batches, train(case, batches))
    assert declared
    assert BatchForm not in {form for form, _ in declared}


ROWS_DIM_FEATURES = st.tuples(st.integers(1, 9), st.integers(1, 5), st.sampled_from(["ab", "b", "ca"]))


@drawn(
    st.sampled_from(["pooled", "weighted", "sequence"]),
    st.integers(1, 3),
    st.lists(ROWS_DIM_FEATURES, min_size=1, max_size=3),
    st.lists(st.integers(0, 4), min_size=3, max_size=3),
    st.integers(0, 4),
    quick=10,
    thorough=40,
)
def test_copies_of_any_size_equal_unsharded(kind, world_size, tables, batch_sizes, max_length):
    case = case_of(kind, world_size, [Cut(rows, dim, tuple(features)) for rows, dim, features in tables])
    batches = batches_of(case, batch_sizes, max_length=max_length)
    with use_host(host_with_loops()):
        assert_trained(case, batches, train(case, batches))
