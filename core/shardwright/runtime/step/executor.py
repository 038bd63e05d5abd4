"""An executor: all tables of a module that share a way of moving ids, results and gradients.

The engine calls, on every rank and in this order: ``route`` (once a batch), ``headers``, ``send``, ``receive``,
``lookup``, ``outputs``, and, in training, ``send_gradients`` and ``update``. Where the weights of ids are trained,
``send_weight_gradients`` and ``weight_gradients`` come between these two. Headers of all executors travel in one
collective, which the engine makes.

Legend: W ranks, B batch size of this rank, C columns of the collection's pooled output, D columns of an output, N ids.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence

import torch
from attrs import evolve, frozen
from torch import Tensor

from shardwright.contracts.lookup import Lookup
from shardwright.planning.arrays import Ints
from shardwright.planning.layouts.layout import Dataflow
from shardwright.planning.plan.sharding import ParameterSharding
from shardwright.planning.tables.spec import TableSpec
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.step.collection import Collection, FeatureBatch
from shardwright.runtime.step.columns import Columns
from shardwright.runtime.step.kernel_groups import (
    KernelGroup,
    LookupBuilder,
    build_lookup,
    check_layout,
    rows_of_parts,
)


@frozen(eq=False)
class ExecutorConfig:
    """Everything that an executor is built from.

    Args:
        collection: all tables and outputs of the module.
        members: the indices of this executor's tables.
        shardings: each table's part of the plan, by table name. Layouts of this executor's tables have only the blocks
            that it serves: all blocks, unless a layout has several dataflows.
        env: the ranks.
        device: device of the local blocks.
        columns: dtype of each column that travels beside the ids, by name: weights in weighted collections, and what
            compute kernels ask for.
        build_lookup: makes the lookup of a group of local blocks; by default its kernel builds it.
    """

    collection: Collection
    members: Sequence[int]
    shardings: Mapping[str, ParameterSharding]
    env: ShardingEnv
    device: torch.device
    columns: Mapping[str, torch.dtype]
    build_lookup: LookupBuilder = build_lookup

    def lookups(self, groups: Sequence[KernelGroup]) -> list[Lookup]:
        """Make the lookup of each group, on the device."""
        return [self.build_lookup(group, self.device) for group in groups]


@frozen(eq=False)
class PeerHeaders:
    """The part of all ranks' headers that one executor reads.

    Args:
        batch_sizes: samples of each rank's batch, ``[W]``.
        fields: integers from each rank's executor to this rank's, ``[W, header_size]``.
    """

    batch_sizes: Ints
    fields: Ints


class ExecutorStep(ABC):
    """One batch inside an executor."""

    @abstractmethod
    def headers(self) -> Ints:
        """Integers for each rank's executor, ``[W, header_size]`` int64; ``[header_size]`` if all get the same."""

    @abstractmethod
    def send(self, peers: PeerHeaders) -> None:
        """Start sending ids, knowing every rank's header."""

    @abstractmethod
    def receive(self) -> Sequence[Tensor]:
        """Wait for ids; return the tensors that the lookup reads."""

    def prefetch(self) -> Sequence[Tensor]:
        """Have the kernels of arrived ids bring rows near; called if one of the executor's lookups prefetches.

        Returns:
            The tensors made for that which the lookup reads, too.
        """
        return ()

    @abstractmethod
    def lookup(self, *, training: bool, trains_weights: bool = False) -> None:
        """Look ids up, and start sending results.

        Args:
            training: :meth:`update` will follow.
            trains_weights: :meth:`send_weight_gradients` will follow, before it.
        """

    @abstractmethod
    def outputs(self) -> list[Tensor]:
        """Wait for results: one float32 tensor for each element of the executor's ``brings``.

        Tensors that bring the same columns are added up. So a tensor of sequences has rows of zeros for ids that
        this executor does not look up.
        """

    @abstractmethod
    def send_gradients(self, gradients: Sequence[Tensor], scale: float) -> None:
        """Start sending gradients.

        Args:
            gradients: gradients of all outputs of the collection: one tensor ``[B, C]`` for a pooled collection,
                ``[N, D]`` for each output of another. They must not be changed.
            scale: factor that makes their sum over the ranks an average, ``1 / W``.
        """

    @abstractmethod
    def send_weight_gradients(self) -> None:
        """Wait for gradients, and start to send those of ids' weights home; rows are not updated yet."""

    @abstractmethod
    def weight_gradients(self, num_ids: int) -> Tensor:
        """Wait for the gradients of the weights of this rank's ids, ``[N]`` float32; not averaged over the ranks."""

    @abstractmethod
    def update(self) -> list[Tensor | None]:
        """Wait for gradients and update, or return the gradients of the executor's parameters."""


class Executor(ABC):
    """All tables of a module that share a way of moving ids, results and gradients.

    Attributes:
        groups: the local kernel groups.
        lookups: one lookup for each group.
        brings: the columns of each tensor that returns.
        header_size: number of integers in its headers, the same on every rank.
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
        """Route a batch; ``None`` if this rank's is wrong, and only headers will be asked for."""

    @abstractmethod
    def anatomy(self) -> Mapping[str, list[str]]:
        """Lines that describe the routing to people, under ``"input"`` and ``"output"``."""


def deal(
    tables: Sequence[TableSpec],
    shardings: Mapping[str, ParameterSharding],
    executor_of: Callable[[Dataflow], type[Executor]],
    world_size: int,
) -> dict[tuple[type[Executor], bool], tuple[list[int], dict[str, ParameterSharding]]]:
    """Deal the tables to executors: each one's tables by index, and their shardings by name, with the blocks it serves.

    Frozen tables have executors of their own, since nothing goes back to them.

    Raises:
        PlanError: a layout names a rank that does not exist or does not cover its table.
    """
    dealt: dict[tuple[type[Executor], bool], tuple[list[int], dict[str, ParameterSharding]]] = {}
    for index, table in enumerate(tables):
        sharding = shardings[table.name]
        check_layout(table, sharding, world_size)
        served: dict[type[Executor], list[Dataflow]] = {}
        for dataflow in sharding.layout.dataflows:
            served.setdefault(executor_of(dataflow), []).append(dataflow)
        for executor, dataflows in served.items():
            layout = sharding.layout.served_by(dataflows)
            if not rows_of_parts(layout.row_map)[layout.columns.part].any():
                continue  # fewer rows than parts: nothing is ever looked up there
            members, own = dealt.setdefault((executor, table.is_frozen), ([], {}))
            members.append(index)
            own[table.name] = evolve(sharding, layout=layout)
    return dealt
