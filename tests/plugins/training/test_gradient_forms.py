"""Gradients of outputs in every form in memory, and copies synchronised in different forms, train as unsharded."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from attrs import evolve
from hypothesis import strategies as st
from tests.drawn import drawn
from tests.equality import Case, Table, assert_equals_unsharded, train_simulated
from tests.pairs import pairwise
from tests.plugins.compute_kernels.loops import kernel_names, kernel_of
from tests.plugins.training.test_equality import cases
from torch import Tensor

from shardwright import QCommsConfig, spec_to_torch
from shardwright.contracts.compute_kernel import KernelRequest
from shardwright_plugins.dataflows.replicated import forms
from shardwright_testing.equality.cases import shardings_of
from shardwright_testing.equality.training import NUM_STEPS
from shardwright_testing.simulated import run_simulated

FORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "one value": lambda values: values.new_tensor(0.3).expand(values.shape),
    "one row": lambda values: values.sum(0, keepdim=True).expand(values.shape),
    "one column": lambda values: values.sum(1, keepdim=True).expand(values.shape),
    "transposed": lambda values: values.T.contiguous().T,
    "every other row": lambda values: torch.stack([values, -values], 1)[:, 0],
    "a part": lambda values: torch.nn.functional.pad(values, (1, 2, 3, 0))[3:, 1:-2],
    "an odd start": lambda values: torch.cat([values.new_zeros(1), values.flatten()])[1:].view(values.shape),
    "an imaginary part": lambda values: torch.complex(values, -values).conj().imag,
    "negated": lambda values: torch._neg_view(-values),
    "sparse": lambda values: values.to_sparse(),
    "float64": lambda values: values.double(),
    "float16": lambda values: values.half(),
    "none": lambda values: None,
}


class Handed(torch.autograd.Function):
    """A loss whose gradient has a given form."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, form: str, is_plain: bool) -> Tensor:
        ctx.shape, ctx.form, ctx.is_plain = output.shape, form, is_plain
        return output.new_zeros(())

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        made = FORMS[ctx.form](torch.linspace(-1, 1, ctx.shape.numel()).view(ctx.shape))
        if ctx.is_plain:
            values = torch.zeros(ctx.shape) if made is None else made.to_dense()
            made = torch.empty(ctx.shape).copy_(values)
        return made, None, None


def trained(case: Case, codec: str, update: str, form: str, *, is_plain: bool) -> list[dict[str, Tensor]]:
    """Each rank's weights after a step in which the gradient of each output has a form."""
    module = case.module_to_shard()
    sharder = case.sharder().updating(update)
    config = QCommsConfig(forward_precision=codec, backward_precision=codec)
    plan = {
        name: evolve(own, qcomms_config=config)
        for name, own in shardings_of(case, sharder.tables(module)).items()
    }

    def run(env: Any) -> dict[str, Tensor]:
        sharded = sharder.shard(module, plan, env, "cpu")
        result = sharded(case.batch(0, env.rank))
        outputs = [result.values()] if case.is_pooled else [result[key].values() for key in result]
        sum(Handed.apply(own, form, is_plain) for own in outputs).backward()
        dense = [p for p in sharded.parameters() if not hasattr(p, "_in_backward_optimizers")]
        if dense:
            spec_to_torch(sharder.optimizer, dense).step()
        sharded.fused_optimizer.step()
        return sharded.full_state_dict()

    return run_simulated(run, case.world_size, local_world_size=case.local_world_size)


CODECS = ["fp32", "bf16", "int8"]


@drawn(
    cases(),
    st.sampled_from(CODECS),
    st.sampled_from(["in_backward", "in_step"]),
    st.sampled_from(sorted(FORMS)),
    quick=13,
    thorough=300,
)
def test_weights_do_not_depend_on_the_form_of_gradients(
    case: Case, codec: str, update: str, form: str
) -> None:
    plain = trained(case, codec, update, form, is_plain=True)
    for weights, expected in zip(trained(case, codec, update, form, is_plain=False), plain, strict=True):
        assert all(torch.equal(weights[name], expected[name]) for name in expected)


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
