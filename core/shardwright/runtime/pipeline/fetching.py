"""Reading of a rank's next batch to its device; after the end of its data an empty batch, or the end."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from attrs import frozen

from shardwright.errors import InvalidInputError
from shardwright.runtime.pipeline.batch_form import from_text, to_text
from shardwright.runtime.pipeline.batch_settings import BatchSettings, EndOfData
from shardwright.runtime.ranks.devices import is_host
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.step.batch_tree import device_of, leaves, moved, without_examples
from shardwright.runtime.step.inputs import Status
from shardwright.runtime.step.inputs_ahead import SideStream

_log = logging.getLogger("shardwright")

NO_FORM = "this rank's data has ended, and no empty batch could be made of another rank's: give empty_batch"


@frozen(eq=False)
class Fetched:
    """A rank's batch for a step (maybe an empty one), or the reason why it has none."""

    batch: Any
    status: Status
    error: Exception | None = None


class Fetcher:
    """A reader of this rank's batches.

    Args:
        settings: settings of the user.
        env: the ranks.
        side: stream on which batches are copied to the device.
    """

    def __init__(self, settings: BatchSettings, env: ShardingEnv, side: SideStream) -> None:
        self._settings, self._env, self._side = settings, env, side
        self._has_met, self._lacks_form, self._template = False, False, settings.empty_batch

    def fetch(self, iterator: Iterator[Any]) -> Fetched:
        """Read the next batch, or the reason why there is none."""
        try:
            batch = next(iterator)
        except StopIteration:
            return self._ended()
        except Exception as error:
            return Fetched(None, Status.FAILED, error)
        try:
            return Fetched(self._moved(batch), Status.FINE)
        except Exception as error:
            return Fetched(None, Status.FAILED, error)

    def _moved(self, batch: Any) -> Any:
        device = self._settings.device
        if not all(is_host(device_of(leaf)) for _, leaf in leaves(batch)):
            self._side.follow_main()  # something made it there
        with self._side.active():
            return batch if device is None else moved(batch, device)

    def _ended(self) -> Fetched:
        if self._settings.end_of_data is EndOfData.FIRST_RANK:
            return Fetched(None, Status.NO_BATCH)
        if self._template is None:
            lacking = self._lacks_form and InvalidInputError(NO_FORM)
            return Fetched(None, Status.FAILED if lacking else Status.EMPTY_BATCH, lacking or None)
        try:
            return Fetched(self._moved(self._template()), Status.EMPTY_BATCH)
        except Exception as error:
            return Fetched(None, Status.FAILED, error)

    def meet(self, fetched: Fetched) -> Fetched:
        """Compare the users' settings, and give ranks without data the form of a batch; every rank calls this once.

        Raises:
            InvalidInputError: settings differ; raised on all ranks.
        """
        if self._has_met:
            return fetched
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
            self._template = partial(from_text, forms[0])
        self._lacks_form = not forms and any(status is Status.FINE for *_, status in told)
        return self._ended() if fetched.status is Status.EMPTY_BATCH else fetched

    def _form_of(self, fetched: Fetched) -> str | None:
        """Write an empty batch of the form of this rank's batch; ``None`` if none is wanted or none can be made."""
        wanted = self._settings.end_of_data is EndOfData.LAST_RANK and self._template is None
        if not wanted or fetched.batch is None:
            return None
        try:
            return to_text(moved(without_examples(fetched.batch), torch.device("cpu")))
        except Exception as error:
            _log.warning("no empty batch can be made of a %s: %s", type(fetched.batch).__name__, error)
            return None
