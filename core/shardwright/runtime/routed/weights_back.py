"""The way home of the gradients of ids' weights: one collective, to the ranks whose batches the ids are of."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwright.contracts.comm_backend import Communicator
from shardwright.contracts.lookup import Bags
from shardwright.planning.layouts.blocks import Ints
from shardwright.runtime.step.segments import deal, interleave


class WeightsBack:
    """The gradients of the weights of one batch's ids, on their way.

    Args:
        bags: bags of each local group, as they arrived.
        leaving: number of values that leave to each rank, of each local group, ``[G, W]``.
        arriving: number of values that arrive from each rank, of each router, ``[R, W]``.
    """

    def __init__(self, bags: Sequence[Bags], leaving: Ints, arriving: Ints) -> None:
        self.bags, self._leaving, self._arriving = bags, leaving, arriving

    def send(self, gradients: Sequence[Tensor], communicator: Communicator, device: torch.device) -> None:
        """Start to send the gradients of each local group's ids, ``[N]`` float32 each."""
        none = torch.empty(0, dtype=torch.float32, device=device)
        sent = interleave(gradients, self._leaving) if gradients else none
        splits = self._arriving.sum(0).tolist()
        self._received = sent.new_empty(sum(splits))
        self._work = communicator.all_to_all(
            self._received, sent, splits, self._leaving.sum(0).tolist(), label="gradients of weights"
        )

    def arrived(self) -> list[Tensor]:
        """Wait; return the gradients in the order of each router's ids."""
        self._work.wait()
        return deal(self._received, self._arriving)
