"""Reading of a rank's next batch to its device; after the end of its data an empty batch, or the end."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from attrs import frozen
from torch import nn

from shardwright.errors import InvalidInputError
from shardwright.runtime.ranks.devices import is_host
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.step.batches.rank_problems import Status
from shardwright_plugins.pipeline.batch_settings import BatchSettings
from shardwright_plugins.pipeline.batch_tree import device_of, leaves, moved, without_examples
from shardwright_plugins.pipeline.inputs_ahead import SideStream
from shardwright_plugins.pipeline.stages import INPUT, PipelineStep, run_stage

_log = logging.getLogger("shardwright")

NO_FORM = "this rank's data has ended, and no empty batch could be made of another rank's: give empty_batch"


@frozen(eq=False)
class Fetched:
    """A rank's batch for a step (maybe an empty one), or the reason why it has none.

    Args:
        step: the batch after the stages of the phase ``"input"``; its ``batch`` is ``None`` if there is none.
        status: status word for the other ranks.
        error: error of the iterator or of a stage.
        read: the batch as the iterator gave it.
    """

    step: PipelineStep
    status: Status
    error: Exception | None = None
    read: Any = None


class Fetcher:
    """A reader of this rank's batches.

    Args:
        settings: settings of the user.
        env: the ranks.
        side: stream on which batches are copied to the device.
        model: the model that they are for.
    """

    def __init__(self, settings: BatchSettings, env: ShardingEnv, side: SideStream, model: nn.Module) -> None:
        self._settings, self._env, self._side, self._model = settings, env, side, model
        self._number = 0
        self._has_met, self._lacks_form, self._template = False, False, settings.empty_batch

    def fetch(self, iterator: Iterator[Any]) -> Fetched:
        """Read the next batch, or the reason why there is none."""
        try:
            batch = next(iterator)
        except StopIteration:
            return self._ended()
        except Exception as error:
            return self.without_batch(Status.FAILED, error)
        return self._prepared(batch, Status.FINE)

    def _step(self, batch: Any) -> PipelineStep:
        return PipelineStep(self._number, batch, self._settings.device, self._model, self._settings.optimizer)

    def without_batch(self, status: Status, error: Exception | None = None) -> Fetched:
        """The reason why this rank has no batch, as a status."""
        return Fetched(self._step(None), status, error)

    def _prepared(self, batch: Any, status: Status) -> Fetched:
        """Take a batch through the stages of the phase ``"input"``."""
        step = self._step(batch)
        self._number += 1
        try:
            if not all(is_host(device_of(leaf)) for _, leaf in leaves(batch)):
                self._side.follow_main()  # something made it there
            with self._side.active():
                for stage in self._settings.stages.of(INPUT):
                    run_stage(stage, step)
        except Exception as error:
            return self.without_batch(Status.FAILED, error)
        return Fetched(step, status, read=batch)

    def _ended(self) -> Fetched:
        if self._settings.end_of_data == "first_rank":
            return self.without_batch(Status.NO_BATCH)
        if self._template is None:
            lacking = self._lacks_form and InvalidInputError(NO_FORM)
            return self.without_batch(Status.FAILED if lacking else Status.EMPTY_BATCH, lacking or None)
        try:
            empty = self._template()
        except Exception as error:
            return self.without_batch(Status.FAILED, error)
        return self._prepared(empty, Status.EMPTY_BATCH)

    def meet(self, fetched: Fetched) -> Fetched:
        """Compare the users' settings, and give ranks without data the form of a batch; every rank calls this once.

        Raises:
            DistributedError: settings differ; raised on all ranks.
        """
        if self._has_met:
            return fetched
        choice = self._settings.end_of_data
        self._has_met = True
        settings = {"end_of_data": choice, "the exchange of ids": self._settings.way}
        self._env.agree("batches", settings, "Give all ranks the same settings")
        told = self._env.communicator.all_gather_objects((self._form_of(fetched), fetched.status))
        if choice == "first_rank" or self._template is not None:
            return fetched
        forms = [form for form, _ in told if form is not None]
        if forms:
            self._template = partial(pickle.loads, forms[0])
        self._lacks_form = not forms and any(status is Status.FINE for _, status in told)
        return self._ended() if fetched.status is Status.EMPTY_BATCH else fetched

    def _form_of(self, fetched: Fetched) -> bytes | None:
        """Pickle an empty batch of the form of this rank's batch; ``None`` if none is wanted or none can be made."""
        wanted = self._settings.end_of_data == "last_rank" and self._template is None
        if not wanted or fetched.read is None:
            return None
        try:
            return pickle.dumps(moved(without_examples(fetched.read), torch.device("cpu")))
        except Exception as error:
            _log.warning("no empty batch can be made of a %s: %s", type(fetched.read).__name__, error)
            return None
