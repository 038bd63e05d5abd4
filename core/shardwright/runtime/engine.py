"""The engine of sharded collections: what all dataflows share, and the joint with autograd.

A training step, made by every rank in the same order: 1. one header to every rank, for all parts;
2. each part's payload; 3. each part's results home; 4. backward: each part's gradients out, and updates. A rank without
ids or blocks takes part with empty pieces. Exchanged tables alone make four collectives, whatever their types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import DistributedError, InvalidInputError
from shardwright.planning.plan import ParameterSharding
from shardwright.planning.tables import TableSpec
from shardwright.runtime.arrange import Arrangement, PooledArrangement, SequenceArrangement
from shardwright.runtime.collection import Collection, FeatureBatch
from shardwright.runtime.environment import ShardingEnv
from shardwright.runtime.groups import Arrival, Group
from shardwright.runtime.inputs import BatchProblem, BatchReader, Problem, Status
from shardwright.runtime.lookup import Lookup
from shardwright.runtime.part import Part, PartConfig, PartStep, Peer, parameters_of
from shardwright.sparse import KeyedJaggedTensor

_FIXED_FIELDS = 5  # batch size, status, feature, value, position


class CollectionEngine:
    """Runs all tables of one collection on one rank.

    Args:
        tables: the tables, in the collection's order; all pooled, or none.
        shardings: how each is sharded, by name.
        env: the ranks.
        device: where the local blocks live.
        is_weighted: ids carry weights.

    Raises:
        PlanError: the plan names a rank that does not exist or does not cover a table.
        UnsupportedError: a kernel cannot do what the plan asks, with its reason.
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        shardings: Mapping[str, ParameterSharding],
        *,
        env: ShardingEnv,
        device: torch.device,
        is_weighted: bool,
    ) -> None:
        self.collection = Collection.of(tables)
        self.env, self.device = env, device
        self.reader = BatchReader(self.collection, is_weighted=is_weighted)
        members: dict[type[Part], list[int]] = {}
        for index, table in enumerate(tables):
            members.setdefault(shardings[table.name].layout.dataflow.part(), []).append(index)
        self.parts = [
            part(PartConfig(self.collection, own, shardings, env, device, is_weighted))
            for part, own in members.items()
        ]
        self.lookups: list[Lookup] = [lookup for part in self.parts for lookup in part.lookups]
        self.groups: list[Group] = [group for part in self.parts for group in part.groups]
        arrange = PooledArrangement if self.collection.is_pooled else SequenceArrangement
        arrivals = [arrival for part in self.parts for arrival in part.arrivals]
        self.arrangement: Arrangement = arrange(
            self.collection, arrivals, gradient_scale=1.0 / env.world_size
        )

    def start(self, features: KeyedJaggedTensor, *, prepare: Callable[[], None] | None = None) -> EngineStep:
        """Route a batch, exchange headers, and start the payloads.

        Args:
            features: this rank's batch.
            prepare: called first; what it raises here, the other ranks learn from the header.

        Raises:
            InvalidInputError: a rank's batch is wrong; the same text on every rank, and nothing is left under way.
        """
        return EngineStep(self, features, prepare)


class EngineStep:
    """One batch on its way through the engine: :meth:`lookup`, then :meth:`finish`, each called once.

    Attributes:
        batch: what was asked for.
    """

    batch: FeatureBatch

    def __init__(
        self, engine: CollectionEngine, features: KeyedJaggedTensor, prepare: Callable[[], None] | None
    ) -> None:
        self._engine = engine
        self._training = torch.is_grad_enabled()
        batch, problem, cause = _read(engine.reader, features, prepare)
        self._parts, problem, cause = _route(engine.parts, batch, problem, cause)
        peers = self._exchange_headers(batch, problem, cause)
        assert batch is not None  # else the headers raised
        self.batch = batch
        for part, own in zip(self._parts, peers, strict=True):
            part.send(own)

    def _exchange_headers(
        self, batch: FeatureBatch | None, problem: Problem, cause: Exception | None
    ) -> list[list[Peer]]:
        """Collective 1. Raises what any rank has to say against its batch, on all of them."""
        env, sizes = self._engine.env, [part.header_size for part in self._engine.parts]
        fixed = [
            batch.batch_size if batch is not None else 0,
            int(problem.status),
            problem.feature,
            problem.value,
            problem.position,
        ]
        by_part = [part.headers() for part in self._parts]
        rows = [
            [*fixed, *(field for part in by_part for field in part[rank])] for rank in range(env.world_size)
        ]
        sent = torch.tensor(rows, dtype=torch.int64).view(-1).to(self._engine.device)
        received = torch.empty_like(sent)
        size = _FIXED_FIELDS + sum(sizes)
        splits = [size] * env.world_size
        env.communicator.all_to_all(received, sent, splits, splits, label="headers").wait()
        headers: list[list[int]] = received.view(env.world_size, size).tolist()
        self._complain(headers, problem, cause)
        return [
            [Peer(header[0], header[stop - own : stop]) for header in headers]
            for own, stop in zip(sizes, _stops(sizes), strict=True)
        ]

    def _complain(self, headers: list[list[int]], problem: Problem, cause: Exception | None) -> None:
        problems = [Problem(Status(header[1]), *header[2:_FIXED_FIELDS]) for header in headers]
        complaints = [
            other.message(self._engine.collection, rank)
            for rank, other in enumerate(problems)
            if other.status is not Status.FINE
        ]
        if cause is not None and problem.status is Status.FAILED:
            raise cause
        if complaints:
            failed = any(other.status is Status.FAILED for other in problems)
            raise (DistributedError if failed else InvalidInputError)("; ".join(complaints))

    def lookup(self) -> None:
        """Wait for the ids, look up all local groups, and start to send the results home."""
        with torch.no_grad():
            for part in self._parts:
                part.lookup(training=self._training)

    def finish(self) -> tuple[Tensor, ...]:
        """Wait for the results and arrange them, differentiable.

        Returns:
            One tensor ``[B, C]`` for a pooled collection, ``[N, D]`` for each output of another; float32.
        """
        if not self._training:  # started without gradients: nothing was kept for a backward pass
            with torch.no_grad():
                return self.arrange()
        # The token makes the outputs differentiable on a rank that owns no block: backward needs all ranks.
        token = torch.zeros((), requires_grad=True)
        outputs: tuple[Tensor, ...] = _Finish.apply(self, token, *parameters_of(self._engine.lookups))
        return outputs

    def arrange(self) -> tuple[Tensor, ...]:
        """The outputs' values, waited for."""
        views = [view for part in self._parts for view in part.views()]
        places = [
            step.place_of(arrival)
            for part, step in zip(self._engine.parts, self._parts, strict=True)
            for arrival in part.arrivals
        ]
        return self._engine.arrangement.outputs(views, places, self.batch)

    def backward(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Send each rank its gradients; update fused blocks, return the gradients of the others."""
        arrangement = self._engine.arrangement
        scaled = arrangement.scaled(gradients, self.batch)

        def gradient_of(part: PartStep, arrival: Arrival) -> Tensor:
            return arrangement.gradient(scaled, arrival, part.place_of(arrival))

        return [gradient for part in self._parts for gradient in part.backward(partial(gradient_of, part))]


class _Finish(torch.autograd.Function):
    """Joins a step to autograd: forward waits and arranges, backward sends gradients and updates."""

    @staticmethod
    def forward(ctx: Any, step: EngineStep, token: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.step = step
        ctx.save_for_backward(token)  # so that autograd refuses a second backward pass, as it does unsharded
        return step.arrange()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _ = ctx.saved_tensors  # raises if the graph was freed: fused kernels must not update twice
        return None, None, *ctx.step.backward(gradients)


def _read(
    reader: BatchReader, features: KeyedJaggedTensor, prepare: Callable[[], None] | None
) -> tuple[FeatureBatch | None, Problem, Exception | None]:
    """Read a batch; whatever goes wrong becomes a status, since the other ranks wait for this one's header."""
    try:
        if prepare is not None:
            prepare()
        return reader.read(features), Problem(Status.FINE), None
    except BatchProblem as error:
        return None, error.problem, None
    except Exception as error:
        return None, Problem(Status.FAILED), error


def _route(
    parts: Sequence[Part], batch: FeatureBatch | None, problem: Problem, cause: Exception | None
) -> tuple[list[PartStep], Problem, Exception | None]:
    """Route a batch through all parts; a failure becomes a status, as in :func:`_read`."""
    try:
        return [part.route(batch) for part in parts], problem, cause
    except Exception as error:
        return [part.route(None) for part in parts], Problem(Status.FAILED), error


def _stops(sizes: Sequence[int]) -> list[int]:
    """Where each part's fields end in a header."""
    stops, reached = [], _FIXED_FIELDS
    for size in sizes:
        reached += size
        stops.append(reached)
    return stops
