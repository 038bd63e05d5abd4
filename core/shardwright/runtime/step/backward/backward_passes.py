"""Detection of gradients that are accumulated over several backward passes, each of which updates tables.

An optimizer in the backward pass takes the gradients of one pass. A loop that makes several passes before the step of
the fused optimizer accumulates gradients of dense parameters, but updates tables several times, so that it trains
otherwise than one process. The fused optimizer's step is where that is certain. Loops that never call it mean updates
in each pass, and so do those whose other optimizers step between the passes.
"""

from __future__ import annotations

from functools import cache
from typing import Any
from weakref import WeakSet

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardwright.error_reports import reporting_errors
from shardwright.errors import UnsupportedError

_latest_step = [0]
"""Number of steps that all optimizers of this process have made."""


@cache
def watch_optimizers() -> None:
    """Count the steps of all of torch's optimizers from now on."""
    register_optimizer_step_post_hook(_note_step)


def _note_step(*_: Any) -> None:
    _latest_step[0] += 1


class BackwardPasses:
    """The backward passes since an optimizer's last step that updated a collection's tables on this rank.

    Args:
        table: description of a table that is updated in the backward pass; empty if there is none.
        adds_up: two updates of a table from one forward pass equal one by the sum of their gradients.

    Attributes:
        count: number that grows with each backward pass.
    """

    def __init__(self, table: str, *, adds_up: bool) -> None:
        self._table, self._adds_up, self.count = table, adds_up, 0
        self._num_passes, self._pass, self._since = 0, -1, 0
        self._forwards: WeakSet[Any] = WeakSet()

    def note(self, forward: Any) -> None:
        """Note that tables are updated; called in a backward pass, maybe several times in one.

        Args:
            forward: forward pass whose gradients have come.
        """
        self.count += 1
        if self._since != _latest_step[0]:  # an optimizer made its step
            self.clear()
        number = torch._C._current_graph_task_id()
        is_summed = self._adds_up and forward in self._forwards
        if number != self._pass and not is_summed:
            self._num_passes, self._pass = self._num_passes + 1, number
        self._forwards.add(forward)

    def clear(self) -> None:
        """Forget the passes: gradients are accumulated anew from here."""
        self._num_passes, self._pass, self._since = 0, -1, _latest_step[0]
        self._forwards.clear()

    def check_step(self) -> None:
        """Check that the optimizer's step comes after one backward pass at most.

        Raises:
            UnsupportedError: several passes have updated tables, where the user means one update by all gradients.
        """
        num_passes = self._num_passes
        self.clear()
        if self._table and num_passes > 1:
            with reporting_errors():
                raise UnsupportedError(
                    f"table {self._table} is updated in the backward pass, and {num_passes} passes were made before "
                    "this step of its optimizer: each updated it, with no gradient accumulated. Shard it with "
                    "update='in_step', an argument of its sharder and of DistributedModelParallel, so that this step "
                    "applies the sum of all gradients; or call step() or zero_grad() after each backward pass, if an "
                    "update in each is meant"
                )
