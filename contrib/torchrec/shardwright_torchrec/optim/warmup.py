"""An optimizer whose learning rate follows stages."""

from __future__ import annotations

import math
from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

import shardwright as sw

__all__ = ["WarmupOptimizer", "WarmupPolicy", "WarmupStage"]


class WarmupPolicy(Enum):
    """Forms of a stage's learning rate."""

    NONE = "none"
    LINEAR = "linear"
    CONSTANT = "constant"
    POLY = "poly"
    STEP = "step"
    INVSQRT = "inv_sqrt"
    COSINE_ANNEALING_WARM_RESTARTS = "cosine_annealing_warm_restarts"
    INTERPOLATE = "interpolate"


@dataclass
class WarmupStage:
    """A stage of a learning rate.

    Args:
        policy: its form.
        max_iters: last step of it, counted from the first of all.
        value: parameter of the form: the first or least factor, the power, or the factor of each period.
        lr_scale: factor of the whole stage.
        decay_iters: steps of a period of `STEP`, 1 by default; step at which `POLY` is 0, ``max_iters`` by default.
        sgdr_period: steps from one restart of the cosine to the next (SGDR, arXiv:1608.03983).
        start_interpolating_iters: step at which `INTERPOLATE` begins.
        end_value: last factor of `INTERPOLATE`.
    """

    policy: WarmupPolicy = WarmupPolicy.LINEAR
    max_iters: int = 1
    value: float = 1.0
    lr_scale: float = 1.0
    decay_iters: int = -1
    sgdr_period: int = 1
    start_interpolating_iters: int | None = None
    end_value: float | None = None


def _factor(stage: WarmupStage, step: int) -> float:
    """Factor of the learning rate at a step, counted from the first of all; TorchRec's formulas."""
    factors: dict[WarmupPolicy, Callable[[], float]] = {
        WarmupPolicy.NONE: lambda: 1.0,
        WarmupPolicy.CONSTANT: lambda: stage.value,
        WarmupPolicy.LINEAR: lambda: stage.value + (1.0 - stage.value) * step / stage.max_iters,
        WarmupPolicy.POLY: lambda: math.pow(1 - step / _period(stage, stage.max_iters), stage.value),
        WarmupPolicy.STEP: lambda: math.pow(stage.value, step // _period(stage, 1)),
        WarmupPolicy.INVSQRT: lambda: 1.0 / math.sqrt(max(step, 1)),
        WarmupPolicy.COSINE_ANNEALING_WARM_RESTARTS: lambda: _cosine(stage, step),
        WarmupPolicy.INTERPOLATE: lambda: _between(stage, step),
    }
    return factors[stage.policy]() * stage.lr_scale


def _period(stage: WarmupStage, default: int) -> int:
    return stage.decay_iters if stage.decay_iters > 0 else default


def _cosine(stage: WarmupStage, step: int) -> float:
    passed = step % stage.sgdr_period / stage.sgdr_period
    return stage.value + (1.0 - stage.value) * 0.5 * (1 + math.cos(math.pi * passed))


def _between(stage: WarmupStage, step: int) -> float:
    if stage.end_value is None or stage.start_interpolating_iters is None:
        raise sw.InvalidInputError(f"INTERPOLATE needs start_interpolating_iters and end_value, got {stage}")
    passed = step - stage.start_interpolating_iters
    return stage.value + (stage.end_value - stage.value) * passed / (
        stage.max_iters - stage.start_interpolating_iters
    )


class WarmupOptimizer(sw.OptimizerWrapper):
    """Sets the learning rate of its optimizer before each step; after the last stage it is `lr`.

    The number of steps is part of the state dict, under a parameter of one element.

    Args:
        optimizer: the optimizer within.
        stages: the stages; each ends at its `max_iters`.
        lr: learning rate that factors are of.
        lr_param: name of the learning rate in parameter groups.
        param_name: name of the parameter that stands for the number of steps.

    Raises:
        InvalidInputError: stages do not end one after the other, or one lacks a parameter.
    """

    def __init__(
        self,
        optimizer: sw.KeyedOptimizer,
        stages: list[WarmupStage],
        lr: float = 0.1,
        lr_param: str = "lr",
        param_name: str = "__warmup",
    ) -> None:
        super().__init__(optimizer)
        self._counter = torch.zeros(1)
        self.params = {**optimizer.params, param_name: self._counter}
        ends = [stage.max_iters for stage in stages]
        if ends != sorted(ends):
            raise sw.InvalidInputError(f"stages end one after the other, got max_iters {ends}")
        self._stages, self._lr, self._lr_param, self._param_name = stages, lr, lr_param, param_name
        self._steps = 0
        self.state = ChainMap({self._counter: {}}, optimizer.state)  # type: ignore[assignment]  # a live view
        self._set_rate()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step with the rate of this step, then set the next one's."""
        loss = super().step(closure)
        self._steps += 1
        self._set_rate()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The state dict of the optimizer within, and the number of steps."""
        state = super().state_dict()
        own = {self._param_name: dict(self.state[self._counter])}
        return {**state, "state": {**state["state"], **own}}

    def load_state_dict(self, state_dict: Any) -> None:
        """Take over a state dict, and go on at its step."""
        given = dict(state_dict["state"])
        steps = given.pop(self._param_name, None)
        super().load_state_dict({**state_dict, "state": given})
        if steps is not None:
            self._steps = int(steps["warmup"][0])
        self._set_rate()

    def _stage(self) -> int:
        """Number of the stage of this step; the number of stages after the last."""
        return sum(self._steps > stage.max_iters for stage in self._stages)

    def _set_rate(self) -> None:
        number = self._stage()
        factor = _factor(self._stages[number], self._steps) if number < len(self._stages) else 1.0
        for group in self.param_groups:
            group[self._lr_param] = self._lr * factor
        self.state[self._counter]["warmup"] = torch.tensor([self._steps, number])
