"""Ranks that count the calls of a training step; importable by their processes."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from attrs import field, frozen
from tests.benchmarks.steps.timed_step import StepSettings, bench_batch, bench_model

from shardwright_plugins.comm_backends._mailboxes import Mailboxes

MIXES = (
    "table_wise",
    "row_wise",
    "table_wise,column_wise,table_column_wise",
    "data_parallel",
    "table_wise,row_wise,data_parallel",
)
"""Sharding types, dealt to the tables in turn."""
_WARM_UP, _STEPS = 4, 20


@frozen
class Calls:
    """The calls of one step, by function.

    Args:
        python: calls of Python functions.
        native: calls of C functions.
    """

    python: Counter[str] = field(factory=Counter)
    native: Counter[str] = field(factory=Counter)

    @property
    def num_all(self) -> int:
        """Number of all calls."""
        return self.python.total() + self.native.total()


def settings_of(types: str) -> StepSettings:
    """A small step, in which calls take most of the time."""
    return StepSettings((), 2, 64, 24, 10_000, 16, 2, _STEPS, kernel="fused_numba").of_types(types)


def calls_of_step(types: str) -> Calls:
    """The calls of forward pass, backward pass and update, without those inside exchanges, in the step with fewest."""
    settings = settings_of(types)
    model, batch = bench_model(settings), bench_batch(settings, 0)
    gradient = torch.ones(settings.batch, settings.tables * settings.dim)

    def step() -> None:
        model(batch).values().backward(gradient)

    for _ in range(_WARM_UP):
        step()
    return min((_counted(step) for _ in range(_STEPS)), key=lambda calls: calls.num_all)


def _counted(step: Callable[[], None]) -> Calls:
    calls, exchanges = Calls(), {Mailboxes.send.__code__, Mailboxes.receive.__code__}
    inside: FrameType | None = None  # what an exchange calls depends on which rank comes first

    def note(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal inside
        if inside is not None:
            inside = None if frame is inside and event == "return" else inside
        elif event == "call":
            calls.python[f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}"] += 1
            inside = frame if frame.f_code in exchanges else None
        elif event == "c_call" and argument is not sys.setprofile:
            calls.native[f"{frame.f_code.co_filename}:{frame.f_code.co_qualname} -> {argument.__name__}"] += 1

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls
