"""An executor: all tables of a module that share a way of moving ids, results and gradients.

The engine calls, on every rank and in this order: ``route`` (once a batch), ``headers``, ``send``, ``receive``,
``lookup``, ``outputs``, and, in training, ``send_gradients`` and ``update``. Headers of all executors travel in one
collective, which the engine makes.

Legend: W ranks, B batch size of this rank, C columns of the collection's pooled output, D columns of an output, N ids.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
from attrs import frozen
from torch import Tensor

from shardwright.contracts.lookup import Lookup
from shardwright.planning.layouts.blocks import Ints
from shardwright.planning.plan.plan import ParameterSharding
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.step.collection import Collection, FeatureBatch
from shardwright.runtime.step.columns import Columns
from shardwright.runtime.step.kernel_groups import KernelGroup


@frozen(eq=False)
class ExecutorConfig:
    """What an executor is built from.

    Args:
        collection: all tables and outputs of the module.
        members: the indices of this executor's tables.
        shardings: how each table is sharded, by name; of this executor's tables, with the blocks that it serves, which
            are all unless a layout has several dataflows.
        env: the ranks.
        device: where the local blocks live.
        is_weighted: ids carry weights.
    """

    collection: Collection
    members: Sequence[int]
    shardings: Mapping[str, ParameterSharding]
    env: ShardingEnv
    device: torch.device
    is_weighted: bool


@frozen(eq=False)
class PeerHeaders:
    """What the ranks said in their headers.

    Args:
        batch_sizes: of each rank, ``[W]``.
        fields: what each rank's executor wrote for this one, ``[W, header_size]``.
    """

    batch_sizes: Ints
    fields: Ints


class ExecutorStep(ABC):
    """One batch on its way through an executor."""

    @abstractmethod
    def headers(self) -> Ints:
        """Numbers for each rank, ``[W, header_size]`` int64."""

    @abstractmethod
    def send(self, peers: PeerHeaders) -> None:
        """Start sending ids, knowing every rank's header."""

    @abstractmethod
    def receive(self) -> Sequence[Tensor]:
        """Wait for ids; returns the tensors that are read from now on."""

    @abstractmethod
    def lookup(self, *, training: bool) -> None:
        """Look ids up, and start sending results."""

    @abstractmethod
    def outputs(self) -> list[Tensor]:
        """Wait for results: float32 tensors, one for each of the executor's ``brings``.

        Where several bring the same columns, they are added up; so ids of which an executor of
        sequences brings nothing are zeros in its tensor.
        """

    @abstractmethod
    def send_gradients(self, gradients: Sequence[Tensor], scale: float) -> None:
        """Start sending gradients.

        Args:
            gradients: of all outputs of the collection: one tensor ``[B, C]`` of a pooled collection, ``[N, D]`` for
                each output of another. They are not to be changed.
            scale: by what they are still to be multiplied to be averages over the ranks.
        """

    @abstractmethod
    def update(self) -> list[Tensor | None]:
        """Wait for gradients and update, or return the gradients of the executor's parameters."""


class Executor(ABC):
    """All tables of a module that share a way of moving ids, results and gradients.

    Attributes:
        groups: the local kernel groups.
        lookups: one for each group.
        brings: the columns of each tensor that comes home.
        header_size: how many integers its headers have, on every rank.
    """

    groups: Sequence[KernelGroup]
    lookups: Sequence[Lookup]
    brings: Sequence[Columns]
    header_size: int

    @abstractmethod
    def __init__(self, config: ExecutorConfig) -> None:
        """Decide all that does not depend on a batch, and build the local kernels."""

    @abstractmethod
    def route(self, batch: FeatureBatch | None) -> ExecutorStep:
        """Begin with a batch; ``None`` where this rank's is wrong, and only headers will be asked."""

    @abstractmethod
    def anatomy(self) -> Mapping[str, list[str]]:
        """Lines for people, under ``"input"`` and ``"output"``."""


def parameters_of(lookups: Sequence[Lookup]) -> list[torch.nn.Parameter]:
    """The parameters that autograd sees."""
    return [parameter for lookup in lookups for parameter in lookup.parameters()]
