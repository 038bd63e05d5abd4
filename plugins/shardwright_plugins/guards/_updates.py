"""Guard over tables updated in the backward pass: gradients of several passes do not add up.

An optimizer in the backward pass takes the gradients of one lookup in one pass. A loop that makes several passes before
the step of the fused optimizer, or one pass through several lookups of a collection, accumulates gradients of dense
parameters, but updates tables several times. So it trains otherwise than one process. The fused optimizer's step is
where that is certain. Loops whose other optimizers step between the passes mean updates in each pass. A loop that steps
dense parameters alone after several passes may mean either, and is warned once. Two passes through one forward pass
(``retain_graph=True``) mean the sum of two losses: the second is refused, unless two updates equal one by the sum.
"""

from __future__ import annotations

import warnings
from typing import Any
from weakref import ref

import torch
from torch.optim import Optimizer

from shardwright.contracts import TrainedCollection
from shardwright.error_reports import reporting_errors
from shardwright.errors import UnsupportedError


class BackwardPasses:
    """The backward passes since an optimizer's last step that updated a collection's tables on this rank.

    Attributes:
        num_passes: their number.
    """

    def __init__(self) -> None:
        self.num_passes, self._pass, self._since = 0, -1, 0
        self._forwards: list[ref[Any]] = []
        self._is_told = False

    def note(self, collection: TrainedCollection, forward: Any, num_steps: int) -> None:
        """Note that tables are updated; called in a backward pass, maybe several times in one.

        Args:
            collection: collection of the tables.
            forward: forward pass whose gradients have come.
            num_steps: steps that all optimizers of this process have made.

        Raises:
            UnsupportedError: an earlier pass went through the same forward pass, and its update and this one do not add
                up.
        """
        if self._since != num_steps:  # an optimizer made its step
            self.clear(num_steps)
        number = torch._C._current_graph_task_id()
        is_known, alive = False, []
        for earlier in self._forwards:
            if (other := earlier()) is not None:
                is_known = is_known or other is forward
                alive.append(earlier)
        self._forwards = [*alive, ref(forward)]
        if is_known and number != self._pass and not collection.adds_up:
            self.clear(num_steps)
            with reporting_errors():
                raise UnsupportedError(
                    f"table {collection.updated_in_backward} is updated in the backward pass, and this is a second one "
                    "through the same forward pass (retain_graph=True): its optimizer would update rows by each loss, "
                    "where one process updates them once, by the sum. Add the losses, and call backward() on the sum; "
                    "or shard with update='in_step', an argument of its sharder and of DistributedModelParallel; or "
                    "call an optimizer's step() or fused_optimizer.zero_grad() in between, if an update by each loss "
                    "is meant"
                )
        # A second lookup in one pass is an update by itself.
        if not is_known and (number != self._pass or not collection.adds_up):
            self.num_passes, self._pass = self.num_passes + 1, number

    def clear(self, num_steps: int) -> None:
        """Forget the passes: gradients are accumulated anew from here."""
        self.num_passes, self._pass, self._since = 0, -1, num_steps
        self._forwards = []

    def warn_of(self, optimizer: Optimizer, dense: frozenset[int], table: str, num_steps: int) -> None:
        """Warn once, before a step of dense parameters that applies the sum of several passes.

        Args:
            optimizer: the optimizer.
            dense: identities of the dense parameters of the collection's model.
            table: description of a table of the collection.
            num_steps: steps that all optimizers of this process have made.
        """
        if self._since != num_steps or self._is_told:
            return
        if not any(id(own) in dense for group in optimizer.param_groups for own in group["params"]):
            return
        self._is_told = True
        warnings.warn(
            f"{type(optimizer).__name__} steps after {self.num_passes} backward passes, or one through as many calls "
            f"of a collection. Dense parameters take the sum of gradients, but table {table} was updated by each. "
            "To accumulate gradients of tables, too, shard with update='in_step', an argument of "
            "DistributedModelParallel, and call fused_optimizer.step(); if an update by each is meant, call "
            "fused_optimizer.zero_grad() after each pass",
            RuntimeWarning,
            stacklevel=5,  # the line that calls step(), through torch's wrapper and the hook
        )

    def check_step(self, collection: TrainedCollection, num_steps: int) -> None:
        """Check that the optimizer's step comes after one backward pass at most.

        Raises:
            UnsupportedError: several passes, or lookups of one pass, have updated tables, where the user means one
                update by all gradients.
        """
        num_passes = self.num_passes
        self.clear(num_steps)
        if num_passes > 1:
            with reporting_errors():
                raise UnsupportedError(
                    f"table {collection.updated_in_backward} is updated in the backward pass, and {num_passes} passes "
                    "were made before this step of its optimizer, or one through as many calls of its collection: each "
                    "updated it, with no gradient accumulated. Shard it with update='in_step', an argument of its "
                    "sharder and of DistributedModelParallel, so that this step applies the sum of all gradients; or "
                    "call step() or zero_grad() after each backward pass, if an update in each is meant"
                )
