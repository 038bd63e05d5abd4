"""Tables that are updated in ``optimizer.step()``: accumulated, scaled and clipped gradients equal one process."""

from __future__ import annotations

import functools
import itertools
import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from attrs import evolve
from tests.equality import Case
from tests.pairs import covering, in_turns
from tests.plugins.built_in import built_in
from tests.plugins.resharding.one_collection import reshard_collection
from tests.plugins.training.test_equality import kernels, sequences_of, sharding_types, supports, tables_of

from shardwright import (
    DistributedModelParallel,
    ShardingEnv,
    ShardwrightError,
    UnsupportedError,
    clip_grad_norm_,
    in_backward_optimizer_filter,
    spec_to_torch,
)
from shardwright.host import host
from shardwright.runtime.sharded.tables.shard_gradients import ShardGradient
from shardwright_testing.equality.cases import shardings_of
from shardwright_testing.simulated import run_simulated

MICRO_BATCHES, STEPS = 3, 2
SIZES = (3, 0, 4)
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}


def fused_kernels() -> list[str]:
    return [name for name in kernels() if host().compute_kernels[name].fuses_optimizer]


def shard(case: Case, env: ShardingEnv, module: Any, update: str = "in_step") -> Any:
    sharder = case.sharder().updating(update)
    return sharder.shard(module, shardings_of(case, sharder.tables(module)), env, "cpu")


def backward(case: Case, model: Any, number: int, rank: int, scale: float = 1.0) -> None:
    values = case.output(model(case.batch(number, rank)))
    loss = (values * case.gradient(number, rank, values)).sum() * scale
    if loss.requires_grad:
        loss.backward()


def train(case: Case, step: Callable[[Any, Any, int], None], *, steps: int = STEPS) -> list[Any]:
    """Train on simulated ranks; each one's weights and optimizer state."""
    module = case.module_to_shard()

    def run(env: ShardingEnv) -> Any:
        model = shard(case, env, module)
        for number in range(steps):
            step(model, env, number)
        return model.full_state_dict(), model.fused_optimizer.full_state_dict()["state"]

    return run_simulated(run, case.world_size, local_world_size=case.local_world_size)


def accumulate(case: Case, model: Any, env: ShardingEnv, number: int) -> None:
    model.fused_optimizer.zero_grad()
    for micro in range(MICRO_BATCHES):
        backward(case, model, MICRO_BATCHES * number + micro, env.rank)
    model.fused_optimizer.step()


class OneProcess:
    """The unsharded module on the batches of all ranks, with the mean of their losses."""

    def __init__(self, case: Case) -> None:
        self.case, self.module = case, case.module()
        self.parameters = dict(self.module.named_parameters())
        self.optimizer = spec_to_torch(case.sharder().optimizer, list(self.parameters.values()))

    def gradients(self, *numbers: int) -> None:
        self.optimizer.zero_grad()
        for number, rank in itertools.product(numbers, range(self.case.world_size)):
            backward(self.case, self.module, number, rank, 1 / self.case.world_size)

    def assert_equals(self, results: list[Any]) -> None:
        for weights, states in results:
            torch.testing.assert_close(weights, dict(self.module.state_dict()), **TOLERANCE)
            for name, entries in states.items():
                own = self.optimizer.state[self.parameters[name]]
                for entry, value in entries.items():
                    expected = torch.as_tensor(own[entry], dtype=value.dtype)
                    torch.testing.assert_close(value, expected, **TOLERANCE)


def cases() -> list[Any]:
    """Each sharding type, kernel, optimizer and way of pooling; pairs of them each time."""
    found: dict[tuple[str, str, str, bool], Case] = {}
    for sharding_type, kernel, optimizer, of in itertools.product(
        sharding_types(), fused_kernels(), ("row_wise_adagrad", "adam"), (tables_of, sequences_of)
    ):
        tables = of(sharding_type, kernel)
        if all(supports(kernel, table, optimizer, world_size=3) for table in tables):
            is_weighted = of is tables_of and optimizer == "adam"
            found[sharding_type, kernel, optimizer, of is tables_of] = Case(
                tables, SIZES, optimizer, is_weighted
            )
    quick = covering(found)
    return [
        pytest.param(case, marks=() if axes in quick else pytest.mark.slow, id=name_of(case))
        for axes, case in found.items()
    ]


def cases_of_other_optimizers() -> list[Any]:
    """Each sharding type with optimizers that kernels have not built in, compiled."""
    found = [
        Case(tables_of(sharding_type, "fused_numba"), SIZES, optimizer)
        for sharding_type, optimizer in itertools.product(
            sharding_types(), sorted(set(built_in("optimizers")) - {"row_wise_adagrad", "adam"})
        )
    ]
    taken = [
        case
        for case in found
        if all(supports("fused_numba", table, case.optimizer, world_size=3) for table in case.tables)
    ]
    return [pytest.param(case, marks=pytest.mark.slow, id=name_of(case)) for case in taken]


def name_of(case: Case) -> str:
    table = case.tables[0]
    return "-".join(
        [table.sharding_type, table.kernel, case.optimizer, "pooled" if case.is_pooled else "sequence"]
    )


@pytest.mark.parametrize("case", [*cases(), *cases_of_other_optimizers()])
def test_micro_batches_equal_one_large_batch(case: Case) -> None:
    one = OneProcess(case)
    for number in range(STEPS):
        one.gradients(*range(MICRO_BATCHES * number, MICRO_BATCHES * (number + 1)))
        one.optimizer.step()
    one.assert_equals(train(case, functools.partial(accumulate, case)))


def mixed(optimizer: str = "sgd", kernel: str = "fused_torch") -> Case:
    """Cut rows, cut columns and copies, so that every rank has a block."""
    types = ["row_wise", "column_wise", "data_parallel", "row_wise"]
    tables = [
        evolve(table, sharding_type=sharding_type)
        for table, sharding_type in zip(tables_of("row_wise", kernel), types, strict=True)
    ]
    return Case(tables, (3, 4, 2), optimizer)


def scaled_step(
    scaler: Any, case: Case, model: Any, optimizer: Any, env: ShardingEnv, number: int, *, infinite: int
) -> None:
    """A step with a scaler; in one step a gradient that the last rank alone has is infinite."""
    optimizer.zero_grad()
    values = case.output(model(case.batch(number, env.rank)))
    loss = (values * case.gradient(number, env.rank, values)).sum()
    scaler.scale(loss).backward()
    if number == infinite and env.rank == env.world_size - 1:
        # Of rows of which this rank has the only copy: no other sees it.
        model.embedding_bags.t0.weight.grad.to_local()[0, 0] = math.inf
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("kernel", [*fused_kernels(), "dense"])
def test_scaler_equals_one_process_and_an_infinity_on_one_rank_skips_the_step_on_all(kernel: str) -> None:
    case, scales = mixed("adagrad", kernel), []

    def run(env: ShardingEnv) -> Any:
        model = shard(case, env, module)
        own = case.sharder().optimizer
        optimizer = spec_to_torch(own, [*model.parameters()]) if kernel == "dense" else model.fused_optimizer
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for number in range(3):
            scaled_step(scaler, case, model, optimizer, env, number, infinite=1)
        scales.append(scaler.get_scale())
        return model.full_state_dict(), model.fused_optimizer.full_state_dict()["state"]

    module = case.module_to_shard()
    results = run_simulated(run, case.world_size)
    one = OneProcess(case)
    for number in (0, 2):
        one.gradients(number)
        one.optimizer.step()
    one.assert_equals(results)
    assert scales == [512.0] * case.world_size


@pytest.mark.parametrize("kernel", ["fused_torch", "dense"])
def test_norm_is_over_the_ranks_of_its_own_model_on_a_rank_without_tables_of_it(kernel: str) -> None:
    table = tables_of("table_wise", kernel)[0]
    case = Case([table], (3, 4), "sgd")  # on rank 0 alone
    module = case.module_to_shard()
    other = Case([table], (4,), "sgd")

    def run(env: ShardingEnv) -> tuple[float, int]:
        model = shard(case, env, module)
        later = shard(other, ShardingEnv.local(device_type="cpu"), other.module_to_shard())
        backward(case, model, 0, env.rank)
        norm = float(clip_grad_norm_(model.parameters(), 1e6))
        del later
        return norm, sum(own.numel() for own in model.parameters())

    norms, sizes = zip(*run_simulated(run, case.world_size), strict=True)
    one = OneProcess(case)
    one.gradients(0)
    expected = float(torch.nn.utils.clip_grad_norm_(one.module.parameters(), 1e6))
    assert norms == (pytest.approx(expected), pytest.approx(expected))
    assert sizes[1] == 0


def alone(update: str = "in_step", optimizer: str = "sgd") -> tuple[Case, Any]:
    case = Case(tables_of("row_wise", "fused_torch"), (4,), optimizer)
    return case, shard(case, ShardingEnv.local(device_type="cpu"), case.module_to_shard(), update)


@pytest.mark.parametrize("by", ["optimizer", "module", "parameters"])
def test_dropped_gradients_change_nothing(by: str) -> None:
    case, model = alone()
    before = {name: value.clone() for name, value in model.full_state_dict().items()}
    backward(case, model, 0, 0)
    if by == "parameters":
        for parameter in model.parameters():
            parameter.grad = None
    else:
        {"optimizer": model.fused_optimizer, "module": model}[by].zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    model.fused_optimizer.step()
    torch.testing.assert_close(dict(model.full_state_dict()), before, rtol=0, atol=0)


def test_kept_gradient_is_the_unsharded_one_and_changed_in_place() -> None:
    case, model = alone()
    one = OneProcess(case)
    one.gradients(0)
    backward(case, model, 0, 0)
    before = {name: value.clone() for name, value in model.full_state_dict().items()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.to_dense(), one.parameters[name].grad, **TOLERANCE)
        parameter.grad /= 2
        parameter.grad._values().zero_()
    model.fused_optimizer.step()
    torch.testing.assert_close(dict(model.full_state_dict()), before, rtol=0, atol=0)
    with pytest.raises(UnsupportedError, match="but not replaced"):
        parameter.grad = torch.zeros_like(parameter)


IN_PLACE: dict[str, Callable[[torch.Tensor], Any]] = {
    "mul_": lambda gradient: gradient.mul_(0.5),
    "div_": lambda gradient: gradient.div_(2.0),
    "mul_ twice": lambda gradient: gradient.mul_(2.0).mul_(0.25),
    "foreach": lambda gradient: torch._foreach_mul_([gradient], 0.5),
    "zero_": lambda gradient: gradient.zero_(),
    "values": lambda gradient: gradient.coalesce()._values().mul_(0.5),
}


@pytest.mark.parametrize("how", IN_PLACE)
# Of row-wise optimizers ranks keep the gradients of whole rows, also where columns are cut.
@pytest.mark.parametrize(
    ("sharding_type", "optimizer"), [("row_wise", "sgd"), ("column_wise", "row_wise_adagrad")]
)
def test_what_is_done_to_gradients_in_place_is_done_to_the_step(
    sharding_type: str, optimizer: str, how: str
) -> None:
    case = Case(tables_of(sharding_type, "fused_torch"), SIZES, optimizer)

    def step(model: Any, env: ShardingEnv, number: int) -> None:
        model.fused_optimizer.zero_grad()
        backward(case, model, 2 * number, env.rank)
        backward(case, model, 2 * number + 1, env.rank)
        for parameter in model.parameters():
            IN_PLACE[how](parameter.grad)
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.3)
        model.fused_optimizer.step()

    one = OneProcess(case)
    for number in range(STEPS):
        one.gradients(2 * number, 2 * number + 1)
        for parameter in one.parameters.values():
            parameter.grad = parameter.grad.to_sparse(1)
            IN_PLACE[how](parameter.grad)
            parameter.grad = parameter.grad.to_dense()
        torch.nn.utils.clip_grad_value_(one.module.parameters(), 0.3)
        one.optimizer.step()
    one.assert_equals(train(case, step))


CLIPPED: dict[str, Callable[[list[torch.Tensor]], Any]] = {
    "torch": lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.1),
    "torch, foreach": lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.1, foreach=True),
    "torch, sum": lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.1, 1.0),
    "torch, greatest": lambda parameters: torch.nn.utils.clip_grad_norm_(parameters, 0.1, math.inf),
    "shardwright": lambda parameters: clip_grad_norm_(parameters, 0.1),
    "shardwright, sum": lambda parameters: clip_grad_norm_(parameters, 0.1, 1.0),
    "shardwright, greatest": lambda parameters: clip_grad_norm_(parameters, 0.1, math.inf),
    "norms": lambda parameters: by_hand(parameters, lambda gradient: gradient.norm() ** 2),
    "norms of data": lambda parameters: by_hand(parameters, lambda own: own.data.norm(2).item() ** 2),
    "sums": lambda parameters: by_hand(parameters, lambda own: own.detach().pow(2).sum()),
    "values": lambda parameters: torch.nn.utils.clip_grad_value_(parameters, 0.05),
    "values, foreach": lambda parameters: torch.nn.utils.clip_grad_value_(parameters, 0.05, foreach=True),
}


def by_hand(parameters: list[torch.Tensor], square: Callable[[Any], Any]) -> torch.Tensor:
    """Clip as people write it themselves."""
    total = math.sqrt(float(sum(square(own.grad) for own in parameters if own.grad is not None)))
    for own in parameters:
        if own.grad is not None and total > 0.1:
            own.grad.mul_(0.1 / total)
    return torch.tensor(total)


CLIPPED_KERNELS = [
    ("sgd", "fused_torch"),
    ("sgd", "dense"),
    ("row_wise_adagrad", "fused_numba"),
    ("sgd", "mapped_caching"),
]


@pytest.mark.parametrize(("trained", "how"), in_turns(CLIPPED_KERNELS, list(CLIPPED)))
def test_clipping_by_whomever_equals_one_process(trained: tuple[str, str], how: str) -> None:
    (_, kernel), clip = trained, CLIPPED[how]
    case = mixed(*trained)
    module = case.module_to_shard()

    def run(env: ShardingEnv) -> Any:
        model = shard(case, env, module)
        shown = torch.optim.SGD(model.parameters(), lr=0.1) if kernel == "dense" else model.fused_optimizer
        # As Lightning does, which asks the optimizer for its parameters.
        parameters = [own for group in shown.param_groups for own in group["params"]]
        norms = []
        for number in range(STEPS):
            shown.zero_grad()
            backward(case, model, number, env.rank)
            norms.append(float(clip(parameters) or 0))
            shown.step()
        return norms, model.full_state_dict()

    one, expected = OneProcess(case), []
    for number in range(STEPS):
        one.gradients(number)
        by_torch = CLIPPED[how.replace("shardwright", "torch")]
        expected.append(float(by_torch(list(one.module.parameters())) or 0))
        one.optimizer.step()
    results = run_simulated(run, case.world_size)
    for norms, weights in results:
        assert norms == pytest.approx(expected, rel=1e-5)
        assert norms == results[0][0]
        torch.testing.assert_close(weights, dict(one.module.state_dict()), **TOLERANCE)


READ: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum": lambda gradient: gradient.sum(),
    "mean": lambda gradient: dense(gradient).mean(),
    "absolute mean": lambda gradient: torch.mean(dense(gradient).abs()),
    "deviation": lambda gradient: dense(gradient).std(),
    "deviation of all": lambda gradient: torch.std(dense(gradient), unbiased=False),
    "variance": lambda gradient: dense(gradient).var(correction=0),
    "total norm": lambda gradient: torch.nn.utils.get_total_norm([gradient, torch.ones(2)]),
    "mean of squares": lambda gradient: dense(gradient).pow(2).mean().sqrt(),
    "absolute sum": lambda gradient: gradient.abs().sum(),
    "one norm": lambda gradient: torch.linalg.vector_norm(gradient, 1),
    "foreach": lambda gradient: torch._foreach_norm([gradient, torch.ones(2)], 2)[0],
    "greatest": lambda gradient: dense(gradient).max(),
    "greatest absolute": lambda gradient: dense(gradient.abs()).max(),
    "greatest of all": lambda gradient: torch.amax(dense(gradient).abs()),
    "least": lambda gradient: dense(gradient).min(),
    "is no number": lambda gradient: gradient.isnan().any(),
    "is finite": lambda gradient: torch.isfinite(dense(gradient)).all(),
    "numbers": lambda gradient: (dense(gradient) > 0).sum(),
}
REFUSED: dict[str, Callable[[torch.Tensor], Any]] = {
    "sum of rows": lambda gradient: gradient.sum(dim=1),
    "norms of rows": lambda gradient: torch.linalg.vector_norm(gradient, dim=0),
    "means of rows": lambda gradient: dense(gradient).mean(dim=1),
    "deviations of columns": lambda gradient: dense(gradient).std(0),
    "whole": lambda gradient: gradient.full_tensor(),
    "histogram": lambda gradient: torch.histc(gradient, bins=4),
    "histogram of a logger": lambda gradient: gradient.detach().cpu().numpy(),
    "array": lambda gradient: numpy.asarray(gradient.float().cpu()),
    "list": lambda gradient: gradient.tolist(),
    "place of the greatest": lambda gradient: gradient.argmax(),
    "view": lambda gradient: gradient.view(-1),
    "element": lambda gradient: gradient[:1],
    "product": lambda gradient: gradient @ torch.ones(gradient.shape[1], 1),
    "median": lambda gradient: gradient.median(),
    "norm of zeroes": lambda gradient: torch.linalg.vector_norm(gradient, 0),
}
if hasattr(torch, "_foreach_mm"):  # not before torch 2.13
    REFUSED["product, foreach"] = lambda gradient: torch._foreach_mm(
        [gradient], [torch.eye(gradient.shape[1])]
    )
    REFUSED["sums of powers, foreach"] = lambda gradient: torch._foreach_powsum([gradient], 2)


def dense(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.to_dense()


@pytest.mark.parametrize("kernel", ["fused_torch", "dense"])
def test_what_is_read_of_gradients_is_the_unsharded_modules_on_all_ranks_or_refused(kernel: str) -> None:
    case = mixed("sgd", kernel)
    module = case.module_to_shard()

    def run(env: ShardingEnv) -> Any:
        model = shard(case, env, module)
        backward(case, model, 0, env.rank)
        parts = {
            name: parameter.grad
            for name, parameter in model.named_parameters()
            if isinstance(parameter.grad, ShardGradient) and name.endswith(".weight")
        }
        for gradient in parts.values():
            for refused in REFUSED.values():
                with pytest.raises(UnsupportedError, match="of the gradient of table"):
                    refused(gradient)
        return {(name, how): float(READ[how](own)) for name, own in parts.items() for how in READ}

    one = OneProcess(case)
    one.gradients(0)
    for found in run_simulated(run, case.world_size):
        assert len(found) >= 3 * len(READ)
        for (name, how), value in found.items():
            assert value == pytest.approx(float(READ[how](one.parameters[name].grad)), rel=1e-4, abs=1e-6), (
                name,
                how,
            )


@pytest.mark.parametrize("optimizer", ["sgd", "row_wise_adagrad", "adam"])
@pytest.mark.parametrize("sharding_type", ["row_wise", "column_wise", "data_parallel"])
def test_gradients_zeroed_in_place_are_those_of_the_passes_after_it(
    sharding_type: str, optimizer: str
) -> None:
    case = Case(tables_of(sharding_type, "fused_torch"), SIZES, optimizer)

    def step(model: Any, env: ShardingEnv, number: int) -> None:
        backward(case, model, 2 * number, env.rank)
        model.zero_grad(set_to_none=False)
        backward(case, model, 2 * number + 1, env.rank)
        model.fused_optimizer.step()
        model.zero_grad(set_to_none=False)

    one = OneProcess(case)
    for number in range(STEPS):
        one.gradients(2 * number + 1)
        one.optimizer.step()
    one.assert_equals(train(case, step))


def warnings_of(
    num_passes: int,
    after: Callable[[Any, torch.optim.SGD, int], None],
    *,
    of_model: bool = True,
    update: str = "in_step",
) -> list[str]:
    """The warnings of a loop that does something after each backward pass, with an optimizer of the dense part.

    Args:
        num_passes: forward and backward passes.
        after: what is done with the model, the optimizer and the number of the pass.
        of_model: the dense part is the model's.
        update: when tables are updated.
    """
    case = Case(tables_of("row_wise", "fused_torch"), (4,), "sgd")
    over = torch.nn.Linear(3, 1)
    module = torch.nn.ModuleDict({"tables": case.module_to_shard(), "over": over})
    model = DistributedModelParallel(module, ShardingEnv.local(device_type="cpu"), update=update)
    optimizer = torch.optim.SGD((over if of_model else torch.nn.Linear(3, 1)).parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(num_passes):
            backward(case, model.module["tables"], number, 0)
            after(model, optimizer, number)
    return [str(own.message) for own in told]


def step_dense(model: Any, optimizer: torch.optim.SGD, number: int) -> None:
    optimizer.step()
    model.zero_grad()


def step_both(model: Any, optimizer: torch.optim.SGD, number: int) -> None:
    model.fused_optimizer.step()
    step_dense(model, optimizer, number)


def test_loop_that_never_steps_the_tables_is_warned_once_by_name() -> None:
    (text,) = warnings_of(25, step_dense)
    assert re.match(r"SGD made 10 steps over dense parameters, but gradients of table '?\w+", text)
    assert "Call model.fused_optimizer.step()" in text


@pytest.mark.parametrize(
    ("num_passes", "after", "options"),
    [
        (15, step_both, {}),
        (15, step_dense, {"of_model": False}),
        (15, step_dense, {"update": "in_backward"}),
        (9, step_dense, {}),
    ],
    ids=["with tables", "of another model", "in_backward", "few steps"],
)
def test_loop_that_trains_its_tables_is_not_warned(
    num_passes: int, after: Callable[..., None], options: dict[str, Any]
) -> None:
    assert warnings_of(num_passes, after, **options) == []


@pytest.mark.parametrize("update", ["in_step", "in_backward"])
@pytest.mark.parametrize("hook", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_gradients_that_would_never_be_called_are_refused(hook: str, update: str) -> None:
    case, model = alone(update)
    for parameter in model.parameters():
        with pytest.raises(
            UnsupportedError, match=r"a hook on the gradient of table 't\d'.* would never be called"
        ):
            getattr(parameter, hook)(print)
    backward(case, model, 0, 0)


def test_learning_rate_of_the_step_is_that_which_is_set_before_it() -> None:
    case, model = alone()
    before = {name: value.clone() for name, value in model.full_state_dict().items()}
    backward(case, model, 0, 0)
    model.fused_optimizer.param_groups[0]["lr"] = 0.0
    model.fused_optimizer.step()
    torch.testing.assert_close(dict(model.full_state_dict()), before, rtol=0, atol=0)


@pytest.mark.parametrize("how", CLIPPED)
def test_gradients_that_were_applied_are_refused_by_what_can_be_done(how: str) -> None:
    case, model = alone("in_backward")
    parameters = list(model.parameters())
    assert all(parameter.grad is None for parameter in parameters)
    backward(case, model, 0, 0)
    with pytest.raises(UnsupportedError, match=r"has applied it already.*update='in_step'.*max_gradient"):
        CLIPPED[how](parameters)
    model.zero_grad(set_to_none=False)
    model.zero_grad()
    assert all(parameter.grad is None for parameter in parameters)


def test_scaler_that_is_given_tables_updated_in_the_backward_pass_is_refused() -> None:
    case, model = alone("in_backward")
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(case.output(model(case.batch(0, 0))).sum()).backward()
    with pytest.raises(UnsupportedError, match="has applied it already"):
        scaler.unscale_(model.fused_optimizer)
    with torch.autocast("cpu", torch.float16), pytest.raises(UnsupportedError, match="update='in_step'"):
        model(case.batch(0, 0))
    with torch.autocast("cpu", torch.float16), torch.no_grad():
        model(case.batch(0, 0))
    with torch.autocast("cpu", torch.bfloat16):
        model(case.batch(0, 0))


def micro_passes(case: Case, model: Any) -> None:
    for number in range(2):
        backward(case, model, number, 0)


def two_losses(case: Case, model: Any) -> None:
    values = case.output(model(case.batch(0, 0)))
    values.sum().backward(retain_graph=True)
    values.square().sum().backward()


def used_twice(case: Case, model: Any) -> None:
    sum(case.output(model(case.batch(number, 0))).sum() for number in range(2)).backward()


def other_optimizer_between(case: Case, model: Any) -> None:
    dense = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))])
    for number in range(2):
        backward(case, model, number, 0)
        dense.step()


def dropped_between(case: Case, model: Any) -> None:
    for number in range(2):
        model.fused_optimizer.zero_grad()
        backward(case, model, number, 0)


@pytest.mark.parametrize(
    ("loop", "optimizer", "is_right"),
    [
        (micro_passes, "sgd", False),
        (micro_passes, "adagrad", False),
        (two_losses, "sgd", True),  # two plain updates are one by the sum
        (used_twice, "adagrad", False),
        (used_twice, "sgd", True),
        (other_optimizer_between, "adagrad", True),
        (dropped_between, "adagrad", True),
    ],
)
def test_step_after_several_passes_that_updated_names_the_argument(
    loop: Callable[[Case, Any], None], optimizer: str, is_right: bool
) -> None:
    case, model = alone("in_backward", optimizer)
    loop(case, model)  # alone it is an update in each pass
    if is_right:
        model.fused_optimizer.step()
        return
    with pytest.raises(UnsupportedError, match=r"table 't0'.* 2 passes were made .*update='in_step'"):
        model.fused_optimizer.step()
    for number in range(2):
        backward(case, model, number, 0)
        model.fused_optimizer.step()


def test_dense_step_after_passes_that_each_updated_tables_is_warned_once() -> None:
    (text,) = warnings_of(4, step_every_other(), update="in_backward")
    assert re.match(r"SGD steps after 2 backward passes, .*table '?\w+.*update='in_step'", text)


def step_every_other(between: Callable[[Any], None] = lambda model: None) -> Callable[..., None]:
    """Step after two passes, and do something else after the first of them."""
    return lambda model, optimizer, number: optimizer.step() if number % 2 else between(model)


@pytest.mark.parametrize(
    "after",
    [
        step_every_other(lambda model: model.fused_optimizer.zero_grad()),
        step_every_other(lambda model: torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]).step()),
        lambda model, optimizer, number: optimizer.step(),
    ],
    ids=["zero_grad", "other step", "each pass"],
)
def test_dense_step_after_passes_that_are_updates_by_themselves_is_not_warned(after: Any) -> None:
    assert warnings_of(4, after, update="in_backward") == []


def test_second_backward_pass_through_one_forward_pass_is_refused_and_the_next_step_trains() -> None:
    case, model = alone("in_backward", "adagrad")
    before = {name: value.clone() for name, value in model.full_state_dict().items()}
    with pytest.raises(
        UnsupportedError, match=r"table 't0'.*retain_graph.*update='in_step'.*fused_optimizer.zero"
    ):
        two_losses(case, model)
    once = {name: value.clone() for name, value in model.full_state_dict().items()}
    assert not all(
        torch.equal(once[name], value) for name, value in before.items()
    )  # the first loss has updated
    one = OneProcess(case)
    one.optimizer.zero_grad()
    case.output(one.module(case.batch(0, 0))).sum().backward()
    one.optimizer.step()
    one.gradients(1)
    one.optimizer.step()
    backward(case, model, 1, 0)
    model.fused_optimizer.step()
    torch.testing.assert_close(dict(model.full_state_dict()), dict(one.module.state_dict()), **TOLERANCE)


@pytest.mark.parametrize("between", ["other optimizer", "zero_grad", "step"])
def test_second_backward_pass_after_a_step_or_zero_grad_is_an_update_by_itself(between: str) -> None:
    case, model = alone("in_backward", "adagrad")
    values = case.output(model(case.batch(0, 0)))
    values.sum().backward(retain_graph=True)
    once = {name: value.clone() for name, value in model.full_state_dict().items()}
    {
        "other optimizer": torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]).step,
        "zero_grad": model.fused_optimizer.zero_grad,
        "step": model.fused_optimizer.step,
    }[between]()
    values.square().sum().backward()
    assert not all(torch.equal(once[name], value) for name, value in model.full_state_dict().items())


def test_scaled_gradients_and_limits_of_gradients_do_not_go_together() -> None:
    """They would be clipped before they are unscaled."""
    case = mixed()
    sharder = type(case.sharder())({**case.fused_params, "max_gradient": 0.1}).updating("in_step")
    module, env = case.module_to_shard(), ShardingEnv.local(device_type="cpu")
    one = evolve(case, batch_sizes=(3,))
    model = sharder.shard(module, shardings_of(one, sharder.tables(module)), env, "cpu")
    with torch.autocast("cpu", torch.float16), pytest.raises(UnsupportedError, match="max_gradient"):
        model(case.batch(0, 0))


@pytest.mark.parametrize(
    ("update", "kernel"), [("in_step", "fused_numba"), ("in_backward", "fused_numba"), ("in_step", "dense")]
)
@pytest.mark.parametrize("of", [tables_of, sequences_of])
def test_max_gradient_clips_the_gradients_of_outputs_as_in_one_process(
    update: str, kernel: str, of: Any
) -> None:
    case, most = mixed("adagrad", kernel), 0.1
    if of is sequences_of:
        case = Case(sequences_of("row_wise", kernel), (3, 4, 2), "adagrad")
    module = case.module_to_shard()
    clipped = type(case.sharder())({**case.fused_params, "max_gradient": most})

    def run(env: ShardingEnv) -> Any:
        sharder = clipped.updating(update)
        model = sharder.shard(module, shardings_of(case, sharder.tables(module)), env, "cpu")
        shown = [own for _, own in in_backward_optimizer_filter(model.named_parameters())]
        optimizer = spec_to_torch(clipped.optimizer, shown) if shown else model.fused_optimizer
        for number in range(STEPS):
            optimizer.zero_grad()
            backward(case, model, number, env.rank)
            optimizer.step()
        return model.full_state_dict()

    one = OneProcess(case)
    for number in range(STEPS):
        one.optimizer.zero_grad()
        for rank in range(case.world_size):
            values = case.output(one.module(case.batch(number, rank)))
            values.register_hook(lambda own: own.clamp(-most, most))
            (values * case.gradient(number, rank, values)).sum().div(case.world_size).backward()
        one.optimizer.step()
    for weights in run_simulated(run, case.world_size):
        torch.testing.assert_close(weights, dict(one.module.state_dict()), **TOLERANCE)


def test_tables_are_resharded_between_steps_but_not_with_gradients() -> None:
    case, model = alone()
    one = OneProcess(case)
    halves = evolve(case, tables=tables_of("column_wise", "fused_torch"))
    plan = shardings_of(halves, case.sharder().tables(case.module_to_shard()))
    backward(case, model, 0, 0)
    with pytest.raises(ShardwrightError, match=r"gradients of its tables are kept for optimizer\.step"):
        reshard_collection(model, plan)
    model.fused_optimizer.step()
    model.fused_optimizer.zero_grad()
    reshard_collection(model, plan)
    accumulate(case, model, ShardingEnv.local(device_type="cpu"), 1)
    for numbers in ((0,), range(MICRO_BATCHES, 2 * MICRO_BATCHES)):
        one.gradients(*numbers)
        one.optimizer.step()
    torch.testing.assert_close(dict(model.full_state_dict()), dict(one.module.state_dict()), **TOLERANCE)
