"""What the engine asks of a built kernel: bags in, sums out; gradients in, updates done.

Legend: S slots, W source ranks, B_w batch size of source w, B = sum of B_w, N ids, D columns of a block.
A slot is one feature looked up in one local block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from attrs import field, frozen
from torch import Tensor

from shardwright.contracts.compute_kernel import KernelRequest
from shardwright.planning.layouts import Block
from shardwright.planning.tables import TableSpec


@frozen
class BlockSpec:
    """A local block of a table.

    Args:
        table: the table's specification.
        block: its rows and columns.
        request: what was asked of the kernel.
        num_slots: how many features are looked up in it; their slots follow one another.
        extras: the plugin's data from the plan.
    """

    table: TableSpec
    block: Block
    request: KernelRequest
    num_slots: int
    extras: Mapping[str, Any] = field(factory=dict)


@frozen(eq=False)
class Bags:
    """The bags of one lookup, in the order they arrived: by source rank, slot, sample.

    Args:
        ids: ``[N]`` int64, local rows of the slot's block.
        lengths: ``[S * B]`` int32, ids of each bag.
        weights: ``[N]`` float32, or ``None``.
        batch_sizes: ``B_w`` of each source rank.
        num_slots: ``S``.
    """

    ids: Tensor
    lengths: Tensor
    weights: Tensor | None
    batch_sizes: tuple[int, ...]
    num_slots: int

    @property
    def batch_size(self) -> int:
        """``B``: samples of all sources together."""
        return sum(self.batch_sizes)

    def offsets(self) -> Tensor:
        """``[S * B + 1]`` int64: where each bag's ids begin."""
        offsets = self.lengths.new_zeros(self.lengths.numel() + 1, dtype=torch.int64)
        torch.cumsum(self.lengths, 0, out=offsets[1:])
        return offsets


class Lookup(ABC):
    """The blocks of one kernel group on one rank: weights, optimizer state, lookup and update.

    The result of :meth:`forward` holds one sum per bag, flat in memory, sources one after the other. Inside a
    source the order is ``[S, B_w, D]`` (slot after slot), or ``[B_w, sum of D]`` for a kernel that declares
    ``batch_major``. Gradients come back in the same order, with as many columns as the kernel asked for
    (``needs_whole_rows``).

    Autograd is the engine's business: ``forward`` runs without it, ``backward`` gets what ``forward`` saved.
    """

    blocks: Sequence[BlockSpec]
    states_per_row: frozenset[str] = frozenset()
    """The names of optimizer states that hold one value a row, the same in every column block of a table."""

    @abstractmethod
    def forward(self, bags: Bags, *, training: bool) -> tuple[Tensor, Any]:
        """Sum the rows of each bag.

        Args:
            bags: what to look up.
            training: a backward call will follow.

        Returns:
            The float32 sums (``sum over slots of B * D`` elements) and whatever ``backward`` needs.
        """

    @abstractmethod
    def backward(self, saved: Any, gradient: Tensor) -> Sequence[Tensor | None]:
        """Update the weights, or return the gradients of :meth:`parameters`.

        Args:
            saved: from ``forward``.
            gradient: float32, flat, in the order of ``forward``'s result.

        Returns:
            One gradient for each of :meth:`parameters`.
        """

    @abstractmethod
    def weight(self, block: int) -> Tensor:
        """``[rows, columns]``: the weights of a block, shared storage."""

    def parameters(self) -> Sequence[torch.nn.Parameter]:
        """The parameters that autograd sees, one a block; none where the optimizer is fused."""
        return ()

    def optimizer_state(self, block: int) -> Mapping[str, Tensor]:
        """The optimizer state of a block under the names of the torch optimizer it stands for.

        Shapes are ``[rows, columns]``, ``[rows, 1]`` (for ``states_per_row``), or ``[]`` for ``step``, which counts the
        updates; storage is shared, but ``step`` is set with :meth:`load_step`.
        """
        return {}

    def load_step(self, step: float) -> None:  # noqa: B027 - not every optimizer counts
        """Set the number of updates done, where the optimizer counts them."""

    def set_learning_rate(self, learning_rate: float) -> None:  # noqa: B027 - not every kernel has one
        """Use ``learning_rate`` from the next forward pass on."""
