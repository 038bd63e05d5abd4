"""Conformance tests of optimizers: for authors of optimizers, and for our own.

Legend: N rows, D columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from shardwright.contracts import Optimizer, RowRule, ShardingType
from shardwright.contracts.compute_kernel import KernelRequest
from shardwright.contracts.optimizer import ELEMENT, GRADIENTS, ROW, WEIGHTS
from shardwright.host.plugin_host import host
from shardwright.optim.by_rows import rule_or_reason, updated_rows
from shardwright.planning.tables.constraints import ParameterConstraints
from shardwright.planning.tables.optimizers import OptimizerSpec
from shardwright.planning.tables.spec import TableSpec
from shardwright_testing.equality.cases import Case, Table, shardings_of
from shardwright_testing.equality.training import assert_equals_unsharded, train_simulated
from shardwright_testing.equality.type_under_test import TypeUnderTest
from shardwright_testing.kernels.kernel_checks import check_state, train
from shardwright_testing.kernels.kernel_groups import draw, groups_of
from shardwright_testing.kernels.loops import build
from shardwright_testing.plugins_under_test import installed

_RATE = 0.1
_STEPS = 3


class OptimizerTests:
    """The tests of an optimizer: give the fixture ``optimizer``, an instance.

    Attributes:
        parameters: combinations of parameters that it is tested with; by default the one of its defaults.
    """

    parameters: ClassVar[tuple[Mapping[str, Any], ...]] = ({},)

    def test_declarations_can_be_planned_with(self, optimizer: Optimizer) -> None:
        """States are of elements or rows, parameters plain, and each form takes the parameters that choose it."""
        for rule in self._rules(optimizer):
            form = rule.optimizer
            for name, of in rule.states.items():
                assert name != "step", f"{optimizer.name}: a table has the state 'step' anyway"
                assert of in (ELEMENT, ROW), (
                    f"{optimizer.name}: state {name!r} must be of an element or a row, not {of!r}"
                )
                assert isinstance(rule.initial(name), float), (
                    f"{optimizer.name}: initial({name!r}) must be a number"
                )
            unknown = set(form.initial(rule.parameters)) - set(rule.states)
            assert not unknown, f"{optimizer.name}: initial() names {sorted(unknown)}, which are no states"
            assert form.reads_row in ("", GRADIENTS, WEIGHTS), (
                f"{optimizer.name}: reads_row must be '', {GRADIENTS!r} or {WEIGHTS!r}, not {form.reads_row!r}"
            )
            assert form.reads_row or not rule.states_of(ROW), (
                f"{optimizer.name}: states of rows are updated by means over rows, so that reads_row must say of what"
            )

    def test_numbers_are_finite_and_always_as_many(self, optimizer: Optimizer) -> None:
        """Kernels are compiled for so many."""
        for rule in self._rules(optimizer):
            made = [rule.numbers(_RATE, step) for step in (1.0, 2.0, 1000.0)]
            assert {len(numbers) for numbers in made} == {len(made[0])}, (
                f"{optimizer.name}: numbers() differ in length"
            )
            assert all(abs(number) < float("inf") for numbers in made for number in numbers), (
                f"{optimizer.name}: numbers() must be finite, they are {made}"
            )

    def test_rows_are_updated_each_by_itself(self, optimizer: Optimizer) -> None:
        """Rows together are updated as one by one; of an optimizer that does not read rows, so are columns."""
        for rule in self._rules(optimizer):
            generator = torch.Generator().manual_seed(0)
            weights, gradient = (torch.rand(5, 4, generator=generator) - 0.5 for _ in range(2))
            states = _states(rule, weights)
            together, after = _updated(rule, weights, gradient, states)
            for row in range(len(weights)):
                own = slice(row, row + 1)
                alone, _ = _updated(rule, weights[own], gradient[own], {k: v[own] for k, v in states.items()})
                torch.testing.assert_close(alone, together[own])
            if not rule.optimizer.reads_row:
                for column in range(4):
                    own = slice(column, column + 1)
                    alone, _ = _updated(
                        rule, weights[:, own], gradient[:, own], {k: v[:, own] for k, v in states.items()}
                    )
                    torch.testing.assert_close(alone, together[:, own])
            for name, value in {"the weights": together, **after}.items():
                assert value.isfinite().all(), f"{optimizer.name}: {name} are {value} after an update"

    def test_zero_rows_stay_finite(self, optimizer: Optimizer) -> None:
        """Rows and gradients of zeros are nothing special: no norm is divided by."""
        for rule in self._rules(optimizer):
            for weights, gradient in ((0.0, 0.0), (0.0, 1.0), (1.0, 0.0)):
                new, _ = _updated(
                    rule,
                    torch.full((1, 4), weights),
                    torch.full((1, 4), gradient),
                    _states(rule, torch.zeros(1, 4)),
                )
                assert new.isfinite().all(), (
                    f"{optimizer.name}: weights {weights} with the gradient {gradient} become {new.tolist()}"
                )

    def test_every_kernel_that_runs_it_updates_as_torch_does_without_sharding(
        self, optimizer: Optimizer
    ) -> None:
        """Compiled or not: weights and states after steps, of weighted bags whose ids repeat."""
        with installed(optimizer):
            for spec in self._specs(optimizer):
                kernels = _kernels_for(spec)
                assert kernels or not host().compute_kernels, f"no kernel runs {spec}: {_reasons(spec)}"
                for name in kernels:
                    _check_kernel(name, spec)

    def test_trains_under_every_sharding_type(self, optimizer: Optimizer) -> None:
        """Sharded equals unsharded, on two ranks, wherever a kernel takes the blocks."""
        with installed(optimizer):
            for spec in self._specs(optimizer):
                for name in host().sharding_types:
                    _check_type(host().sharding_types.create(name), spec)

    def _specs(self, optimizer: Optimizer) -> list[OptimizerSpec]:
        return [OptimizerSpec(optimizer.name, _RATE, parameters) for parameters in self.parameters]

    def _rules(self, optimizer: Optimizer) -> list[RowRule]:
        with installed(optimizer):
            rules = [rule_or_reason(spec) for spec in self._specs(optimizer)]
        assert all(isinstance(rule, RowRule) for rule in rules), rules
        return rules  # type: ignore[return-value]


def _states(rule: RowRule, weights: Tensor) -> dict[str, Tensor]:
    """The states of rows before their first update."""
    columns = rule.columns(weights.shape[1]).items()
    return {name: torch.full((len(weights), width), rule.initial(name)) for name, width in columns}


def _updated(
    rule: RowRule, weights: Tensor, gradient: Tensor, states: Mapping[str, Tensor]
) -> tuple[Tensor, Mapping[str, Tensor]]:
    return updated_rows(rule, weights, gradient, slice(None), states, rule.numbers(_RATE, 1.0))


def _request(spec: OptimizerSpec, dim: int, num_columns: int) -> KernelRequest:
    table = TableSpec("t", 10, dim, ["f"], optimizer=spec)
    return KernelRequest.of(table, num_columns, device="cpu", on_this_machine=True)


def _kernels_for(spec: OptimizerSpec, dim: int = 8, num_columns: int = 8) -> list[str]:
    """Names of the kernels that run an optimizer on this machine's CPU, with ids that are rows."""
    known = host().compute_kernels
    kernels = [known.create(name) for name in known]
    return [
        kernel.name
        for kernel in kernels
        if kernel.fuses_optimizer
        and not kernel.row_state
        and kernel.supports(_request(spec, dim, num_columns)) is True
    ]


def _reasons(spec: OptimizerSpec) -> str:
    known = host().compute_kernels
    return "; ".join(str(known.create(name).supports(_request(spec, 8, 8))) for name in known)


def _check_kernel(name: str, spec: OptimizerSpec) -> None:
    kernel = host().compute_kernels.create(name)
    for blocks, device in groups_of(kernel, spec, [spec], extras={}):
        lookup, loops = build(kernel, blocks, device=device)
        for step in range(_STEPS):
            batch = draw(blocks, (2, 3), is_weighted=True, seed=step)
            train(f"{name}: {spec}, step {step}", lookup, loops, batch, device, seed=step, rate=_RATE)
        for index in range(len(blocks)):
            check_state(f"{name}: {spec}", lookup, loops, index)


def _check_type(sharding_type: ShardingType, spec: OptimizerSpec) -> None:
    tested = TypeUnderTest(sharding_type, ParameterConstraints())
    if tested.gives_keys:  # kernels of such types have optimizers of their own
        return
    kernels = _kernels_for(spec)
    if not kernels:
        pytest.skip(f"no kernel runs {spec} here")
    tables = [Table(rows, 8, (f"f{rows}",), "SUM", tested.name, kernels[0], offset=rows) for rows in (7, 12)]
    case = Case(tables, (3, 2), spec.name, parameters=spec.parameters)
    if not tested.applies(case):
        return
    shardings = shardings_of(case, case.specs())
    widths = {block.num_columns for own in shardings.values() for block in own.layout.blocks}
    if all(kernels[0] in _kernels_for(spec, 8, width) for width in widths):
        assert_equals_unsharded(case, train_simulated(case))
