"""Backward passes of sharded bags: losses of any form, graphs that are kept, nothing kept in vain."""

from __future__ import annotations

import pytest
import torch
from tests.core.runtime.mixed_cuts import (
    MIXED,
    case_of,
    sharded_weights,
    simulate,
    unsharded,
    unsharded_weights,
    with_parts,
)
from tests.core.runtime.plans import (
    Cut,
    Cuts,
)

from shardwright import Exchange, RowsModulo
from shardwright_plugins.dataflows import Hierarchical, Replicate


@pytest.mark.parametrize(
    "loss_of",
    [
        lambda module, batch, rank: module(batch).values().sum(),
        lambda module, batch, rank: module(batch)["a@t0"].sum(),
        lambda module, batch, rank: module(batch).values()[:1].square().sum(),
        lambda module, batch, rank: module(batch).values().sum() + 3 * module(batch).values().sum(),
        lambda module, batch, rank: module(batch).values().sum() * (0 if rank else 1),
        lambda module, batch, rank: module(batch).values().to(torch.float64).sum().exp().log(),
        lambda module, batch, rank: sum(part.sum() for part in module(batch).to_dict().values()),
    ],
    ids=["all", "one output", "one sample", "two forwards", "nothing on rank 1", "another dtype", "by key"],
)
def test_loss_of_any_form_makes_the_unsharded_step(loss_of):
    case = Cuts([*MIXED[:2], Cut(7, 4, ("b",), "SUM", RowsModulo(7, parts=2), (), (1, 0))], 2)
    actual = sharded_weights(lambda sharded, batch, env: loss_of(sharded, batch, env.rank).backward(), case)
    for name, weight in unsharded_weights(loss_of, case).items():
        torch.testing.assert_close(actual[name], weight, rtol=1e-4, atol=1e-5)


def test_output_begun_without_gradients_has_none_wherever_it_is_waited_for():
    def work(sharded, batch, env):
        with torch.no_grad():
            output = sharded(batch)
        return output.values()

    case = case_of()
    for output, expected in zip(simulate(case, work), unsharded(case), strict=True):
        assert not output.requires_grad
        torch.testing.assert_close(output, expected)


def test_retained_graph_makes_an_update_for_each_backward():
    def work(sharded, batch, env):
        loss = sharded(batch).values().sum()
        loss.backward(retain_graph=True)
        loss.backward()

    actual = sharded_weights(work)
    expected = unsharded_weights(lambda module, batch, rank: 2 * module(batch).values().sum())
    for name, weight in expected.items():
        torch.testing.assert_close(actual[name], weight)


@pytest.mark.parametrize(
    "flow", [Exchange(), Hierarchical(), Replicate()], ids=lambda flow: type(flow).__name__
)
def test_step_that_was_waited_for_keeps_no_results(flow):
    def work(sharded, batch, env):
        step = sharded.compute(sharded.input_dist(batch))
        before = float_elements(step)
        output = sharded.output_dist(step).values()
        return before, float_elements(step), output.numel()

    case = Cuts([Cut(9, 4, ("a",), ranks=(0, 1), dataflow=flow), Cut(7, 4, ("b",), "SUM")], 2)
    for before, after, size in simulate(case, work):
        assert before >= size
        assert after == 0


def float_elements(step):
    """How many float32 values a step of the engine holds on to, kernels' own notes left out."""
    seen, found = set(), []

    def visit(thing):
        if id(thing) in seen:
            return
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            found.append(thing.numel() if thing.dtype is torch.float32 else 0)
        elif isinstance(thing, list | tuple):
            for item in thing:
                visit(item)
        elif type(thing).__name__.endswith(("Step", "Trip", "Transfer")):
            names = [name for cls in type(thing).__mro__ for name in getattr(cls, "__slots__", ())]
            for name in [*names, *getattr(thing, "__dict__", ())]:
                if name not in ("__weakref__", "_saved") and hasattr(thing, name):
                    visit(getattr(thing, name))

    visit(step)
    return sum(found)


def test_weights_of_one_ranks_ids_are_trained():
    """What one rank asks for all exchange, once; the others' gradients stay as they are."""
    case = case_of(is_weighted=True)
    trained = [case.batch(2 + rank, seed=rank).weights().clone().requires_grad_() for rank in range(2)]

    def work(sharded, batch, env):
        before = len(env.communicator.labels)
        own = with_parts(batch, weights=trained[1]) if env.rank == 1 else batch
        sharded(own).values().square().sum().backward()
        return env.communicator.labels[before:], sharded.full_state_dict()

    seen = simulate(case, work)
    calls = ["headers", "ids", "results", "gradients", "gradients of weights"]
    assert [labels for labels, _ in seen] == [calls] * 2
    assert trained[0].grad is None
    expected = case.batch(3, seed=1).weights().clone().requires_grad_()
    case.module()(with_parts(case.batch(3, seed=1), weights=expected)).values().square().sum().backward()
    torch.testing.assert_close(trained[1].grad, expected.grad)
    weights = unsharded_weights(lambda module, batch, _: module(batch).values().square().sum(), case)
    torch.testing.assert_close(seen[0][1], weights)
