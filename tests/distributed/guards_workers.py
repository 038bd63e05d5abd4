"""Ranks that count the calls of guards; importable by their processes."""

from __future__ import annotations

import os
import pickle
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from tests.distributed import loop_workers, workers
from torch import nn

import shardwright_plugins.guards
from shardwright import KeyedJaggedTensor
from shardwright_plugins.guards._replicas import EVERY_VARIABLE

GUARDS = str(Path(shardwright_plugins.guards.__file__).parent)
WRAPPERS = ("compiling.py", "eval_frame.py", "_compile.py")
"""Files with the functions that keep guards from being traced."""


class Deep(nn.Module):
    """A model with more dense parameters than calls that guards may make."""

    def __init__(self) -> None:
        super().__init__()
        self.clicks = workers.clicks()
        self.layers = nn.Sequential(*(nn.Linear(1, 1) for _ in range(50)))

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.layers(self.clicks(features).unsqueeze(1)).squeeze(1)


class _Calls:
    """Calls of Python functions in guards, and in what wraps them."""

    def __init__(self) -> None:
        self.count, self._depth = 0, 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        is_inside = self._depth > 0 or frame.f_code.co_filename.startswith(GUARDS)
        if event == "return" and self._depth:
            self._depth -= 1
        if event != "call" or not is_inside:
            return
        if not self._depth:
            outer = frame.f_back
            while outer is not None and outer.f_code.co_filename.endswith(WRAPPERS):
                self.count, outer = self.count + 1, outer.f_back
        self._depth, self.count = self._depth + 1, self.count + 1


def calls_of(step: Callable[[], Any]) -> int:
    calls = _Calls()
    sys.setprofile(calls)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls.count


def calls_in_steps(update: str, num_steps: int, *, steps_tables: bool = True) -> list[int]:
    """The calls that guards make in each step of a loop, which may leave the step of the tables out."""
    model = loop_workers.model_of(module=Deep(), update=update)
    dense, counts = loop_workers.dense_optimizer(model), []

    def step() -> None:
        dense.zero_grad()
        if steps_tables:
            model.fused_optimizer.zero_grad()
        model(workers.batch(0, dist.get_rank())).square().mean().backward()
        dense.step()
        if steps_tables:
            model.fused_optimizer.step()

    for _ in range(num_steps):
        counts.append(calls_of(step))
    return counts


def drifting(how: str, every: str, num_steps: int) -> tuple[str, list[str]]:
    """Train a model whose dense replicas drift.

    Args:
        how: "one rank": rank 1 changes one weight by one bit; "not averaged": nobody averages; "": they do not drift.
        every: forward passes from one comparison to the next.
        num_steps: steps.

    Returns:
        The error, and the warnings.
    """
    with mock.patch.dict(os.environ, {EVERY_VARIABLE: every}):
        model = loop_workers.model_of(is_averaged=how != "not averaged")
    optimizer = loop_workers.dense_optimizer(model)

    def run() -> None:
        for number in range(num_steps):
            loop_workers.train(model, range(number, number + 1), optimizer)
            if how == "one rank" and number == 2 and dist.get_rank() == 1:
                with torch.no_grad():
                    model.module.over.weight.view(torch.int32)[0, 5] ^= 1

    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        text = workers.error_of(run)
    return text, [str(own.message) for own in told if own.category is RuntimeWarning]


def load_other(names: str, other: str) -> tuple[str, bool]:
    """Load a state whose values of some names are other ones on rank 1; returns the error, and if nothing was changed.

    Args:
        names: beginning of the names.
        other: "bits" of one element, or "none": ranks load the same.
    """
    model = loop_workers.model_of(["data_parallel"])
    before = model.full_state_dict()
    state = {name: value.clone() + 1 for name, value in before.items()}
    for name, value in state.items():
        if name.startswith(names) and other == "bits" and dist.get_rank() == 1:
            value.view(-1).view(torch.int32)[-1] ^= 1
    text = workers.error_of(lambda: model.load_state_dict(state))
    after, copy = model.full_state_dict(), model.unshard()
    if dist.get_rank() == 1:  # alone
        pickle.loads(pickle.dumps(copy)).load_state_dict(state)
    return text, all(torch.equal(before[name], after[name]) for name in before)
