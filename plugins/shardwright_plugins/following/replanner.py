"""A plan that follows its data: sought in the background near the present one, taken where it is worth its moves."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import warnings
import weakref
from typing import IO, TYPE_CHECKING, Any, Self

from attrs import frozen

from shardwright.arguments import NonNegativeFloat, PositiveInt, checked
from shardwright.errors import InvalidInputError, PlanError, UnsupportedError
from shardwright_plugins.following.statistics import Counts, IdCounts, ids_per_bag
from shardwright_plugins.following.step_times import StepTimes, check_model
from shardwright_plugins.following.times import MeasuredTimes

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from shardwright.runtime.sharded.models.model_parallel import DistributedModelParallel

_SAMPLES, _POLLS = 50, 50
"""Batches that are counted between two looks, and questions whether a search has ended.

Ids per bag of 50 batches of 64 bags, Poisson with the mean 1, are known to 1 / sqrt(3200) = 2 %; an answer waits for at
most a fiftieth of the steps between two looks.
"""
_MOVE_COST = 500.0
"""Milliseconds a GiB: half a GiB took 0.25 s on two ranks of an AMD EPYC."""


@frozen
class Look:
    """A look at the data, and what came of it; the same on every rank.

    Args:
        step: number of the step after which all ranks heard of it.
        kept_ms: predicted time of the present plan, as the data are now, by what plans are compared by: the objective,
            or a step's time by ``engine``; ``None`` where it has no price.
        found_ms: predicted time of the plan near it, by the same.
        moved_bytes: bytes of weights and optimizer states that move from the one to the other.
        factor: measured time of the tables' part of a step over the predicted one, of the present plan.
        is_taken: the model was resharded.
        problem: why there is no plan: the error that the search ended with, or that the model was resharded meanwhile;
            empty if there is one.
    """

    step: int
    kept_ms: float | None = None
    found_ms: float | None = None
    moved_bytes: int = 0
    factor: float = 1.0
    is_taken: bool = False
    problem: str = ""


class Replanner:
    """Reshards a model in training where its plan no longer suits the data; call :meth:`step` after each step.

    After every so many steps, all ranks tell each other how many ids the features had and how long steps took. Rank 0
    begins a search in a process of its own, for a plan near the present one (the refinement ``stay_near``). A plan is
    better by ``(t_old - t_new) every`` ms until the next look, and its moves take ``move_cost`` ms a GiB: where the
    first is more, all ranks reshard. Every rank makes one, with the same numbers.

    Args:
        model: the sharded model, of a plan that a planner made. Collections are called with their batches: no pipeline
            sends ids ahead when :meth:`step` is called.
        optimizers: optimizers of your own with parameters of tables, as :meth:`DistributedModelParallel.reshard` takes.
        every: steps from one look to the next.
        move_cost: milliseconds that a GiB takes to move, as a first move tells.
        dry_run: only tell what would be done (:attr:`looks`).
        in_background: search beside the training; otherwise all ranks wait for the search.
        max_extra_bytes: most memory for a move, as :meth:`DistributedModelParallel.reshard` takes.

    Attributes:
        looks: all looks so far.
        times: times of the steps since the last look; ``None`` on devices that are no CPUs.

    Raises:
        InvalidInputError: a number is out of range, or the plan does not say what was asked of a planner.
        DistributedError: ranks gave different numbers.
    """

    @checked
    def __init__(
        self,
        model: DistributedModelParallel,
        *optimizers: Optimizer,
        every: PositiveInt = 1000,
        move_cost: NonNegativeFloat = _MOVE_COST,
        dry_run: bool = False,
        in_background: bool = True,
        max_extra_bytes: int | None = None,
    ) -> None:
        from shardwright.planning.plan.inputs import InputTables
        from shardwright.runtime.sharded.collections.sharded_collection import ShardedCollection

        check_model("Replanner", model)
        self._tables = tuple(InputTables.of(model.plan.document).tables.values())
        if not self._tables:
            raise InvalidInputError(
                "the model's plan does not say what was asked of a planner, and cannot be made again: plan with an "
                "EmbeddingShardingPlanner"
            )
        numbers = {"every": every, "move_cost": move_cost, "dry_run": dry_run, "in_background": in_background}
        model.env.everyone.agree("the arguments of Replanner()", numbers, "Give every rank the same")
        self._model, self._optimizers, self._every = model, optimizers, every
        self._move_cost, self._dry_run, self._in_background = move_cost, dry_run, in_background
        self._max_extra_bytes = max_extra_bytes
        self._collections = {
            path: module
            for path, module in model.module.named_modules()
            if isinstance(module, ShardedCollection)
        }
        self.times = StepTimes(model) if model.device.type == "cpu" else None
        if self.times is not None:
            self.times.start()
        self._counts = IdCounts(self._collections)
        self._search: _Search | None = None
        self._plan = model.plan  # of the last look
        self._is_searching, self._is_closed, self._step = False, False, 0
        self.looks: list[Look] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End a search that is under way, and leave the model alone."""
        self._counts.close()
        if self.times is not None:
            self.times.stop()
        if self._search is not None:
            self._search.end()
        self._search, self._is_searching, self._is_closed = None, False, True

    def step(self) -> Look | None:
        """Count a step; every rank makes this call after each step, when no batch is in progress.

        Returns:
            What came of a look, in the step in which it is known; else ``None``.

        Raises:
            UnsupportedError: a batch is in progress on some rank, as a pipeline has it; on all ranks, in the first step
                and at each look.
            InvalidInputError: it was closed.
        """
        if self._is_closed:
            raise InvalidInputError("this Replanner was closed: make another")
        self._step += 1
        if self._step == 1 or self._step % self._every == 0:
            with self._model.env.everyone.together("Replanner.step()"):
                self._check_idle()
        self._counts.is_counting = self._step % max(1, self._every // _SAMPLES) == 0
        if self._is_searching and self._step % max(1, self._every // _POLLS) == 0:
            return self._hear()
        if not self._is_searching and self._step % self._every == 0:
            self._look()
            return None if self._in_background else self._hear()
        return None

    def _check_idle(self) -> None:
        """Check that the model could be resharded now, so that a loop in which it never can is refused at once."""
        for path, collection in self._collections.items():
            if reason := collection.engine.unfinished():
                raise UnsupportedError(
                    f"Replanner.step() is called when no batch is in progress, and the module at {path!r} has one: "
                    f"{reason}"
                )

    def _look(self) -> None:
        """Gather what the data are like; rank 0 begins to search."""
        env = self._model.env.everyone
        took = self.times.of_rank() if self.times is not None and self.times.num_steps else None
        gathered = env.communicator.all_gather_objects((self._counts.counts, took))
        self._counts.counts = Counts()
        if self.times is not None:
            self.times.reset()
        self._is_searching, self._plan = True, self._model.plan
        if env.rank == 0:
            times = [own for _, own in gathered if own is not None]
            took_ms = MeasuredTimes(self._every, times).tables_ms if times else None
            self._search = _Search(
                {
                    "plan": self._model.plan.to_json(),
                    "ids_per_bag": ids_per_bag([counts for counts, _ in gathered], self._tables),
                    "move_cost": self._move_cost / self._every,
                    "measured_ms": took_ms,
                }
            )

    def _hear(self) -> Look | None:
        """Hear on all ranks whether rank 0 has found a plan; if so, take it or leave it."""
        answer = None if self._search is None else self._search.answer(is_awaited=not self._in_background)
        answer = self._model.env.everyone.communicator.broadcast_object(answer)
        if answer is None:
            return None
        self._search, self._is_searching = None, False
        look = self._take(*answer)
        self.looks.append(look)
        if look.problem and self._model.env.everyone.rank == 0:
            warnings.warn(f"the Replanner found no plan at step {look.step}: {look.problem}", stacklevel=3)
        return look

    def _take(self, text: str, problem: str) -> Look:
        from shardwright.planning.plan.plan import ShardingPlan

        if self._model.plan is not self._plan:
            problem = "the model was resharded while the search went on"
        if problem:
            return Look(self._step, problem=problem)
        try:
            plan = ShardingPlan.from_json(text)
        except PlanError as error:
            return Look(self._step, problem=str(error))
        inputs = plan.document["inputs"]
        told = (inputs[name]["value"] for name in ("kept_ms", "taken_ms", "moved_bytes", "factor"))
        kept_ms, found_ms, moved, factor = told
        is_taken = moved > 0 and not self._dry_run
        if is_taken:
            self._reshard(plan)
        return Look(self._step, kept_ms, found_ms, moved, factor, is_taken)

    def _reshard(self, plan: Any) -> None:
        if self.times is not None:
            self.times.stop()  # lets go of blocks that move
        try:
            self._model.reshard(plan, *self._optimizers, max_extra_bytes=self._max_extra_bytes)
        finally:
            if self.times is not None:
                self.times.start()


class _Search:
    """A search in a process of its own.

    Args:
        question: arguments of :func:`~shardwright_plugins.following.search.plan_near`, as JSON data.
    """

    def __init__(self, question: dict[str, Any]) -> None:
        self._files: list[IO[str]] = [
            tempfile.TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115 - closed by _close
            for _ in range(3)
        ]
        asked, self._found, self._said = self._files
        json.dump(question, asked)
        asked.seek(0)
        # The plan has a file of its own: what a plugin prints when it is imported is no part of it.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "shardwright_plugins.following.search", str(self._found.fileno())],
            stdin=asked,
            stdout=self._said,
            stderr=self._said,
            pass_fds=[self._found.fileno()],
        )
        weakref.finalize(self, _kill, self._process)  # at the program's end, too

    def answer(self, *, is_awaited: bool) -> tuple[str, str] | None:
        """The plan document and the error, one of them empty; ``None`` if the search goes on."""
        if not is_awaited and self._process.poll() is None:
            return None
        failed = self._process.wait() != 0
        for file in (self._found, self._said):
            file.seek(0)
        text, said = self._found.read(), self._said.read().strip()
        self._close()
        return ("", said[-4000:] or "the search was killed") if failed else (text, "")

    def end(self) -> None:
        """Kill the search, if it goes on."""
        _kill(self._process)
        self._close()

    def _close(self) -> None:
        for file in self._files:
            file.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
