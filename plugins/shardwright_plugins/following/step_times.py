"""Times of real steps: phases of each rank, and lookups and updates of each kernel group.

Clocks stand around public calls of sharded collections, around the steps that these return, and around the lookups of
kernels. Nothing is exchanged before somebody asks for the times of all ranks.

Legend: N steps, G kernel groups.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from attrs import asdict, evolve

from shardwright.arguments import PositiveInt, brief, check
from shardwright.errors import InvalidInputError, PlanError, UnsupportedError
from shardwright.planning.arrays import Floats
from shardwright_plugins.following.clocks import LOOKUP, UPDATE, KernelClock, Wrapped
from shardwright_plugins.following.times import (
    KERNEL_PHASES,
    PHASES,
    GroupTimes,
    MeasuredTimes,
    RankTimes,
    placement_of,
)

if TYPE_CHECKING:
    from shardwright.runtime.sharded.collections.sharded_collection import ShardedCollection
    from shardwright.runtime.sharded.models.model_parallel import DistributedModelParallel

_KEPT = 1000  # steps, so that memory is bounded
_EVERY = 100
_IN, _OUT, _BACK, _END, _LATE = range(5)
"""Parts of a step: ids and lookups, results, gradients, updates with waits for gradients, kernels in that."""
_PARTS = 5
_OF_STEP = {"arrange": _OUT, "gradients_are_there": _BACK}


def check_model(owner: str, model: Any) -> None:
    """Check that a model is sharded.

    Raises:
        InvalidInputError: it is none of ours.
    """
    from shardwright.runtime.sharded.models.model_parallel import DistributedModelParallel

    if not isinstance(model, DistributedModelParallel):
        raise InvalidInputError(
            f"{owner} takes a DistributedModelParallel, got a {type(model).__name__}: give what is wrapped"
        )


class StepTimes:
    """Collects the times of training steps; a context, or :meth:`start` and :meth:`stop`.

    A step is what lies between two lookups of which the first was followed by a backward pass; of accumulated batches
    each is one. Lookups under ``torch.no_grad()``, as in evaluation, are left out. Times are those of the host's clock,
    so only models on CPUs are measured. Of several sharding groups each has its own times.

    Args:
        model: the sharded model.
        writer: object with ``add_scalar(name, value, step)``, such as TensorBoard's ``SummaryWriter``; each rank
            that has one writes its own times.
        every: steps from one writing to the next; 100 by default.

    Raises:
        UnsupportedError: the model is not on CPUs.
        InvalidInputError: ``every`` is below 1 or without a writer, the writer writes no scalars, or the model is no
            :class:`DistributedModelParallel`.

    Example:
        >>> import shardwright as sw
        >>> from shardwright_plugins.following import StepTimes
        >>> table = sw.EmbeddingBagConfig(
        ...     num_embeddings=1000, embedding_dim=8, name="user_id", feature_names=["user"]
        ... )
        >>> bags = sw.EmbeddingBagCollection([table], device="meta")
        >>> model = sw.DistributedModelParallel(bags, env=sw.ShardingEnv.local(device_type="cpu"))
        >>> batch = sw.KeyedJaggedTensor.from_lists({"user": [[7, 8], [], [9]]})
        >>> with StepTimes(model) as times:
        ...     for _ in range(3):
        ...         model(batch).values().sum().backward()
        >>> found = times.gather()
        >>> found.num_steps, [group.tables for group in found.ranks[0].groups]
        (3, [('user_id',)])
    """

    def __init__(
        self, model: DistributedModelParallel, *, writer: Any = None, every: int | None = None
    ) -> None:
        check_model("StepTimes", model)
        if writer is not None and not callable(getattr(writer, "add_scalar", None)):
            raise InvalidInputError(
                f"writer must have add_scalar(name, value, step), as TensorBoard's SummaryWriter; got {brief(writer)}"
            )
        if model.device.type != "cpu":
            raise UnsupportedError(
                f"StepTimes measures by the host's clock, and this model is on {model.device}: use torch.profiler there"
            )
        check("every", every, PositiveInt | None)
        if every is not None and writer is None:
            raise InvalidInputError(
                f"every={every} says how often a writer gets the times, and there is none: give StepTimes(writer=...), "
                "or leave every out; gather() has the medians of all steps"
            )
        self._model, self._writer, self._every = model, writer, every or _EVERY
        self._clocks: list[_CollectionClock] = []
        self._steps: deque[list[float]] = deque(maxlen=_KEPT)
        self.num_steps = 0
        self._began = 0.0
        self._has_updated = False

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Begin to measure, from the next lookup on.

        Raises:
            InvalidInputError: the model is measured already.
        """
        from shardwright.runtime.sharded.collections.sharded_collection import ShardedCollection

        self.stop()
        collections = [module for module in self._model.modules() if isinstance(module, ShardedCollection)]
        if any("input_dist" in vars(collection) for collection in collections):
            raise InvalidInputError(
                "another StepTimes measures this model: stop() it first; a Replanner has its own as `times`"
            )
        self._clocks = [_CollectionClock(collection, self) for collection in collections]
        self.reset()

    def stop(self) -> None:
        """End the last step, and leave the model as it was."""
        self._end_step()
        for clock in self._clocks:
            clock.stop()

    def reset(self) -> None:
        """Forget the times of all steps."""
        self._steps.clear()
        self.num_steps, self._began, self._has_updated = 0, 0.0, False

    def looks_up(self, *, trains: bool) -> None:
        """Hear that a collection begins a batch; after an update, that is a new step, if gradients are to come."""
        if self._has_updated or not self._began:
            self._end_step()
            for clock in self._clocks:
                clock.begin()
            self._began = time.perf_counter() if trains else 0.0

    def updated(self) -> None:
        """Hear that tables were updated."""
        self._has_updated = True

    def _end_step(self) -> None:
        if not self._has_updated:
            return
        row = [time.perf_counter() - self._began]
        for clock in self._clocks:
            row += clock.spent
            row += clock.kernels.spent
        self._steps.append(row)
        self.num_steps, self._has_updated = self.num_steps + 1, False
        if self._writer is not None and self.num_steps % self._every == 0:
            self._write_scalars()

    def of_rank(self, last: int = _KEPT) -> RankTimes:
        """Medians of this rank.

        Args:
            last: number of the last steps to take; the last 1000 are kept.

        Raises:
            InvalidInputError: no step was measured.
        """
        steps = list(self._steps)[-last:]
        if not steps:
            raise InvalidInputError("no training step was measured: make some between start() and stop()")
        columns = 1e3 * np.array(steps).T
        phases, groups, first = np.zeros((len(PHASES), len(steps))), list[GroupTimes](), 1
        for clock in self._clocks:
            middle, end = first + _PARTS, first + _PARTS + len(clock.kernels.spent)
            phases += _phases(columns[first:middle], columns[middle:end])
            kernels = iter(_medians(columns[middle:end]))
            groups += [
                GroupTimes(tables, kernel, {phase: next(kernels) for phase in KERNEL_PHASES}, update)
                for tables, kernel, update in clock.groups
            ]
            first = end
        step_ms, *of_phases = _medians([columns[0], *phases])
        return RankTimes(step_ms, dict(zip(PHASES, of_phases, strict=True)), tuple(groups))

    def gather(self) -> MeasuredTimes:
        """Medians of the plan's ranks, and its prediction; a collective, every rank makes this call.

        Raises:
            InvalidInputError: a rank measured no step; the same on every rank.
        """
        env, plan = self._model.env, self._model.plan
        with env.everyone.together("gathering times of steps"):
            own = self.of_rank()
            env.everyone.agree("times of steps")
            times = MeasuredTimes(
                self.num_steps, env.communicator.all_gather_objects(own), placement_of(plan)
            )
        return evolve(times, predicted=self._predicted())

    def write(self, path: str | Path) -> None:
        """Write the times of all ranks as JSON, on rank 0; a collective, every rank makes this call.

        ``shardwright explain plan.json --measured FILE`` compares them with a plan.

        Raises:
            InvalidInputError: a rank measured no step, or the file cannot be written; the same on every rank.
        """
        from shardwright.cli.plans import write_text

        times, everyone = self.gather(), self._model.env.everyone
        with everyone.together("writing times of steps"):
            if everyone.rank == 0:
                write_text(Path(path), times.to_json())

    def _predicted(self) -> dict[str, Any] | None:
        from shardwright_plugins.following.predicted import Prices

        try:
            predicted = Prices.by(self._model.plan).of(self._model.plan)
        except PlanError:
            return None
        return None if predicted is None else asdict(predicted)

    def _write_scalars(self) -> None:
        own, where = self.of_rank(self._every), f"rank {self._model.env.everyone.rank}"
        for name, value in {"step": own.step_ms, **own.phases_ms}.items():
            self._writer.add_scalar(f"{where}/{name} ms", value, self.num_steps)
        for group in own.groups:
            for name, value in group.phases_ms.items():
                self._writer.add_scalar(f"{where}/{group.tables[0]}, .../{name} ms", value, self.num_steps)


class _CollectionClock:
    """The clock of one collection: seconds of the parts of a step, and of its kernels."""

    def __init__(self, collection: ShardedCollection, times: StepTimes) -> None:
        self._collection, self._times, self.spent = collection, times, [0.0] * _PARTS
        self._wrapped = Wrapped()
        self._wrapped.put(collection, "input_dist", self._input_dist(collection.input_dist))
        self._wrapped.put(collection, "compute", self._timed(collection.compute, _IN))
        self._take_engine()

    def _take_engine(self) -> None:
        from shardwright.runtime.step.backward.kept_gradients import is_kept

        self._engine = self._collection.engine
        self.kernels = KernelClock(self._engine.lookups)
        self.kernels.around("apply", self._applied)
        self.groups = [
            (
                tuple(dict.fromkeys(spec.table.path for spec in group.blocks)),
                group.kernel_name,
                "in_step" if is_kept(group) else "in_backward",
            )
            for group in self._engine.groups
        ]
        self.begin()

    def begin(self) -> None:
        """Begin at 0."""
        self.spent[:] = [0.0] * _PARTS
        self.kernels.start()

    def stop(self) -> None:
        """Leave the collection alone."""
        self._wrapped.undo()
        self.kernels.stop()

    def _timed(self, inner: Callable[..., Any], part: int) -> Callable[..., Any]:
        clock, spent = time.perf_counter, self.spent

        def call(*args: Any) -> Any:
            start = clock()
            try:
                return inner(*args)
            finally:
                spent[part] += clock() - start

        return call

    def _input_dist(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        import torch

        def call(features: Any) -> Any:
            if self._collection.engine is not self._engine:  # resharded: groups are others
                self.kernels.stop()
                self._take_engine()
                self._times.reset()
            self._times.looks_up(trains=torch.is_grad_enabled())
            start = time.perf_counter()
            step = inner(features)
            self.spent[_IN] += time.perf_counter() - start
            step.clock, step.__class__ = self, _timed_class(step.__class__)
            return step

        return call

    def _applied(self, group: int, inner: Callable[[], Any]) -> Callable[[], Any]:
        """The update of a kernel group in the optimizer's step, after the backward pass."""

        def call() -> Any:
            start = time.perf_counter()
            try:
                return inner()
            finally:
                seconds = time.perf_counter() - start
                self.kernels.spent[2 * group + UPDATE] += seconds
                self.spent[_END] += seconds
                self.spent[_LATE] += seconds

        return call

    def updates(self, seconds: float, before: float) -> None:
        """Count seconds of an update, before which kernels had spent so many on updates."""
        self.spent[_END] += seconds
        self.spent[_LATE] += self.kernels.total(UPDATE) - before
        self._times.updated()


def _phases(spent: Floats, kernels: Floats) -> Floats:
    """Times of :data:`PHASES` from those of a collection's parts and of its kernels: ``[phases, N]``."""
    lookup, update = kernels[LOOKUP::2].sum(axis=0), kernels[UPDATE::2].sum(axis=0)
    # Kernels look up, and prepare updates ahead, in the first part; they update in the last.
    ahead, exchanged_back = update - spent[_LATE], spent[_BACK] + spent[_END] - spent[_LATE]
    phases: Floats = np.array([spent[_IN] - lookup - ahead, lookup, spent[_OUT], exchanged_back, update])
    return np.maximum(phases, 0.0)


def _medians(times: Any) -> list[float]:
    medians: list[float] = np.median(times, axis=1).round(5).tolist() if len(times) else []
    return medians


@cache
def _timed_class(kind: Any) -> type:
    """A class of steps whose calls in the backward pass and at the outputs tell their clock how long they take.

    A function in place of a step's own method would have to hold the step, which would then hold itself.
    """

    def timed(name: str, part: int) -> Callable[..., Any]:
        inner = getattr(kind, name)

        def call(self: Any, *args: Any) -> Any:
            start = time.perf_counter()
            try:
                return inner(self, *args)
            finally:
                self.clock.spent[part] += time.perf_counter() - start

        return call

    def update(self: Any) -> Any:
        start, before = time.perf_counter(), self.clock.kernels.total(UPDATE)
        try:
            return kind.update(self)
        finally:
            self.clock.updates(time.perf_counter() - start, before)

    methods = {name: timed(name, part) for name, part in _OF_STEP.items()}
    return type(f"Timed{kind.__name__}", (kind,), {**methods, "update": update})
