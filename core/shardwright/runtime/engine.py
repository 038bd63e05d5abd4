"""The engine of sharded collections: what all dataflows share, and the joint with autograd.

A training step, made by every rank in the same order: 1. one header to every rank, for all parts;
2. each part's payload; 3. each part's results home; 4. backward: each part's gradients out, and updates. A rank without
ids or blocks takes part with empty pieces. Exchanged tables alone make four collectives, whatever their types.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from attrs import evolve
from torch import Tensor

from shardwright.errors import UnsupportedError
from shardwright.planning.layouts import Dataflow
from shardwright.planning.plan import ParameterSharding
from shardwright.planning.tables import TableSpec
from shardwright.runtime.arrange import ArrangedGradients, Arrangement, PooledArrangement, SequenceArrangement
from shardwright.runtime.collection import Collection, FeatureBatch
from shardwright.runtime.compiling import untraced
from shardwright.runtime.complaints import Complaint, complain
from shardwright.runtime.environment import ShardingEnv
from shardwright.runtime.groups import Group, check_layout, is_updated_in_backward
from shardwright.runtime.inputs import BatchProblem, BatchReader, InputChecks, Status, goes_on
from shardwright.runtime.learning_rates import LearningRates
from shardwright.runtime.lookup import Lookup
from shardwright.runtime.open_steps import OpenSteps
from shardwright.runtime.part import Part, PartConfig, PartStep, Peer, parameters_of
from shardwright.runtime.scaled_losses import FUSED_REFUSAL, PARTED_REFUSAL
from shardwright.sparse import KeyedJaggedTensor

_FIXED_FIELDS = 5  # collection, checksum of calls, batch size, status, number of what is not looked at


class CollectionEngine:
    """Runs all tables of one collection on one rank.

    Args:
        tables: the tables, in the collection's order; all pooled, or none.
        shardings: how each is sharded, by name.
        env: the ranks.
        device: where the local blocks live.
        is_weighted: ids carry weights.
        checks: how closely batches are looked at.

    Attributes:
        updated_in_backward: the first table that is, on any rank; empty if none is.
        scaling_refusal: why its tables cannot be trained with scaled gradients; empty if they can.

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
        checks: InputChecks = InputChecks.STANDARD,
    ) -> None:
        self.collection = Collection.of(tables)
        self.env, self.device = env, device
        any_id = {i for i, table in enumerate(tables) if shardings[table.name].layout.row_map.takes_any_id}
        self.reader = BatchReader(self.collection, is_weighted=is_weighted, checks=checks, any_id=any_id)
        self.parts = [
            part(PartConfig(self.collection, members, {**shardings, **own}, env, device, is_weighted))
            for part, (members, own) in _deal(tables, shardings, env.world_size).items()
        ]
        self.lookups: list[Lookup] = [lookup for part in self.parts for lookup in part.lookups]
        self.rates = LearningRates(self.lookups)
        self.groups: list[Group] = [group for part in self.parts for group in part.groups]
        arrange = PooledArrangement if self.collection.is_pooled else SequenceArrangement
        arrivals = [arrival for part in self.parts for arrival in part.arrivals]
        self.arrangement: Arrangement = arrange(
            self.collection, arrivals, gradient_scale=1.0 / env.world_size
        )
        updated = [table for table in tables if is_updated_in_backward(table, shardings[table.name])]
        self.updated_in_backward = updated[0].describe() if updated else ""
        self.scaling_refusal = _scaling_refusal(tables, shardings, env.world_size)
        self.header_size = _FIXED_FIELDS + sum(part.header_size for part in self.parts)
        self.number = env.lockstep.join(self.collection.name, self.header_size)
        self.open_steps = OpenSteps(env, self.number)

    def begin(
        self,
        features: KeyedJaggedTensor | None,
        *,
        status: Status = Status.FINE,
        prepare: Callable[[], None] | None = None,
    ) -> EngineStep:
        """Route a batch and start the headers, without waiting for anybody: :meth:`EngineStep.send` does.

        Args:
            features: this rank's batch; ``None`` where it has none, and ``status`` says why.
            status: this rank's status word if its batch is fine.
            prepare: called first; what it raises here, the other ranks learn from the header.
        """
        return EngineStep(self, features, status, prepare)


def _scaling_refusal(
    tables: Sequence[TableSpec], shardings: Mapping[str, ParameterSharding], world_size: int
) -> str:
    """Why the tables cannot be trained with scaled gradients; empty if they can."""
    for table in tables:
        sharding = shardings[table.name]
        if is_updated_in_backward(table, sharding):
            return f"Table {table.describe()}: {FUSED_REFUSAL}"
        if world_size > 1 and not sharding.layout.is_replicated:
            return f"Table {table.describe()}: {PARTED_REFUSAL}"
    return ""


def _deal(
    tables: Sequence[TableSpec], shardings: Mapping[str, ParameterSharding], world_size: int
) -> dict[type[Part], tuple[list[int], dict[str, ParameterSharding]]]:
    """The tables of each part, by index; and, by name, how each is sharded, with the blocks that the part serves.

    Raises:
        PlanError: a layout names a rank that does not exist or does not cover its table.
    """
    dealt: dict[type[Part], tuple[list[int], dict[str, ParameterSharding]]] = {}
    for index, table in enumerate(tables):
        sharding = shardings[table.name]
        check_layout(table, sharding, world_size)
        served: dict[type[Part], list[Dataflow]] = {}
        for dataflow in sharding.layout.dataflows:
            served.setdefault(dataflow.part(), []).append(dataflow)
        for part, dataflows in served.items():
            members, own = dealt.setdefault(part, ([], {}))
            members.append(index)
            own[table.name] = evolve(sharding, layout=sharding.layout.served_by(dataflows))
    return dealt


class EngineStep:
    """One batch on its way through the engine.

    After it is begun: :meth:`send`, :meth:`receive`, :meth:`lookup` and :meth:`promise`, each called once. Every rank
    begins, sends, looks up and goes back in the same order, but may do other things between.

    Attributes:
        batch: what was asked for.
        statuses: what each rank says of its batch, known once sent; none before.
        scaling_refusal: why a loss of its outputs cannot be scaled; empty if it can.
    """

    batch: FeatureBatch
    statuses: Sequence[Status] = ()

    def __init__(
        self,
        engine: CollectionEngine,
        features: KeyedJaggedTensor | None,
        status: Status,
        prepare: Callable[[], None] | None,
    ) -> None:
        self._engine, self.scaling_refusal = engine, engine.scaling_refusal
        batch, self._status, self._cause = _read(engine.reader, features, status, prepare)
        self._parts, self._status, self._cause = _route(engine.parts, batch, self._status, self._cause)
        self._extras, extra_word = None, 0
        if batch is not None and features is not None:
            self.batch = batch
            self._extras, extra_word = engine.reader.extras(features)
        engine.open_steps.begin()
        self._start_headers(batch.batch_size if batch is not None else 0, extra_word)
        self._received = False

    def _start_headers(self, batch_size: int, extra_word: int) -> None:
        """Collective 1, started."""
        env, number = self._engine.env, self._engine.number
        env.lockstep.note("headers", number)
        words = env.lockstep.words(number, with_gradients=torch.is_grad_enabled())
        fixed = [*words, batch_size, int(self._status), extra_word]
        by_part = [part.headers() for part in self._parts]
        # As long as any collection's, so that one that is taken for another's is read to its end.
        unused = [0] * (env.lockstep.header_size - self._engine.header_size)
        rows = [
            [*fixed, *(field for part in by_part for field in part[rank]), *unused]
            for rank in range(env.world_size)
        ]
        # By numpy, which takes a third of torch's time to make a tensor of lists.
        sent = _sent_to(self._engine.device, torch.from_numpy(np.array(rows, dtype=np.int64).reshape(-1)))
        self._headers = torch.empty_like(sent)
        splits = [len(rows[0])] * env.world_size
        self._work = env.communicator.all_to_all(self._headers, sent, splits, splits, label="headers")

    def send(self) -> bool:
        """Wait for the headers and start the payloads.

        Returns:
            Whether the batch goes on; if not, since a rank has none or all have come to their end, nothing is under
            way, and :attr:`statuses` says why.

        Raises:
            InvalidInputError: a rank's batch is wrong; the same text on every rank, and nothing is left under way.
        """
        headers = self._read_headers()
        self.statuses = [Status(header[3]) for header in headers]
        if Status.STOPPED in self.statuses:
            return False
        self._complain(headers)  # also in the step in which some rank's data ends
        if not goes_on(self.statuses):
            return False
        sizes = [part.header_size for part in self._engine.parts]
        for part, own, stop in zip(self._parts, sizes, _stops(sizes), strict=True):
            part.send([Peer(header[2], header[stop - own : stop]) for header in headers])
        return True

    def _read_headers(self) -> list[list[int]]:
        """Collective 1, waited for."""
        self._work.wait()
        headers: list[list[int]] = self._headers.view(self._engine.env.world_size, -1).tolist()
        del self._work, self._headers
        self._engine.env.lockstep.check_collections([header[0] for header in headers])
        return headers

    def _complain(self, headers: list[list[int]]) -> None:
        """Raise what any rank has to say against its batch, on all of them."""
        env = self._engine.env
        if goes_on(self.statuses):
            env.lockstep.check_calls([header[1] for header in headers], env.communicator)
        own = Complaint.of(self._cause, self._extras)
        try:
            complain(self.statuses, [header[4] for header in headers], env.communicator, own)
        except Exception:
            if self._cause is not None and self._status is Status.FAILED:
                raise self._cause from None  # here it says more than its text
            raise

    def receive(self) -> list[Tensor]:
        """Wait for the ids; done by :meth:`lookup` if not before.

        Returns:
            The tensors that are read from now on: who looks up on another stream records it there.
        """
        self._received = True
        received = [tensor for part in self._parts for tensor in part.receive()]
        return [*received, self.batch.lengths, *self.batch.ids, *(self.batch.weights or ())]

    def lookup(self) -> None:
        """Wait for the ids, look up all local groups, and start to send the results home."""
        self._training = torch.is_grad_enabled()
        self._rates = self._engine.rates.now
        if self._training:
            self._engine.open_steps.forward()
        if not self._received:
            self.receive()
        with torch.no_grad():
            for part in self._parts:
                part.lookup(training=self._training)

    def promise(self) -> Callable[[], tuple[Tensor, ...]]:
        """The outputs, differentiable.

        Their place in the backward pass is taken now, not when they are waited for: ranks may wait for collections in
        different orders, but must exchange gradients in one.

        Returns:
            A function to call once, which waits for the results and arranges them: one tensor ``[B, C]`` for a pooled
            collection, ``[N, D]`` for each output of another; float32.
        """
        if not self._training:  # looked up without gradients: nothing was kept for a backward pass
            return self._arrange
        # The token makes the outputs differentiable on a rank that owns no block: backward needs all ranks.
        token = torch.zeros((), requires_grad=True)
        outputs: tuple[Tensor, ...] = _Outputs.apply(self, token, *parameters_of(self._engine.lookups))

        def fulfil() -> tuple[Tensor, ...]:
            for output, values in zip(outputs, self._arrange(), strict=True):
                output.data = values
            return outputs

        return fulfil

    @torch.no_grad()
    def _arrange(self) -> tuple[Tensor, ...]:
        """The outputs' values, waited for."""
        views = [view for part in self._parts for view in part.views()]
        places = [
            step.place_of(arrival)
            for part, step in zip(self._engine.parts, self._parts, strict=True)
            for arrival in part.arrivals
        ]
        return self._engine.arrangement.outputs(views, places, self.batch)

    def outputs_to_come(self) -> tuple[Tensor, ...]:
        """The outputs' shapes, with no memory behind them."""
        shapes = self._engine.arrangement.shapes(self.batch)
        device = self._engine.device
        return tuple(
            torch.empty_strided(shape, (0,) * len(shape), dtype=torch.float32, device=device)
            for shape in shapes
        )

    def check_pass(self, end: Any) -> None:
        """Check that the backward pass under way is a whole one, where tables are updated in it.

        Args:
            end: a node that every whole backward pass comes to.

        Raises:
            UnsupportedError: it is ``torch.autograd.grad``, or ``backward(inputs=...)``.
        """
        table = self._engine.updated_in_backward
        if table and not torch._C._will_engine_execute_node(end):
            raise UnsupportedError(
                f"torch.autograd.grad, or backward(inputs=...), went through the collection of table {table}, which is "
                "updated in the backward pass: that would be a side effect. Call backward() on the loss; tables whose "
                "gradients are to be had need a compute kernel that shows them"
            )

    def backward(self, gradients: Sequence[Tensor]) -> list[Tensor | None]:
        """Send each rank its gradients; update fused blocks, return the gradients of the others."""
        self._engine.open_steps.backward()
        arrangement = self._engine.arrangement
        divided = arrangement.divided(gradients, self.batch)
        self._engine.env.lockstep.note("gradients", self._engine.number)
        for part in self._parts:  # all are under way before any is waited for
            part.send_gradients(ArrangedGradients(arrangement, divided, part.place_of))
        with self._engine.rates.held(self._rates):
            return [gradient for part in self._parts for gradient in part.update()]


class _Outputs(torch.autograd.Function):
    """Joins a step to autograd: forward makes outputs without values, backward sends gradients and updates."""

    @staticmethod
    def forward(ctx: Any, step: EngineStep, token: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        ctx.step, ctx.scaling_refusal = step, step.scaling_refusal
        ctx.save_for_backward(token)  # so that autograd refuses a second backward pass, as it does unsharded
        return step.outputs_to_come()

    @staticmethod
    @untraced  # a compiled training step would go into it
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _ = ctx.saved_tensors  # raises if the graph was freed: fused kernels must not update twice
        step: EngineStep = ctx.step
        step.check_pass(ctx.next_functions[0][0])  # the token's end
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            del ctx.step  # a loss that is kept keeps this node, which is not to keep the batch
        return None, None, *step.backward(gradients)


def _sent_to(device: torch.device, values: Tensor) -> Tensor:
    """Host values on a device; from page-locked memory, so that the host does not wait for the device's stream."""
    return values if device.type == "cpu" else values.pin_memory().to(device, non_blocking=True)


def _read(
    reader: BatchReader,
    features: KeyedJaggedTensor | None,
    status: Status,
    prepare: Callable[[], None] | None,
) -> tuple[FeatureBatch | None, Status, Exception | None]:
    """Read a batch; whatever goes wrong becomes a status, since the other ranks wait for this one's header."""
    try:
        if prepare is not None:
            prepare()
        if features is None and status is not Status.FINE:  # it has none, and the status says why
            return None, status, None
        return reader.read(features), status, None
    except BatchProblem as error:
        return None, Status.BAD_INPUT, error
    except Exception as error:
        return None, Status.FAILED, error


def _route(
    parts: Sequence[Part], batch: FeatureBatch | None, status: Status, cause: Exception | None
) -> tuple[list[PartStep], Status, Exception | None]:
    """Route a batch through all parts; a failure becomes a status, as in :func:`_read`."""
    try:
        return [part.route(batch) for part in parts], status, cause
    except Exception as error:
        return [part.route(None) for part in parts], Status.FAILED, error


def _stops(sizes: Sequence[int]) -> list[int]:
    """Where each part's fields end in a header."""
    stops, reached = [], _FIXED_FIELDS
    for size in sizes:
        reached += size
        stops.append(reached)
    return stops
