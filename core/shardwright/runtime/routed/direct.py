"""The direct return path: one collective sends results to the ranks that asked, and one sends gradients back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from shardwright.planning.arrays import Ints
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.routed.plan import RoutingPlan
from shardwright.runtime.routed.return_path import Answers, PathSlots, ReturnPath, ReturnStep
from shardwright.runtime.routed.sections import sections_of
from shardwright.runtime.routed.wire import Wire
from shardwright.runtime.step.columns import Room

RESULTS, GRADIENTS = 0, 1


class DirectReturn(ReturnPath):
    """Results in one collective, and gradients in one collective back; see the module."""

    def __init__(self, plan: RoutingPlan, slots: PathSlots, env: ShardingEnv) -> None:
        self.sections = sections_of(plan, slots.kinds)
        self._is_one_kind = len(slots.kinds) == 1
        self.brings = [columns for section in self.sections for columns in section.brings]
        self.wires = [
            Wire(env.communicator, [section.wire[direction] for section in self.sections])
            for direction in (RESULTS, GRADIENTS)
        ]
        widths = plan.pieces.stop - plan.pieces.start
        self._widths = np.bincount(
            np.repeat(np.arange(env.world_size), slots.columns.per_rank),
            widths[slots.columns.piece],
            env.world_size,
        ).astype(np.int64)

    def start(self, answers: Answers) -> ReturnStep:  # noqa: D102 - described in the base class
        return _DirectStep(self, answers)

    def room(self, device: torch.device) -> Room | None:  # noqa: D102
        wire = self.wires[RESULTS]
        return partial(wire.room, device=device) if wire.sends_as_it_is and self._is_one_kind else None

    def summary(self) -> str:  # noqa: D102
        return ", ".join(f"rank {rank} {width}" for rank, width in enumerate(self._widths.tolist()))


class _DirectStep(ReturnStep):
    def __init__(self, path: DirectReturn, answers: Answers) -> None:
        self._path = path
        self._steps = [section.begin(answers) for section in path.sections]
        # Values of each section that this rank answers and asks for, of results and of gradients, [P, 2, W].
        sizes: Ints = np.array([step.sizes for step in self._steps])
        self._answered, self._asked = sizes[:, 0], sizes[:, 1]
        self._transfer = path.wires[RESULTS].exchange(
            [step.results() for step in self._steps],
            self._answered[:, RESULTS],
            self._asked[:, RESULTS],
            label="results",
        )

    def proceed(self) -> None:
        """Results take one collective, which is under way."""

    def outputs(self) -> list[Tensor]:
        found = list[Tensor]()
        for step, own in zip(self._steps, self._transfer.wait(), strict=True):
            found += step.outputs(own)
        del self._transfer
        return found

    def send_gradients(self, gradients: Sequence[Tensor], scale: float) -> None:
        self.scale_left = scale  # kernels multiply where they read
        wire = self._path.wires[GRADIENTS]
        room = partial(wire.room, device=gradients[0].device)
        self._transfer = wire.exchange(
            [step.gradients(gradients, room) for step in self._steps],
            self._asked[:, GRADIENTS],
            self._answered[:, GRADIENTS],
            label="gradients",
        )

    def gradients(self) -> Mapping[int, Tensor]:
        found: dict[int, Tensor] = {}
        steps = zip(self._path.sections, self._steps, self._transfer.wait(), strict=True)
        del self._transfer
        for section, step, own in steps:
            found.update(zip(section.groups, step.by_group(own), strict=True))
        return found
