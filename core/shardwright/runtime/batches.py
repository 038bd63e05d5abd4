"""Every rank's batches in step: ids exchanged before the forward pass they are for, and one end of data for all.

What a rank has to say of its next batch (that it is there, wrong, the last was the last, ...) travels in the header of
the exchange of that batch's ids, which is made before the forward pass. So the ranks part nowhere, and it takes no
collective of its own, once it is known where in a batch the collections' inputs stand. That is learnt in the first
step, by watching what they are given.

The collectives that are not those of the step itself, by every rank: 1. before the first batch, what each has, and
what its user chose; 2. after the first forward pass, where inputs stand; 3. before each batch a status word, where no
input is exchanged ahead.
"""

from __future__ import annotations

import logging
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from typing import Any, Protocol

import torch
from attrs import evolve, field, frozen
from torch import Tensor, nn

from shardwright.errors import DistributedError, InvalidInputError, nearest
from shardwright.runtime.batch_tree import (
    Path,
    device_of,
    follow,
    is_same,
    leaves,
    moved,
    path_text,
    record_stream,
    without_examples,
)
from shardwright.runtime.environment import ShardingEnv
from shardwright.runtime.inputs import Status, goes_on
from shardwright.runtime.inputs_ahead import Begun, InputsAhead, SideStream, who_ended
from shardwright.runtime.lockstep import name_ranks
from shardwright.runtime.model_parallel import DistributedModelParallel
from shardwright.runtime.sharded_collection import ShardedCollection
from shardwright.sparse import KeyedJaggedTensor

_log = logging.getLogger("shardwright")

_NO_FORM = "this rank's data has ended, and no empty batch could be made of another rank's: give empty_batch"


class EndOfData(StrEnum):
    """When a loop ends whose ranks have different numbers of batches."""

    FIRST_RANK = "first_rank"
    """For all ranks with the first rank whose data ends; what the others have read of the next step is dropped."""

    LAST_RANK = "last_rank"
    """With the last: a rank whose data has ended goes on with empty batches."""

    @classmethod
    def of(cls, value: str) -> EndOfData:
        """The choice called ``value``.

        Raises:
            InvalidInputError: there is none.
        """
        known = [choice.value for choice in cls]
        if value not in known:
            raise InvalidInputError(
                f"end_of_data is {value!r}; it must be one of {', '.join(known)}.{nearest(str(value), known)}"
            )
        return cls(value)


def _end_of_data(value: str) -> EndOfData:
    return EndOfData.of(value)


@frozen(eq=False)
class BatchSettings:
    """What a user chooses of batches in step.

    Args:
        device: where batches go; ``None``: they stay.
        end_of_data: see :class:`EndOfData`.
        empty_batch: makes a batch without examples, for a rank whose data has ended; by default one of the form of the
            first batch of any rank.
        is_ahead: exchange ids before the forward pass.
        is_strict: every forward pass is given what the batch has where the first batch had the collection's input.
    """

    device: torch.device | None = None
    end_of_data: EndOfData = field(default=EndOfData.FIRST_RANK, converter=_end_of_data)
    empty_batch: Callable[[], Any] | None = None
    is_ahead: bool = True
    is_strict: bool = False


@frozen(eq=False)
class _Fetched:
    """What a rank has for a step: a batch (maybe an empty one), or the reason why not."""

    batch: Any
    status: Status
    error: Exception | None = None


_STOPPED = _Fetched(None, Status.STOPPED)


@frozen(eq=False)
class _Coming:
    """The next step, as far as all ranks know of it: a batch, an error, or the end, or an error and then the end."""

    batch: Any
    error: Exception | None
    is_over: bool


@frozen(eq=False)
class _Call:
    """A forward pass of a collection, by its path in the model, and where in the batch its input stands."""

    name: str
    path: Path


class _Exchange(Protocol):
    """A step of the engine, or a status word alone."""

    statuses: Sequence[Status]

    def send(self) -> bool:
        """Wait for what the ranks say; returns whether the batch goes on."""


class _StatusWord:
    """What each rank has to say of its batch, in a collective of its own."""

    statuses: Sequence[Status] = ()

    def __init__(self, env: ShardingEnv, fetched: _Fetched) -> None:
        self._fetched = fetched
        ones = [1] * env.world_size
        sent = torch.full((env.world_size,), int(fetched.status), device=env.device_type)
        self._received: Tensor = torch.empty_like(sent)
        self._work = env.communicator.all_to_all(self._received, sent, ones, ones, label="status")

    def send(self) -> bool:
        """Wait for the words.

        Raises:
            DistributedError: a rank's iterator failed; there its own error.
        """
        self._work.wait()
        self.statuses = [Status(word) for word in self._received.tolist()]
        failed = [rank for rank, status in enumerate(self.statuses) if status is Status.FAILED]
        if failed and Status.STOPPED not in self.statuses:
            raise self._fetched.error or DistributedError(
                f"{name_ranks(failed)} could not read a batch; the error there says why"
            )
        return goes_on(self.statuses)


class BatchesInStep:
    """This rank's batches, one after the other, in step with the other ranks'.

    Args:
        model: the model with its sharded collections.
        settings: what its user chose.
    """

    def __init__(self, model: nn.Module, settings: BatchSettings) -> None:
        self._settings = settings
        inner = model.module if isinstance(model, DistributedModelParallel) else model
        self._collections = {
            path: module for path, module in inner.named_modules() if isinstance(module, ShardedCollection)
        }
        self._ahead = {
            name: InputsAhead(partial(self._note, name), is_strict=settings.is_strict)
            for name in self._collections
        }
        self._env = _env_of(model, list(self._collections.values()))
        self._side = SideStream.on(settings.device or torch.device(self._env.device_type))
        self._has_met, self._lacks_form, self._template = False, False, settings.empty_batch
        self.reset()

    def reset(self) -> None:
        """Forget all batches under way and where inputs stand; every rank makes this call, or none."""
        self.drop_unused()
        self._calls: list[_Call] | None = None if self._settings.is_ahead and self._collections else []
        self._expected = list(self._collections)
        self._made: list[tuple[str, KeyedJaggedTensor]] = []
        self._fetched: _Fetched | None = None
        self._coming: _Coming | None = None
        self._batch: Any = None

    def take(self, iterator: Iterator[Any]) -> Any:
        """The next batch, on the device, its ids under way.

        Raises:
            StopIteration: the end of data, on all ranks.
            Exception: what the iterator raised, or what is wrong with any rank's batch; on all ranks.
        """
        if self._coming is None:
            self.advance(iterator)
        coming, self._coming = self._coming, None
        assert coming is not None  # advance
        if coming.error is not None:
            if coming.is_over:  # said first; then comes the end
                self._coming = evolve(coming, error=None)
            raise coming.error
        if coming.is_over:
            raise StopIteration
        current = self._side.join()
        if current is not None:
            record_stream(coming.batch, current)
        if self.learns:
            self._batch = coming.batch
        return coming.batch

    def advance(self, iterator: Iterator[Any]) -> None:
        """Read the next batch and send its ids, now; :meth:`take` has it, and what is wrong with it.

        Raises:
            DistributedError: a rank failed in its forward pass; on all ranks. The batch read is there for later.
        """
        if self._fetched is None:
            self._fetched = self._fetch(iterator)
        if not self._has_met:
            self._fetched = self._meet(self._fetched)
        coming, statuses = self._exchange(self._fetched)
        _raise_if_stopped(statuses)
        self._fetched, self._coming = None, coming

    # Where inputs stand

    def _note(self, name: str, features: KeyedJaggedTensor) -> None:
        self._made.append((name, features))

    def serve(self) -> None:
        """Let the collections take what was begun for the batch last taken, and see what they are given."""
        self._made = []
        for name, collection in self._collections.items():
            collection.inputs_ahead = self._ahead[name]

    def release(self) -> None:
        """Leave the collections to others."""
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
        """Whether the forward pass that was made tells where inputs stand: :meth:`learn` comes next."""
        return self._calls is None

    def learn(self) -> None:
        """Collective 2: agree on where the collections' inputs stand, from the forward pass just made.

        Raises:
            DistributedError: that pass failed on a rank; on all ranks.
        """
        mine = [(name, self._path_of(features)) for name, features in self._made]
        if not self._settings.is_strict:  # other batches may have come between
            mine = [call for call in mine if call[1] is not None]
        told = self._env.communicator.all_gather_objects(mine)
        _raise_if_stopped([Status.FINE if calls is not None else Status.STOPPED for calls in told])
        if any(told):
            self._expected = [name for name, _ in mine]
            self._calls = [_Call(name, path) for name, path in _agreed(told)]
            self._tell_who_stays({call.name for call in self._calls})
        self._batch, self._made = None, []

    def _path_of(self, features: KeyedJaggedTensor) -> Path | None:
        for path, leaf in leaves(self._batch):
            if isinstance(leaf, KeyedJaggedTensor) and is_same(leaf, features):
                return path
        return None

    def _tell_who_stays(self, ahead: set[str]) -> None:
        stays = sorted({name for name, _ in self._made} - ahead)
        if stays:
            _log.warning(
                "the input of %s is not in the batch, or stands elsewhere on other ranks (the model makes it): its ids "
                "are exchanged in the forward pass, not ahead of it",
                ", ".join(map(repr, stays)),
            )

    # Batches

    def _fetch(self, iterator: Iterator[Any]) -> _Fetched:
        try:
            batch = next(iterator)
        except StopIteration:
            return self._ended()
        except Exception as error:
            return _Fetched(None, Status.FAILED, error)
        try:
            return _Fetched(self._moved(batch), Status.FINE)
        except Exception as error:
            return _Fetched(None, Status.FAILED, error)

    def _moved(self, batch: Any) -> Any:
        device = self._settings.device
        if any(device_of(leaf).type != "cpu" for _, leaf in leaves(batch)):
            self._side.follow_main()  # something made it there
        with self._side.active():
            return batch if device is None else moved(batch, device)

    def _ended(self) -> _Fetched:
        if self._settings.end_of_data is EndOfData.FIRST_RANK:
            return _Fetched(None, Status.NO_BATCH)
        if self._template is None:
            lacking = self._lacks_form and InvalidInputError(_NO_FORM)
            return _Fetched(None, Status.FAILED if lacking else Status.EMPTY_BATCH, lacking or None)
        try:
            return _Fetched(self._moved(self._template()), Status.EMPTY_BATCH)
        except Exception as error:
            return _Fetched(None, Status.FAILED, error)

    def _meet(self, fetched: _Fetched) -> _Fetched:
        """Collective 1: compare what users chose, and give ranks without data the form of a batch."""
        choice = self._settings.end_of_data
        self._has_met = True
        mine = (str(choice), self._form_of(fetched), fetched.status)
        told = self._env.communicator.all_gather_objects(mine)
        choices = [other for other, *_ in told]
        if len(set(choices)) > 1:
            raise InvalidInputError(
                f"end_of_data differs between ranks: {', '.join(choices)} (rank 0 first); give all ranks the same"
            )
        if choice is EndOfData.FIRST_RANK or self._template is not None:
            return fetched
        forms = [form for _, form, _ in told if form is not None]
        if forms:
            self._template = partial(pickle.loads, forms[0])
        self._lacks_form = not forms and any(status is Status.FINE for *_, status in told)
        return self._ended() if fetched.status is Status.EMPTY_BATCH else fetched

    def _form_of(self, fetched: _Fetched) -> bytes | None:
        """An empty batch of the form of this rank's, as bytes; ``None`` where there is none, or none can be made."""
        wanted = self._settings.end_of_data is EndOfData.LAST_RANK and self._template is None
        if not wanted or fetched.batch is None:
            return None
        try:
            return pickle.dumps(moved(without_examples(fetched.batch), torch.device("cpu")))
        except Exception as error:
            _log.warning("no empty batch can be made of a %s: %s", type(fetched.batch).__name__, error)
            return None

    # Exchanges

    def _exchange(self, fetched: _Fetched) -> tuple[_Coming, Sequence[Status]]:
        """Begin all exchanges of a batch, then go on with each: so they are under way together."""
        with self._side.active():
            begun = [(call, *self._begin(call, fetched)) for call in self._calls or ()]
            exchanges: list[_Exchange] = [step for _, _, step in begun]
            if not exchanges:
                exchanges = [_StatusWord(self._env, fetched)]
            error, sent = _send_all(exchanges)
        statuses = exchanges[0].statuses
        is_over = bool(statuses) and not goes_on(statuses)
        if error is None and not is_over:
            for call, features, step in begun:
                self._ahead[call.name].put(Begun(features, step, self._side))
        else:
            self._discard([step for _, _, step in begun if step in sent])
        return _Coming(fetched.batch, error and (fetched.error or error), is_over), statuses

    def _begin(self, call: _Call, fetched: _Fetched) -> tuple[Any, Any]:
        features, error = None, fetched.error
        if fetched.batch is not None:
            try:
                features = follow(fetched.batch, call.path)
            except Exception as problem:
                error = InvalidInputError(
                    f"the first batch had the input of a collection at {path_text(call.path)}, where this batch has "
                    f"none ({type(problem).__name__}: {problem}): give all batches the same form"
                )
        elif fetched.status is Status.EMPTY_BATCH:
            error = InvalidInputError(_NO_FORM)
        prepare = None if error is None else partial(_raise, error)
        step = self._collections[call.name].begin_input_dist(features, status=fetched.status, prepare=prepare)
        return features, step

    def _discard(self, steps: Sequence[Any]) -> None:
        with self._side.active():
            for step in steps:
                step.receive()

    # The forward pass

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the forward pass of a batch taken: what it raises, all ranks raise in this step.

        Raises:
            DistributedError: the pass did not use what was exchanged for it.
        """
        self.serve()
        try:
            yield
            self._check_used()
        except Exception as error:
            self._give_up(error)
            raise
        finally:
            self.release()
            if not self.learns:
                self._made = []

    def _check_used(self) -> None:
        for name, ahead in self._ahead.items():
            if len(ahead):
                raise DistributedError(
                    f"the collection at {name!r} was called in the first forward pass but not in this one: call it for "
                    "every batch, or train with TrainPipelineBase"
                )

    def _give_up(self, error: Exception) -> None:
        """Tell the other ranks; where they are not to be reached, ``error`` says so."""
        if _is_lost(error):
            return
        try:
            self._finish_for_others()
        except Exception as further:
            error.add_note(f"The other ranks could not be told of it: {type(further).__name__}: {further}")

    def _finish_for_others(self) -> None:
        """Do this rank's part of the step's remaining collectives of the forward pass, then say that it stopped."""
        made = Counter(name for name, _ in self._made)
        for name in self._expected:
            if made[name]:
                made[name] -= 1
            elif len(self._ahead[name]):
                self._ahead[name].next().lookup()
            else:
                self._collections[name].begin_input_dist(None, status=Status.STOPPED).send()
        if self.learns:
            self._env.communicator.all_gather_objects(None)  # as in learn
        else:
            self._exchange(_STOPPED)


def _send_all(exchanges: Sequence[_Exchange]) -> tuple[Exception | None, list[_Exchange]]:
    """Go on with all; returns the first error, and those whose ids are under way."""
    first: Exception | None = None
    sent = []
    for exchange in exchanges:
        try:
            if exchange.send():
                sent.append(exchange)
        except Exception as error:
            if _is_lost(error):
                raise
            first = first or error
    return first, sent


def _agreed(told: Sequence[Sequence[tuple[str, Path | None]]]) -> list[tuple[str, Path]]:
    """The calls of collections whose calls all ranks made with inputs at the same places, in the same order."""

    def calls_of(calls: Sequence[tuple[str, Path | None]], name: str) -> list[Path | None]:
        return [path for other, path in calls if other == name]

    names = {
        name
        for name, _ in told[0]
        if None not in calls_of(told[0], name)
        and all(calls_of(calls, name) == calls_of(told[0], name) for calls in told)
    }
    kept = [[call for call in calls if call[0] in names] for calls in told]
    if any(calls != kept[0] for calls in kept):
        return []
    return [(name, path) for name, path in kept[0] if path is not None]


def _raise_if_stopped(statuses: Sequence[Status]) -> None:
    if Status.STOPPED in statuses:
        raise DistributedError(
            f"{who_ended(statuses)}. The step was given up on all ranks, nothing was updated"
        )


def _is_lost(error: Exception) -> bool:
    """Whether a collective failed, so that others would fail too, or wait for their time-out."""
    return isinstance(error, DistributedError) and isinstance(error.__cause__, RuntimeError)


def _raise(error: Exception) -> None:
    raise error


def _env_of(model: nn.Module, collections: Sequence[ShardedCollection]) -> ShardingEnv:
    env = collections[0].env if collections else getattr(model, "env", None)
    return env if isinstance(env, ShardingEnv) else ShardingEnv.from_process_group()
