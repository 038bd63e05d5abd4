"""The engine of sharded collections, shared by all dataflows.

Every rank makes the same calls of a training step in the same order:

1. one header to every rank, for all executors;
2. each executor's payload of ids;
3. each executor's results, back to the ranks that asked;
4. in the backward pass, each executor's gradients, and updates; where the weights of ids are trained, each executor's
   gradients of these between the two.

A rank without ids or blocks sends empty pieces. Exchanged tables of any sharding types make four collectives together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate, compress, pairwise
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from torch import Tensor

from shardwright.contracts.lookup import Lookup
from shardwright.errors import UnsupportedError
from shardwright.planning.layouts.layout import Dataflow
from shardwright.planning.plan.sharding import ParameterSharding
from shardwright.planning.tables.spec import TableSpec
from shardwright.runtime.ranks.devices import sent_to
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.step.arrangement import Arrangement, PooledArrangement, SequenceArrangement
from shardwright.runtime.step.autograd import Anchors
from shardwright.runtime.step.backward.gradient_limits import GradientLimits
from shardwright.runtime.step.backward.kept_gradients import (
    have_gradients,
    lookups_that_keep,
    prefetches,
)
from shardwright.runtime.step.backward.learning_rates import LearningRates
from shardwright.runtime.step.backward.weight_gradients import weights_refusal
from shardwright.runtime.step.batches.inputs import BatchReader, InputChecks
from shardwright.runtime.step.batches.rank_problems import BatchProblem, Status, goes_on, raise_problems
from shardwright.runtime.step.collection import Collection, FeatureBatch
from shardwright.runtime.step.executor import Executor, ExecutorConfig, PeerHeaders, deal
from shardwright.runtime.step.kernel_groups import (
    KernelGroup,
    LookupBuilder,
    build_lookup,
    columns_of,
    is_updated_in_backward,
)
from shardwright.runtime.step.step_events import StepEvents, trained_collection
from shardwright.sparse import WEIGHTS, KeyedJaggedTensor

_STATUSES = {int(status): status for status in Status}
_NUM_FIELDS, _BATCH_SIZE = 4, 1
"""Fields of a header that a rank sends to all ranks alike: a checksum of the calls that it made (see
:class:`shardwright.runtime.ranks.lockstep.Lockstep`); samples of its batch; its status word; and 1 if it trains the
weights of its ids."""


class CollectionEngine:
    """The tables of one collection on one rank.

    Args:
        tables: the tables, in the collection's order; all pooled, or none.
        shardings: each table's part of the plan, by table name.
        executor_of: the executor class of a dataflow.
        env: the ranks.
        device: device of the local blocks.
        is_weighted: ids carry weights.
        checks: the level of checks of each batch.
        before: the engine of the same collection under another plan, whose place among the ranks' calls it takes.
        build_lookup: makes the lookup of a group of local blocks.

    Attributes:
        columns: dtype of each column that batches must have beside their ids, by name: weights if they are weighted,
            and what compute kernels ask for.
        updated_in_backward: description of the first table that a kernel updates in the backward pass; empty if none.
        kept: the lookups that keep gradients for the optimizer's step.
        limits: the largest elements of the outputs' gradients.
        events: events of the collection, for listeners.
        is_trained: for each executor, whether its tables are trained; those of the others are frozen.

    Raises:
        PlanError: the plan names a rank that does not exist or does not cover a table.
        UnsupportedError: a kernel cannot do what the plan asks, with its reason.
    """

    def __init__(
        self,
        tables: Sequence[TableSpec],
        shardings: Mapping[str, ParameterSharding],
        *,
        executor_of: Callable[[Dataflow], type[Executor]],
        env: ShardingEnv,
        device: torch.device,
        is_weighted: bool,
        checks: InputChecks = InputChecks.STANDARD,
        before: CollectionEngine | None = None,
        build_lookup: LookupBuilder = build_lookup,
    ) -> None:
        self.collection = Collection.of(tables)
        self.env, self.device = env, device
        any_id = {i for i, table in enumerate(tables) if shardings[table.name].layout.row_map.takes_any_id}
        refusals = (weights_refusal(table, shardings[table.name]) for table in tables) if is_weighted else ()
        weights = {WEIGHTS: torch.float32} if is_weighted else {}
        self.columns = {**weights, **columns_of(tables, shardings, device)}
        self.reader = BatchReader(
            self.collection,
            columns=self.columns,
            checks=checks,
            any_id=any_id,
            weights_refusal=next(filter(None, refusals), ""),
        )
        shared = (env, device, self.columns, build_lookup)
        dealt = deal(tables, shardings, executor_of, env.world_size)
        self.executors = [
            executor(ExecutorConfig(self.collection, members, {**shardings, **own}, *shared))
            for (executor, _), (members, own) in dealt.items()
        ]
        self.is_trained = [not is_frozen for _, is_frozen in dealt]
        self.lookups: list[Lookup] = [lookup for executor in self.executors for lookup in executor.lookups]
        self.rates = LearningRates(self.lookups)
        self.groups: list[KernelGroup] = [group for executor in self.executors for group in executor.groups]
        self.kept = lookups_that_keep(self.lookups, self.groups)
        arrange = PooledArrangement if self.collection.is_pooled else SequenceArrangement
        brought = [columns for executor in self.executors for columns in executor.brings]
        self.arrangement: Arrangement = arrange(self.collection, brought)
        updated = [table for table in tables if is_updated_in_backward(table, shardings[table.name])]
        self.updated_in_backward = updated[0].describe() if updated else ""
        self.limits = GradientLimits(self.collection, env.world_size)
        has_gradients = partial(have_gradients, self.kept)  # which does not keep the engine
        self.events = StepEvents(trained_collection(tables, updated, has_gradients, device.type))
        # Places of each executor's fields in a header, after those that all ranks get alike.
        edges = accumulate((executor.header_size for executor in self.executors), initial=_NUM_FIELDS)
        self.spans = list(pairwise(places := list(edges)))
        known = None if before is None else before.name
        self.name: str = env.lockstep.join(self.collection.name, places[-1], known)
        self.channel, header_device = env.header_channel
        self.header_device = device if device.type == header_device else torch.device(header_device)
        self.ranks = env.communicator.global_ranks
        self.all_fine = [Status.FINE] * env.world_size
        self._steps: WeakSet[EngineStep] = WeakSet()
        trained = compress(self.executors, self.is_trained)
        parameters = [own for each in trained for lookup in each.lookups for own in lookup.parameters()]
        self.anchors = Anchors(device, parameters)

    def begin(
        self,
        features: KeyedJaggedTensor | None,
        *,
        status: Status = Status.FINE,
        prepare: Callable[[], None] | None = None,
    ) -> EngineStep:
        """Route a batch and start the headers. Only :meth:`EngineStep.send` waits for other ranks.

        Args:
            features: this rank's batch; ``None`` if it has none, and ``status`` says why.
            status: this rank's status word if its batch is fine.
            prepare: function called first; the header tells the other ranks of an error that it raises here.
        """
        step = EngineStep(self, features, status, prepare)
        self._steps.add(step)
        return step

    def unfinished(self) -> str:
        """Reason why its tables cannot be changed now: what is under way; empty if nothing is."""
        if have_gradients(self.kept):
            return "gradients of its tables are kept for optimizer.step(): make it, and call zero_grad()"
        for step in list(self._steps):
            if step.is_begun:
                return (
                    "ids of a batch were sent ahead of its forward pass, as a pipeline does: let the pipeline come to "
                    "the end of its data first; or read by lockstep_batches(..., overlap=False)"
                )
            if step.needs_backward:
                return (
                    "the outputs of a forward pass with gradients still exist, whose backward pass was not made: make "
                    "it, or let go of the outputs and the loss; evaluate in torch.no_grad()"
                )
        return ""


class EngineStep:
    """One batch on its way through the engine; made when its headers are sent.

    Call order: :meth:`send`, :meth:`receive`, :meth:`lookup`, :meth:`promise`, each once.

    Args:
        engine: the collection's engine.
        features, status, prepare: see :meth:`CollectionEngine.begin`.

    Attributes:
        batch: this rank's checked batch.
        statuses: status word of each rank, ``[W]``; empty before :meth:`send`.
        is_begun: mark of exchanges under way that were not looked up.
        needs_backward: mark of a lookup with gradients that did not update yet.

    Raises:
        DistributedError: another rank does not begin a batch.
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
        self._engine, self._status, self.name = engine, status, engine.name
        self._cause: Exception | None = None
        self._training = self._trains_weights = self.needs_backward = False
        self._received: list[Tensor] | None = None
        size = 0
        try:
            if prepare is not None:
                prepare()
            batch = None
            if features is not None or status is Status.FINE:  # else there is none, and the status says why
                batch = self.batch = engine.reader.read(features)
                size = batch.batch_size
                self._trains_weights = batch.trained_weights is not None
            self._executors = [executor.route(batch) for executor in engine.executors]
        except Exception as error:  # becomes a status word: the other ranks wait for this one's header
            self._status = Status.BAD_INPUT if isinstance(error, BatchProblem) else Status.FAILED
            self._cause = error
            self._executors = [executor.route(None) for executor in engine.executors]
        self._trained = self._executors
        if not all(engine.is_trained):
            self._trained = list(compress(self._executors, engine.is_trained))
        self._send_headers(size)
        self.is_begun = True

    def _send_headers(self, batch_size: int) -> None:
        """Start collective 1."""
        engine, lockstep = self._engine, self._engine.env.lockstep
        without = "" if torch.is_grad_enabled() else " without gradients"
        self._call = lockstep.note(f"headers of {engine.name}{without}")
        # All collections' headers have one length, so that a header taken for another collection's is read whole.
        size, world_size = lockstep.header_size, len(engine.ranks)
        rows = np.zeros((world_size, size), dtype=np.int64)
        rows[:, :_NUM_FIELDS] = (lockstep.word, batch_size, self._status, self._trains_weights)
        for executor, (start, stop) in zip(self._executors, engine.spans, strict=True):
            rows[:, start:stop] = executor.headers()
        sent = sent_to(engine.header_device, rows.reshape(-1))
        self._headers, splits = torch.empty_like(sent), [size] * world_size
        self._work = engine.channel.all_to_all(self._headers, sent, splits, splits, label="headers")

    def send(self) -> bool:
        """Wait for the headers and start the payloads.

        Returns:
            True if the batch goes on. False if a rank has no batch or all ranks' data has ended: then nothing is
            under way, and :attr:`statuses` says why.

        Raises:
            InvalidInputError: a rank's batch is wrong; the same text on every rank, and no collective is left waiting.
        """
        self.is_begun = False  # should it not go on
        engine, env = self._engine, self._engine.env
        self._work.wait()
        rows = self._headers.cpu().numpy().reshape(len(engine.ranks), -1)
        del self._work, self._headers
        calls, _, statuses, trained = rows[:, :_NUM_FIELDS].T.tolist()
        env.lockstep.check(calls, self._call, env.communicator)
        self._trains_weights = any(trained)
        self.statuses = [_STATUSES[status] for status in statuses] if any(statuses) else engine.all_fine
        if Status.STOPPED in self.statuses:
            return False
        if self.statuses is not engine.all_fine:  # also in the step in which some rank's data ends
            cause, self._cause = self._cause, None  # whose frames have this step, and what its callers hold
            raise_problems(self.statuses, env.communicator, cause)
            if not goes_on(self.statuses):
                return False
        sizes = rows[:, _BATCH_SIZE].copy()
        for executor, (start, stop) in zip(self._executors, engine.spans, strict=True):
            executor.send(PeerHeaders(sizes, rows[:, start:stop]))
        self.is_begun = True
        return True

    def receive(self) -> list[Tensor]:
        """Wait for the ids, the first time; done by :meth:`lookup` if not before.

        Returns:
            The tensors that the lookup reads. A caller that looks up on another stream records that stream on them.
        """
        if self._received is None:
            self._received = self.batch.tensors
            for executor in self._executors:
                self._received += executor.receive()
        return self._received

    def prefetch(self) -> None:
        """Wait for the ids and have kernels bring their rows near, if some can; else nothing is waited for."""
        if not any(map(prefetches, self._engine.lookups)):
            return
        received = self.receive()
        with torch.no_grad():
            for executor in self._executors:
                received += executor.prefetch()

    def lookup(self) -> None:
        """Wait for the ids, look up all local groups, and start to send the results home."""
        engine, trains_weights = self._engine, self._trains_weights
        trains = torch.is_grad_enabled()
        self._training = self.needs_backward = trains and bool(self._trained or trains_weights)
        self.is_begun = False
        self._rates = engine.rates.now
        if self._training:
            self._number = engine.env.lockstep.gradients.number()
        self.receive()
        self._received = []  # lets go of them
        with torch.no_grad():
            for executor, is_trained in zip(self._executors, engine.is_trained, strict=True):
                executor.lookup(training=trains and is_trained, trains_weights=trains_weights)

    def promise(self) -> Callable[[], list[Tensor]]:
        """Promise the differentiable outputs.

        Returns:
            A function to call once. It waits for the results and arranges them: one tensor ``[B, C]`` for a pooled
            collection, ``[N, D]`` for each output of another; float32.
        """
        if not self._training:  # looked up without gradients: nothing was kept for a backward pass
            return torch.no_grad()(self.arrange)
        anchors = self._engine.anchors
        end = anchors.take(self)
        if self._trains_weights:
            end = anchors.after_weights(end, self, self.batch.trained_weights)
        return partial(anchors.outputs, end, self)

    def arrange(self) -> list[Tensor]:
        """Wait for the results and arrange them as outputs; a backward pass may come if it was announced."""
        if self._training:
            self._engine.env.lockstep.gradients.expect(self._number, self)
        brought = list[Tensor]()
        for executor in self._executors:
            brought += executor.outputs()
        return self._engine.arrangement.outputs(brought, self.batch)

    def gradients_are_there(self, gradients: Sequence[Tensor], end: Any) -> None:
        """Send each rank its gradients, in the order that all ranks keep.

        Args:
            gradients: gradients of the outputs.
            end: autograd node that every whole backward pass reaches.

        Raises:
            UnsupportedError: the pass is ``torch.autograd.grad`` or ``backward(inputs=...)``, and would update tables.
        """
        engine = self._engine
        if engine.updated_in_backward and not torch._C._will_engine_execute_node(end):
            raise UnsupportedError(
                "torch.autograd.grad, or backward(inputs=...), went through the collection of table "
                f"{engine.updated_in_backward}, which is updated in the backward pass: that would be a side effect. "
                "Call backward() on the loss; tables whose gradients are to be had need a compute kernel that shows "
                "them"
            )
        own = engine.arrangement.gradients(engine.limits.clipped(gradients), self.batch)
        engine.env.lockstep.gradients.are_there(self._number, self, partial(self._send_gradients, own))

    def _send_gradients(self, gradients: Sequence[Tensor]) -> None:
        engine, lockstep = self._engine, self._engine.env.lockstep
        lockstep.note(f"gradients of {engine.name}")
        executors = self._executors if self._trains_weights else self._trained
        for executor in executors:  # all are under way before any is waited for
            # Averaged over the ranks, as DistributedDataParallel does.
            executor.send_gradients(gradients, 1.0 / len(engine.ranks))
        if not self._trains_weights:
            return
        # Before the gradients of any other lookup: ranks may differ in whether those are there already.
        lockstep.note(f"gradients of weights of {engine.name}")
        for executor in executors:
            executor.send_weight_gradients()

    def weight_gradients(self) -> Tensor:
        """Wait for the gradients of ids' weights, before rows are updated: ``[N]`` of this rank's batch."""
        self._engine.env.lockstep.gradients.need(self._number)
        found = [executor.weight_gradients(self.batch.values.numel()) for executor in self._executors]
        return torch.stack(found).sum(0)

    def update(self) -> list[Tensor | None]:
        """Wait for gradients; update blocks of fused kernels, and return the gradients of other parameters."""
        engine = self._engine
        engine.env.lockstep.gradients.need(self._number)
        self.needs_backward = False
        engine.events.updates(self)
        later, found = engine.rates.exchanged(self._rates), list[Tensor | None]()
        try:
            for executor in self._trained:
                found += executor.update()
        finally:
            engine.rates.exchanged(later)
        return found
