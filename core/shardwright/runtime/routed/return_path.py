"""The contract of a return path: it brings results home to the ranks that asked, and gradients back.

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

from shardwright.planning.arrays import Ints
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.routed.plan import RoutingPlan, SlotColumns
from shardwright.runtime.routed.routing import Bucketed
from shardwright.runtime.step.columns import Columns, Room
from shardwright.runtime.step.kernel_groups import Bucketing


@frozen(eq=False)
class Answers:
    """Results of this rank's lookups for the batches of all ranks, to be sent home.

    Args:
        results: flat result of each local group, those of other paths too (see :class:`shardwright.Lookup`).
        batch_sizes: ``B_w`` of each rank, ``[W]``.
        asked: ids that this rank sent, by bucketing.
        answered: number of bags from each rank for this rank's slots, ``[W, S_r]``, by bucketing. Where a feature has a
            batch size of its own, fewer than ``B_w``; results then are those of slots filled up with empty bags.
        num_ids: number of ids of each feature in this rank's batch, ``[F]``.
        device: device of all tensors.
        are_full: slots whose ids are not parted have as many bags as their source has samples, because no feature has a
            batch size of its own.
    """

    results: Sequence[Tensor]
    batch_sizes: Ints
    asked: Mapping[Bucketing, Bucketed]
    answered: Mapping[Bucketing, Ints]
    num_ids: Ints
    device: torch.device
    are_full: bool


class ReturnStep(ABC):
    """Exchange of one batch's results, then of their gradients.

    Each method is called once, in this order. It is called for all paths before the next method of any path, so that
    the paths' collectives run together.

    Attributes:
        scale_left: factor that is still missing from :meth:`gradients`, known once they are sent; 1 if they were
            multiplied before.
    """

    scale_left: float = 1.0

    @abstractmethod
    def proceed(self) -> None:
        """Go on, if results take more than one collective: wait for the one before, and start the last."""

    @abstractmethod
    def outputs(self) -> list[Tensor]:
        """Wait for results: a tensor for each of the path's ``brings``, as :class:`Columns` says."""

    @abstractmethod
    def send_gradients(self, gradients: Sequence[Tensor], scale: float) -> None:
        """Start sending gradients.

        Args:
            gradients: gradients of the collection's outputs: ``[B, C]``, or, of sequences, ``[N, D]`` for each output.
                They must not be changed.
            scale: factor that makes their sum over the ranks an average, ``1 / W``.
        """

    @abstractmethod
    def gradients(self) -> Mapping[int, Tensor]:
        """Wait for gradients; return each local group's, flat, in the order of its result, by index of the group."""


class ReturnPath(ABC):
    """The return path of the slots of one dataflow.

    Args:
        plan: routing plan of all ranks.
        slots: slots whose results take this path.
        env: the ranks.

    Attributes:
        brings: columns of each tensor that the path brings to each rank.
        keeps_empty_bags: results have a bag for each sample, also if it has no id in a slot's rows.
    """

    brings: Sequence[Columns]
    keeps_empty_bags: ClassVar[bool] = False

    @abstractmethod
    def __init__(self, plan: RoutingPlan, slots: PathSlots, env: ShardingEnv) -> None:
        """Compute the orders and sizes that do not depend on a batch."""

    @classmethod
    def among(cls, env: ShardingEnv) -> type[ReturnPath]:
        """The path to take among these ranks: this one, unless a shorter one does the same there."""
        return cls

    @abstractmethod
    def start(self, answers: Answers) -> ReturnStep:
        """Start to send results."""

    def room(self, device: torch.device) -> Room | None:
        """Maker of the memory for its group's results, if the path sends them as they are; else ``None``."""
        return None

    @abstractmethod
    def summary(self) -> str:
        """One line that describes the path to people."""


@frozen(eq=False)
class PathSlots:
    """The slots of one path, on all ranks.

    Args:
        columns: the slots, in the order in which they are sent.
        kinds: indices of the kernel groups' kinds.
        groups: indices of this rank's groups.
    """

    columns: SlotColumns
    kinds: Sequence[int]
    groups: Sequence[int]

    @classmethod
    def of_kinds(cls, plan: RoutingPlan, kinds: Sequence[int]) -> PathSlots:
        """Select the slots of some kinds of kernel groups."""
        is_chosen = np.isin(plan.pieces.group, kinds)[plan.slots.piece]
        own = [plan.kinds[kind] for kind in kinds]
        groups = [index for index, group in enumerate(plan.groups) if group.kind in own]
        return cls(plan.slots.chosen(is_chosen), kinds, groups)
