"""Every rank's batches in step: ids are exchanged before their forward pass, and data ends on all ranks at once.

The ids of a batch are exchanged before its forward pass. The header of that exchange carries the rank's status: its
batch is there, or wrong, or its data has ended. So all ranks make the same steps, without a further collective. That
needs to know the places of the collections' inputs in a batch. They are learnt in the first step, by comparing the
inputs with the batch.

A pipeline begins the exchange of the next batch as soon as this one's results are being sent, before anybody waits
for them. So another status word after the forward pass tells whether it failed.

Every rank makes these collectives beside those of the step itself:

1. before the first batch: statuses and settings of all ranks;
2. after the first forward pass: the places of inputs;
3. with each batch: a status word, if no input is exchanged ahead or there are several sharding groups;
4. after each forward pass in which the next batch was begun: a status word.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from attrs import define, evolve
from torch import nn
from torch.profiler import record_function

from shardwright.errors import DistributedError, InvalidInputError
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.ranks.together import is_lost
from shardwright.runtime.sharded.collections.sharded_collection import ShardedCollection
from shardwright.runtime.sharded.models.model_parallel import DistributedModelParallel
from shardwright.runtime.step.batches.rank_problems import Status
from shardwright.sparse import KeyedJaggedTensor
from shardwright_plugins.pipeline.batch_exchange import BatchExchange, CollectionCall, agreed_calls
from shardwright_plugins.pipeline.batch_settings import BatchSettings
from shardwright_plugins.pipeline.batch_tree import (
    follow,
    path_of,
    path_text,
    record_stream,
)
from shardwright_plugins.pipeline.fetching import NO_FORM, Fetched, Fetcher
from shardwright_plugins.pipeline.inputs_ahead import Begun, InputsAhead, SideStream, call_weakly
from shardwright_plugins.pipeline.stages import EXCHANGE, PREFETCH, PipelineStep, run_stage
from shardwright_plugins.pipeline.status_word import exchange_statuses, raise_if_stopped

_log = logging.getLogger("shardwright")


@define(eq=False)
class _Coming:
    """The next step as agreed by all ranks: a batch, an error, the end, or an error and then the end.

    Args:
        step: the batch on its way.
        error: error of any rank's batch.
        is_over: the data has ended.
        late: error of a stage on this rank after the ranks agreed, which the others are told in the forward pass.
        is_near: the stages of the phase ``"prefetch"`` were run.
    """

    step: PipelineStep
    error: Exception | None
    is_over: bool
    late: Exception | None = None
    is_near: bool = False


class BatchesInStep:
    """This rank's batches, one after the other, in step with the other ranks'.

    Args:
        model: the model with its sharded collections.
        settings: settings of the user.
    """

    def __init__(self, model: nn.Module, settings: BatchSettings) -> None:
        self._settings = settings
        inner = model.module if isinstance(model, DistributedModelParallel) else model
        self._collections = {
            path: module for path, module in inner.named_modules() if isinstance(module, ShardedCollection)
        }
        # Collections have these, and so must not come to have this object: nothing would be freed at once.
        self._made: list[tuple[str, KeyedJaggedTensor]] = []
        self._ahead = {
            name: InputsAhead(
                partial(_note, self._made, name),
                is_strict=settings.is_strict,
                looked_up=partial(call_weakly, weakref.WeakMethod(self._has_looked_up)),
            )
            for name in self._collections
        }
        env = _env_of(model, list(self._collections.values()))
        self._group, self._env = env, env.everyone
        self._side = SideStream.on(settings.device or torch.device(self._env.device_type))
        self._fetcher = Fetcher(settings, self._env, self._side, model)
        self._begun: list[tuple[str, Begun]] = []  # for the batch that is taken next
        self.reset()

    def reset(self) -> None:
        """Forget all batches under way and where inputs stand; every rank makes this call, or none."""
        self.drop_unused()
        for _, begun in self._begun:
            begun.arrive()
        self._begun = []
        self._iterator: Iterator[Any] | None = None  # while a forward pass is to begin the next batch
        self._to_look_up = 0
        self._calls: list[CollectionCall] | None = (
            None if self._settings.is_ahead and self._collections else []
        )
        self._expected = list(self._collections)
        self._made.clear()
        self._fetched: Fetched | None = None
        self._coming: _Coming | None = None
        self._batch: Any = None
        self._late: Exception | None = None

    def take(self, iterator: Iterator[Any]) -> PipelineStep:
        """Take the next batch, on the device, with its ids under way.

        Raises:
            StopIteration: the data has ended, on all ranks.
            Exception: an iterator failed, or a rank's batch is wrong; raised on all ranks.
        """
        if self._coming is None:
            self.advance(iterator)
        self._bring_near()
        coming, self._coming = self._coming, None
        assert coming is not None  # advance
        if coming.error is not None:
            if coming.is_over:  # said first; then comes the end
                self._coming = evolve(coming, error=None)
            raise coming.error
        if coming.is_over:
            raise StopIteration
        for name, begun in self._begun:
            self._ahead[name].put(begun)
        self._begun = []
        current = self._side.join()
        if current is not None:
            record_stream(coming.step.batch, current)
        if self.learns:
            self._batch = coming.step.batch
        self._late = coming.late
        return coming.step

    def raise_late(self) -> None:
        """Raise the error of a stage that failed for the batch last taken, after the ranks had agreed on it."""
        late, self._late = self._late, None
        if late is not None:
            raise late

    def advance(self, iterator: Iterator[Any]) -> None:
        """Read the next batch and send its ids now; :meth:`take` returns it or raises its error.

        Raises:
            DistributedError: a rank failed in its forward pass; raised on all ranks. The batch read is kept for later.
        """
        if self._fetched is None:
            self._fetched = self._fetcher.fetch(iterator)
        self._fetched = self._fetcher.meet(self._fetched)  # collective 1
        coming, statuses = self._exchange(self._fetched)
        raise_if_stopped(statuses)
        self._fetched, self._coming = None, coming

    # Where inputs stand

    def serve(self) -> None:
        """Give the collections the exchanges of the batch last taken, and observe their inputs."""
        self._made.clear()
        for name, collection in self._collections.items():
            collection.inputs_ahead = self._ahead[name]

    def release(self) -> None:
        """Take this object's exchanges off the collections."""
        for name, collection in self._collections.items():
            if collection.inputs_ahead is self._ahead[name]:
                collection.inputs_ahead = None

    def drop_unused(self) -> None:
        """Forget exchanges that no forward pass used."""
        self.release()
        for ahead in self._ahead.values():
            ahead.discard()

    @property
    def learns(self) -> bool:
        """True if the places of inputs are to be learnt from the forward pass just made, by :meth:`learn`."""
        return self._calls is None

    def learn(self) -> None:
        """Make collective 2: agree on the places of the collections' inputs, from the forward pass just made.

        Raises:
            DistributedError: the forward pass failed on a rank; raised on all ranks.
        """
        mine = [(name, path_of(self._batch, features)) for name, features in self._made]
        if not self._settings.is_strict:  # other batches may have come between
            mine = [call for call in mine if call[1] is not None]
        told = self._env.communicator.all_gather_objects(mine)
        raise_if_stopped([Status.FINE if calls is not None else Status.STOPPED for calls in told])
        if any(told):
            self._expected = [name for name, _ in mine]
            self._calls = agreed_calls(told)
            self._tell_who_stays({call.name for call in self._calls})
        self._batch = None
        self._made.clear()

    def _tell_who_stays(self, ahead: set[str]) -> None:
        stays = sorted({name for name, _ in self._made} - ahead)
        if stays:
            _log.warning(
                "the input of %s is not in the batch, or stands elsewhere on other ranks (the model makes it): its ids "
                "are exchanged in the forward pass, not ahead of it",
                ", ".join(map(repr, stays)),
            )

    # Exchanges

    def _exchange(self, fetched: Fetched) -> tuple[_Coming, Sequence[Status]]:
        """Begin all exchanges of a batch, then go on with each, so that they are under way together."""
        exchange = BatchExchange(self._group, fetched, self._calls or (), self._begin)
        with self._side.active():
            late = self._late_error(
                EXCHANGE, fetched.step, exchange_headers=exchange.begin, exchange_ids=exchange.send
            )
            exchange.send()
            if not exchange.goes_on:
                exchange.discard()
        if exchange.goes_on:
            self._begun = [
                (call.name, begun) for call, begun in zip(self._calls or (), exchange.begun, strict=True)
            ]
        error = exchange.error and (fetched.error or exchange.error)
        return _Coming(fetched.step, error, exchange.is_over, late), exchange.statuses

    def _begin(self, call: CollectionCall, fetched: Fetched) -> Begun:
        features: Any = None
        error, batch = fetched.error, fetched.step.batch
        if batch is not None:
            try:
                features = follow(batch, call.path)
            except Exception as problem:
                error = InvalidInputError(
                    f"the first batch had the input of a collection at {path_text(call.path)}, where this batch has "
                    f"none ({type(problem).__name__}: {problem}): give all batches the same form"
                )
        elif fetched.status is Status.EMPTY_BATCH:
            error = InvalidInputError(NO_FORM)
        prepare = None if error is None else partial(_raise, error)
        status = fetched.status
        if self._group.all_ranks is not None and status is Status.EMPTY_BATCH:
            status = Status.FINE  # a group all of whose data has ended goes on as long as another
        step = self._collections[call.name].begin_input_dist(features, status=status, prepare=prepare)
        return Begun(features, step, self._side)

    def _late_error(self, phase: str, step: PipelineStep, **calls: Any) -> Exception | None:
        """Run the stages of a phase ahead of the forward pass; return the error of one that failed.

        Raises:
            DistributedError: a collective failed.
        """
        if step.batch is None:  # this rank's data has ended, or its batch is wrong
            return None
        try:
            with step.during(**calls):
                for stage in self._settings.stages.of(phase):
                    run_stage(stage, step)
        except Exception as error:
            if is_lost(error):
                raise
            return error
        return None

    def _bring_near(self) -> None:
        """Run the stages of the phase ``"prefetch"`` for the batch that is coming, once."""
        coming = self._coming
        if coming is None or coming.is_near or coming.error or coming.late or coming.is_over:
            return
        coming.is_near = True
        coming.late = self._late_error(PREFETCH, coming.step, prefetch=self._prefetch)

    def _prefetch(self) -> None:
        for _, begun in self._begun:
            begun.prefetch()

    # The forward pass

    @contextmanager
    def forward(self, iterator: Iterator[Any]) -> Iterator[None]:
        """A context for the forward pass of a batch taken; if it fails on a rank, all ranks raise in this step.

        The next batch is begun inside, once the last results are being sent. If that time is unknown, it is begun
        after the pass.

        Args:
            iterator: iterator over this rank's batches, which has the next one.

        Raises:
            DistributedError: the pass did not use the ids exchanged for it, or failed on another rank.
        """
        self.serve()
        self.begin_next_after_lookups(iterator)
        try:
            self.raise_late()
            yield
            self._check_used()
        except Exception as error:
            self._give_up(error)
            raise
        finally:
            self.release()
            self._iterator = None
            if not self.learns:
                self._made.clear()
        if self._calls:
            raise_if_stopped(exchange_statuses(self._env, Status.FINE)[0])
        else:
            if self.learns:
                self.learn()
            with record_function("## next batch ##"):
                self.advance(iterator)
        self._bring_near()

    def begin_next_after_lookups(self, iterator: Iterator[Any]) -> None:
        """Have the next batch begun once the results of the batch last taken are being sent.

        Args:
            iterator: iterator over this rank's batches.
        """
        self._to_look_up = len(self._calls or ())
        self._iterator = iterator if self._calls else None

    def _has_looked_up(self) -> None:
        """Note that a collection's results are being sent; after those of the last one, begin the next batch."""
        self._to_look_up -= 1
        if self._to_look_up == 0 and self._iterator is not None:
            with record_function("## next batch ##"):
                self.advance(self._iterator)

    def _check_used(self) -> None:
        for name, ahead in self._ahead.items():
            if len(ahead):
                raise DistributedError(
                    f"the collection at {name!r} was called in the first forward pass but not in this one: call it for "
                    "every batch, or train with TrainPipelineBase"
                )

    def _give_up(self, error: Exception) -> None:
        """Tell the other ranks of an error; if they cannot be reached, a note on ``error`` says so."""
        if is_lost(error):
            return
        try:
            self._finish_for_others()
        except Exception as further:
            error.add_note(f"The other ranks could not be told of it: {type(further).__name__}: {further}")

    def _finish_for_others(self) -> None:
        """Make the remaining collectives of the forward pass, then tell the others that this rank stopped."""
        made = Counter(name for name, _ in self._made)
        for name in self._expected:
            if made[name]:
                made[name] -= 1
            elif len(self._ahead[name]):
                self._ahead[name].next().lookup()
                self._has_looked_up()
            else:
                self._collections[name].begin_input_dist(None, status=Status.STOPPED).send()
        if self.learns:
            self._env.communicator.all_gather_objects(None)  # as in learn
        elif self._calls:
            exchange_statuses(self._env, Status.STOPPED)
        else:
            self._exchange(self._fetcher.without_batch(Status.STOPPED))


def _raise(error: Exception) -> None:
    raise error


def _env_of(model: nn.Module, collections: Sequence[ShardedCollection]) -> ShardingEnv:
    env = collections[0].env if collections else getattr(model, "env", None)
    return env if isinstance(env, ShardingEnv) else ShardingEnv.from_process_group()


def _note(made: list[tuple[str, KeyedJaggedTensor]], name: str, features: KeyedJaggedTensor) -> None:
    made.append((name, features))
