"""The contract of a return path: how results take home to the ranks that asked, and gradients back.

Legend: W ranks, B batch size of this rank, B_w of rank w, C columns of the collection's pooled output, D columns of a
slot, S_r slots of one router.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
from attrs import frozen
from torch import Tensor

from shardwright.planning.layouts.blocks import Ints
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.routed.plan import RoutingPlan, SlotColumns
from shardwright.runtime.routed.routing import Bucketed
from shardwright.runtime.step.columns import Columns, Room
from shardwright.runtime.step.kernel_groups import Bucketing


@frozen(eq=False)
class Answers:
    """What was looked up for a batch, on all ranks, and is to take home.

    Args:
        results: of each of the path's groups here, by the group's index, flat (see :class:`shardwright.Lookup`).
        batch_sizes: ``B_w`` of each rank, ``[W]``.
        asked: what this rank asked for, by bucketing.
        answered: the bags that each rank asked of this rank's slots, ``[W, S_r]``, by bucketing.
        num_ids: ids of each feature in this rank's batch, ``[F]``.
        device: of all tensors.
    """

    results: Mapping[int, Tensor]
    batch_sizes: Ints
    asked: Mapping[Bucketing, Bucketed]
    answered: Mapping[Bucketing, Ints]
    num_ids: Ints
    device: torch.device


class ReturnStep(ABC):
    """One batch's results on their way, then their gradients.

    Each method is called once, in this order, and for all paths before the next of any is: so the paths' collectives
    are under way together.

    Attributes:
        scale_left: by what :meth:`gradients` are still to be multiplied, known once they are sent; 1 where they were
            multiplied before.
    """

    scale_left: float = 1.0

    @abstractmethod
    def proceed(self) -> None:
        """Go on where results take more than one collective: wait for the one before, and start the last."""

    @abstractmethod
    def outputs(self) -> list[Tensor]:
        """Wait: a tensor for each of the path's ``brings``; see :class:`shardwright.runtime.step.executor.Columns`."""

    @abstractmethod
    def send_gradients(self, gradients: Sequence[Tensor], scale: float) -> None:
        """Start sending gradients.

        Args:
            gradients: of the collection's outputs: ``[B, C]``, or, of sequences, ``[N, D]`` for each output. They are
                not to be changed.
            scale: by what they are still to be multiplied to be averages over the ranks.
        """

    @abstractmethod
    def gradients(self) -> Mapping[int, Tensor]:
        """Wait for gradients; returns each local group's, by its index, flat, in the order of its result."""


class ReturnPath(ABC):
    """The way home of the slots of one dataflow.

    Args:
        plan: what is routed, on all ranks.
        slots: those whose results take this way.
        env: the ranks.

    Attributes:
        brings: the columns of each tensor that it brings to each rank.
        keeps_empty_bags: results have a bag for each sample, also where it has no id in a slot's rows.
    """

    brings: Sequence[Columns]
    keeps_empty_bags: ClassVar[bool] = False

    @abstractmethod
    def __init__(self, plan: RoutingPlan, slots: PathSlots, env: ShardingEnv) -> None:
        """Decide orders and sizes."""

    @classmethod
    def among(cls, env: ShardingEnv) -> type[ReturnPath]:
        """The path to take among these ranks: this one, unless a shorter one does the same there."""
        return cls

    @abstractmethod
    def start(self, answers: Answers) -> ReturnStep:
        """Begin to send results."""

    def room(self, device: torch.device) -> Room | None:
        """Maker of the memory for its group's results, if the path sends them as they are; else ``None``."""
        return None

    @abstractmethod
    def summary(self) -> str:
        """One line for people."""


@frozen(eq=False)
class PathSlots:
    """The slots of one path, on all ranks.

    Args:
        columns: the slots, in the order in which they are sent.
        kinds: the kernel groups' kinds, by index.
        groups: this rank's groups, by index.
    """

    columns: SlotColumns
    kinds: Sequence[int]
    groups: Sequence[int]

    @classmethod
    def of(cls, plan: RoutingPlan, path: object) -> PathSlots:
        """Those of a path."""
        kinds = [index for index, kind in enumerate(plan.kinds) if kind.path == path]
        return cls.of_kinds(plan, kinds)

    @classmethod
    def of_kinds(cls, plan: RoutingPlan, kinds: Sequence[int]) -> PathSlots:
        """Those of some kinds of groups."""
        is_chosen = np.isin(plan.pieces.group, kinds)[plan.slots.piece]
        own = [plan.kinds[kind] for kind in kinds]
        groups = [index for index, group in enumerate(plan.groups) if group.kind in own]
        return cls(plan.slots.chosen(is_chosen), kinds, groups)
