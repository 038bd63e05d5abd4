"""Built-in optimizers against torch.optim, and where it has none against the formulas of their papers, row by row."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from attrs import evolve
from tests.equality import Case, Table, assert_equals_unsharded, train_simulated
from tests.errors import raises
from tests.plugins.compute_kernels.loops import kernel_of
from tests.plugins.optimizers import strangers

from shardwright import (
    DataType,
    InvalidInputError,
    KernelRequest,
    OptimizerSpec,
    RowWiseAdagrad,
    UnknownNameError,
    UnsupportedError,
    optimizer_spec_of,
)
from shardwright.optim.by_rows import RuleOptimizer
from shardwright_plugins.compute_kernels.plain_torch._row_optimizer import rounded
from shardwright_testing import installed
from shardwright_testing.equality.checkpoints import check_checkpoint

RATE, STEPS, SHAPE = 0.1, 5, (6, 4)

Floats = np.ndarray[Any, np.dtype[np.float64]]
TORCH: list[tuple[str, Mapping[str, Any], Callable[[Any], torch.optim.Optimizer]]] = [
    (
        "sgd",
        {"momentum": 0.9, "weight_decay": 0.1},
        lambda own: torch.optim.SGD(own, RATE, momentum=0.9, weight_decay=0.1),
    ),
    (
        "adagrad",
        {"weight_decay": 0.1, "initial_accumulator_value": 0.3, "eps": 1e-3},
        lambda own: torch.optim.Adagrad(own, RATE, weight_decay=0.1, initial_accumulator_value=0.3, eps=1e-3),
    ),
    (
        "row_wise_adagrad",
        {"weight_decay": 0.1, "initial_accumulator_value": 0.3},
        lambda own: RowWiseAdagrad(own, RATE, eps=1e-8, weight_decay=0.1, initial_accumulator_value=0.3),
    ),
    (
        "adam",
        {"weight_decay": 0.1, "beta1": 0.5},
        lambda own: torch.optim.Adam(own, RATE, betas=(0.5, 0.999), weight_decay=0.1),
    ),
    ("adamw", {"weight_decay": 0.1}, lambda own: torch.optim.AdamW(own, RATE, weight_decay=0.1)),
]


@pytest.mark.parametrize(
    ("name", "parameters", "make"), [case for case in TORCH if case[0] != "row_wise_adagrad"]
)
def test_torch_optimizer_that_is_not_taken_in_backward_points_to_its_like(
    name: str, parameters: Mapping[str, Any], make: Callable[[Any], torch.optim.Optimizer]
) -> None:
    """Its like updates as it does where all rows have a gradient, as the next test shows."""
    table = torch.nn.Parameter(torch.ones(SHAPE))
    table._in_backward_optimizers = [make([table])]  # type: ignore[attr-defined]
    with raises(UnsupportedError, subject="w") as caught:
        optimizer_spec_of(table, "w")
    (told,) = re.findall(r"fused_params=(\{.*?\})", str(caught.value))
    assert ast.literal_eval(told) == {"optimizer": name, "learning_rate": RATE, **parameters}


def gradients() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(SHAPE, generator=generator) - 0.4 for _ in range(STEPS)]


def weights() -> torch.Tensor:
    return torch.rand(SHAPE, generator=torch.Generator().manual_seed(0)) - 0.5


def trained(optimizer_of: Callable[[Any], torch.optim.Optimizer]) -> torch.Tensor:
    """Weights after steps in which every row has a gradient: then torch's optimizers do as those of rows."""
    own = torch.nn.Parameter(weights())
    optimizer = optimizer_of([own])
    for gradient in gradients():
        own.grad = gradient.clone()
        optimizer.step()
    return own.detach()


def by_rule(name: str, parameters: Mapping[str, Any]) -> torch.Tensor:
    return trained(lambda own: RuleOptimizer(own, OptimizerSpec(name, RATE, parameters)))


@pytest.mark.parametrize(("name", "parameters", "reference"), TORCH, ids=[name for name, *_ in TORCH])
def test_rule_equals_torchs_optimizer(
    name: str, parameters: Mapping[str, Any], reference: Callable[[Any], torch.optim.Optimizer]
) -> None:
    torch.testing.assert_close(by_rule(name, parameters), trained(reference))


def moments(row: Floats, state: dict[str, Any], step: int, square: Any) -> tuple[Floats, Floats]:
    state["m"] = 0.9 * state.get("m", 0.0) + 0.1 * row
    state["v"] = 0.999 * state.get("v", 0.0) + 0.001 * square
    return state["m"] / (1 - 0.9**step), state["v"] / (1 - 0.999**step)


def partial_row_wise_adam(weight: Floats, gradient: Floats, state: dict[str, Any], step: int) -> Floats:
    mean, square = moments(gradient, state, step, (gradient**2).mean())
    return (1 - RATE * 0.2) * weight - RATE * mean / (np.sqrt(square) + 1e-8)


def lamb(weight: Floats, gradient: Floats, state: dict[str, Any], step: int, square: Any = None) -> Floats:
    """Algorithm 2 of You et al. 2020, a row for a layer."""
    mean, square = moments(gradient, state, step, gradient**2 if square is None else square)
    change = mean / (np.sqrt(square) + 1e-8) + 0.2 * weight
    return weight - RATE * np.linalg.norm(weight) / np.linalg.norm(change) * change


def partial_row_wise_lamb(weight: Floats, gradient: Floats, state: dict[str, Any], step: int) -> Floats:
    """LAMB with the row's mean square for its second moment, as FBGEMM's documentation has it."""
    return lamb(weight, gradient, state, step, (gradient**2).mean())


def lars(weight: Floats, gradient: Floats, state: dict[str, Any], step: int) -> Floats:
    """Algorithm 1 of You et al. 2017, a row for a layer."""
    norm = np.linalg.norm(weight)
    rate = RATE * 0.5 * norm / (np.linalg.norm(gradient) + 0.2 * norm)
    state["v"] = 0.9 * state.get("v", 0.0) + rate * (gradient + 0.2 * weight)
    return weight - state["v"]


def ftrl(weight: Floats, gradient: Floats, state: dict[str, Any], step: int) -> Floats:
    """Algorithm 1 of McMahan et al. 2013, an element after the other; alpha is the learning rate, beta 1."""
    z, n = state.setdefault("z", np.zeros(4)), state.setdefault("n", np.zeros(4))
    new = np.zeros(4)
    for i in range(4):
        sigma = (np.sqrt(n[i] + gradient[i] ** 2) - np.sqrt(n[i])) / RATE
        z[i] += gradient[i] - sigma * weight[i]
        n[i] += gradient[i] ** 2
        if abs(z[i]) > 0.3:
            new[i] = -(z[i] - np.sign(z[i]) * 0.3) / ((1.0 + np.sqrt(n[i])) / RATE + 0.1)
    return new


def decoupled_row_wise_adagrad(weight: Floats, gradient: Floats, state: dict[str, Any], step: int) -> Floats:
    state["s"] = state.get("s", 0.0) + (gradient**2).mean()
    return (1 - RATE * 0.2) * weight - RATE * gradient / (np.sqrt(state["s"]) + 1e-8)


@pytest.mark.parametrize(
    ("name", "parameters", "reference"),
    [
        ("partial_row_wise_adam", {"weight_decay": 0.2}, partial_row_wise_adam),
        ("lamb", {"weight_decay": 0.2}, lamb),
        ("partial_row_wise_lamb", {"weight_decay": 0.2}, partial_row_wise_lamb),
        ("lars", {"weight_decay": 0.2, "eta": 0.5}, lars),
        ("ftrl", {"l1": 0.3, "l2": 0.1}, ftrl),
        (
            "row_wise_adagrad",
            {"weight_decay": 0.2, "weight_decay_mode": "decoupled"},
            decoupled_row_wise_adagrad,
        ),
    ],
)
def test_rule_equals_its_papers_formula(
    name: str, parameters: Mapping[str, Any], reference: Callable[..., Floats]
) -> None:
    expected = weights().double().numpy()
    for row in range(SHAPE[0]):
        state: dict[str, Any] = {}
        for step, gradient in enumerate(gradients(), start=1):
            expected[row] = reference(expected[row], gradient[row].double().numpy(), state, step)
    torch.testing.assert_close(
        by_rule(name, parameters).double(), torch.from_numpy(expected), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize(
    ("spec", "error", "text"),
    [
        (
            OptimizerSpec("lamb", 0.1, {"momentum": 0.5}),
            InvalidInputError,
            "'lamb' has no parameter momentum=0.5",
        ),
        (
            OptimizerSpec("ftrl", 0.1, {"l_1": 0.5}),
            InvalidInputError,
            "'ftrl' has no parameter l_1=0.5. Did you",
        ),
        (
            OptimizerSpec("adamw", 0.1, {"weight_decay": 0.1, "weight_decay_mode": "l3"}),
            InvalidInputError,
            "weight_decay_mode must be 'l2', 'decoupled' or 'none', got 'l3'",
        ),
        (OptimizerSpec("adamv"), UnknownNameError, "no optimizer 'adamv' is known, only adagrad"),
    ],
)
def test_wrong_parameters_are_refused_by_kernels_and_without_sharding(
    spec: OptimizerSpec, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        RuleOptimizer([torch.nn.Parameter(weights())], spec)
    request = KernelRequest("cpu", DataType.FP32, 4, 4, optimizer=spec, on_this_machine=True)
    for name in ("fused_torch", "fused_numba"):
        assert text in kernel_of(name).supports(request)


@pytest.mark.parametrize("name", ["lamb", "lars", "partial_row_wise_lamb"])
def test_norms_of_weights_are_not_taken_of_cut_columns(name: str) -> None:
    request = KernelRequest("cpu", DataType.FP32, 8, 4, optimizer=OptimizerSpec(name), on_this_machine=True)
    for kernel in ("fused_torch", "fused_numba"):
        assert "needs the weights of whole rows" in kernel_of(kernel).supports(request)
        assert kernel_of(kernel).supports(evolve(request, num_columns=8)) is True


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_stochastic_rounding_keeps_the_mean_and_goes_to_a_neighbour(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(200, 50, generator=generator) + 0.25
    exact = torch.stack([rounded(values, dtype, torch.arange(200), step).float() for step in range(64)])
    unit = torch.finfo(dtype).eps
    assert ((exact - values).abs() <= unit * values).all()
    assert (exact.amax(0) > exact.amin(0)).float().mean() > 0.9  # both neighbours are met
    # The mean of 64 x 10 000 roundings, each off by half a unit at most: 5 standard errors.
    assert abs((exact - values).mean()) < 5 * unit / (64 * values.numel()) ** 0.5
    same = values.to(dtype).float()
    assert torch.equal(rounded(same, dtype, torch.arange(200), 3).float(), same)
    special = torch.tensor([[0.0, -1.5, float("inf"), float("nan")]])
    assert torch.equal(rounded(special, dtype, torch.arange(1), 1).isnan(), special.isnan())
    assert rounded(special, dtype, torch.arange(1), 1)[0, :3].tolist() == special[0, :3].tolist()


def test_copies_round_alike() -> None:
    tables = [
        Table(7, 8, ("a",), "SUM", "data_parallel", "fused_torch", data_type="BF16"),
        Table(9, 8, ("b",), "SUM", "row_wise", "fused_torch", data_type="BF16"),
    ]
    case = Case(tables, (3, 2), "adam", parameters=(("stochastic_rounding", True), ("weight_decay", 0.1)))
    assert_equals_unsharded(case, train_simulated(case))


@pytest.mark.parametrize(
    ("optimizer", "parameters"),
    [
        ("acme_ftrl", (("l1", 0.01),)),
        ("lamb", (("weight_decay", 0.2),)),
        ("row_wise_adagrad", (("initial_accumulator_value", 0.3),)),
        ("adam", (("stochastic_rounding", True), ("weight_decay", 0.1))),
    ],
)
def test_cache_of_rows_runs_any_optimizer(optimizer: str, parameters: tuple[tuple[str, Any], ...]) -> None:
    """Tables that do not fit into the cache, so that rows and their states leave it and come back."""
    data_type = "BF16" if ("stochastic_rounding", True) in parameters else "FP32"
    tables = [
        Table(90, 8, ("a",), "SUM", "table_wise", "mapped_caching", data_type=data_type, offset=1),
        Table(70, 8, ("b", "a"), "MEAN", "row_wise", "mapped_caching", data_type=data_type),
    ]
    case = Case(tables, (30, 20), optimizer, parameters=parameters)
    with installed(strangers.acme_ftrl()):
        assert_equals_unsharded(case, train_simulated(case))


@pytest.mark.parametrize("kernel", ["fused_torch", "fused_numba"])
def test_states_of_rows_and_elements_load_under_another_plan(kernel: str) -> None:
    tables = [
        Table(9, 8, ("a",), "SUM", name, kernel) for name in ("row_wise", "column_wise", "data_parallel")
    ]
    case = Case(tables, (3, 2), "partial_row_wise_adam")
    moved = [evolve(table, sharding_type="table_wise") for table in tables]
    check_checkpoint("table_wise", case, evolve(case, tables=moved))
