"""Run of one rank of the demo, from the process group to the result."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from rich.console import Console

from shardwright import InvalidInputError, SavedCheckpoint, ShardingEnv, load_checkpoint, save_checkpoint
from shardwright.host import host
from shardwright.runtime.checkpoint.folder import has_checkpoint
from shardwright_plugins.commands._progress import track
from shardwright_plugins.commands.demo.examples import Examples, Source
from shardwright_plugins.commands.demo.metrics import ClickMetrics
from shardwright_plugins.commands.demo.model import Batch, ShardedDLRM, count_collectives
from shardwright_plugins.commands.demo.result import DemoResult, area_under_curve
from shardwright_plugins.commands.demo.settings import DemoSettings, make_source

__all__ = ["run_rank", "train_and_evaluate"]

# Seconds between two lines that say how far the last checkpoint is (taste: slow enough to be read).
_BETWEEN_NEWS_S = 5.0


def run_rank(settings: DemoSettings) -> DemoResult | None:
    """Be one rank of a job that were launched: join the process group, train, evaluate.

    Returns:
        The result on rank 0, None elsewhere.
    """
    # There may be as many ranks as cores; and sums in one thread have one order: a run can be repeated.
    torch.set_num_threads(1)
    with _process_group(settings.device) as device:
        return train_and_evaluate(settings, device)


def train_and_evaluate(settings: DemoSettings, device: torch.device) -> DemoResult | None:
    """Do the demo's work on this rank of the process group.

    Every rank makes this call. Each, in this order: 1. plans and shards, 2. trains, 3. evaluates.

    Returns:
        The result on rank 0, None elsewhere.
    """
    env = ShardingEnv.from_process_group(dist.group.WORLD, device_type=device.type)
    return _Run(settings, env, device).result()


class _Run:
    """One rank's part of a run."""

    def __init__(self, settings: DemoSettings, env: ShardingEnv, device: torch.device) -> None:
        self._settings = settings
        self._env = env
        self._device = device
        self._console = Console(highlight=False, soft_wrap=True) if env.rank == 0 else None
        self._source: Source = make_source(settings)
        process_ids = env.communicator.all_gather_objects(os.getpid())
        self._print("ranks: " + ", ".join(f"{rank} is process {pid}" for rank, pid in enumerate(process_ids)))
        self._model = ShardedDLRM(self._source.tables, settings, env, device)
        self._print(str(self._model.plan))
        self._saving: SavedCheckpoint | None = None
        self._saved = 0.0
        self._rate = 0.0

    def result(self) -> DemoResult | None:
        """Train, evaluate, and say what came of it."""
        num_examples, collectives, seconds = self._train()
        metrics = ClickMetrics(self._device)
        labels, logits, true_logits = self._evaluate(metrics)
        entropy, calibration = metrics.compute()
        if self._env.rank != 0:
            return None
        return DemoResult(
            auc=area_under_curve(labels, logits),
            best_auc=None if true_logits is None else area_under_curve(labels, true_logits),
            examples=num_examples,
            examples_per_second=self._rate,
            collectives_per_step=collectives,
            ranks=self._env.world_size,
            plan=json.loads(self._model.plan.to_json()),
            steps=num_examples // self._settings.batch_size,
            training_seconds=seconds,
            held_out_examples=len(labels),
            held_out_clicks=int(labels.sum()),
            bad_lines=self._source.num_bad_lines,
            normalized_entropy=entropy,
            calibration=calibration,
        )

    def _train(self) -> tuple[int, int, float]:
        """(examples of all ranks, also before the checkpoint; collectives a step; seconds since then)."""
        collectives, seconds = 0, 0.0
        first = num_steps = self._resumed()
        # A step has the same examples on any number of ranks: what was trained on is passed over.
        steps = self._settings.steps
        every = self._source.training_batches(self._env.rank, self._env.world_size)
        batches = islice(every, first, None if steps is None else max(steps, first))
        with track(self._console, "training", None if steps is None else steps - first) as tracker:
            start = time.perf_counter()
            for examples in batches:
                batch = self._batch(examples)
                if num_steps == first:
                    collectives = count_collectives(self._model, batch)
                    start = time.perf_counter()
                loss = self._model.train_step(batch)
                num_steps += 1
                self._save(num_steps)
                seconds = time.perf_counter() - start
                self._rate = (num_steps - first) * self._settings.batch_size / seconds
                saving = f"  saving {self._saved:.0%}" if 0.0 < self._saved < 1.0 else ""
                tracker.advance(f"loss {loss:.4f}  {self._rate:,.0f} examples/s{saving}")
        self._finish_saving()
        return num_steps * self._settings.batch_size, collectives, seconds

    def _resumed(self) -> int:
        """Load the newest checkpoint, if that is asked for and there is one; gives the steps it is after.

        Raises:
            InvalidInputError: it was trained on other batches.
        """
        folder = self._settings.checkpoint
        if folder is None or not self._settings.resume or not has_checkpoint(folder):
            return 0
        loaded = load_checkpoint(folder, self._model.module, self._model.dense_optimizer)
        if loaded.extra != self._settings.data_position():
            raise InvalidInputError(
                f"{loaded.path} was trained on other batches: {dict(loaded.extra)}, now it would be "
                f"{self._settings.data_position()}"
            )
        self._print(f"resumed from {loaded.path}")
        return loaded.step or 0

    def _save(self, num_steps: int) -> None:
        """Save a checkpoint when one is due, while training goes on."""
        folder = self._settings.checkpoint
        if folder is None or num_steps % self._settings.checkpoint_every:
            return
        self._saving = save_checkpoint(
            folder,
            self._model.module,
            self._model.dense_optimizer,
            step=num_steps,
            extra=self._settings.data_position(),
            keep=2,
            asynchronous=True,
            progress=self._note_saved,
        )

    def _note_saved(self, done_bytes: int, all_bytes: int) -> None:
        self._saved = done_bytes / all_bytes

    def _finish_saving(self) -> None:
        """Wait for the last checkpoint, and say how far it is."""
        saving = self._saving
        if saving is not None:
            wait_with_news(saving, lambda: self._print(f"saving {saving.path}: {self._saved:.0%}"))

    def _evaluate(self, metrics: ClickMetrics) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None]:
        """Labels, logits and, where known, true logits of the held-out examples of all ranks."""
        labels, logits, true_logits = [], [], []
        batches = self._source.held_out_batches(self._env.rank, self._env.world_size)
        with track(self._console, "evaluating", self._num_held_out_batches()) as tracker:
            for examples in batches:
                batch = self._batch(examples)
                own = self._model.logits(batch).double()
                metrics.update(own, batch.labels)
                logits.append(own.cpu())
                labels.append(torch.from_numpy(examples.labels))
                if examples.true_logits is not None:
                    true_logits.append(torch.from_numpy(examples.true_logits))
                tracker.advance()
        truth = self._gather(true_logits) if true_logits else None
        return self._gather(labels), self._gather(logits), truth

    def _num_held_out_batches(self) -> int | None:
        if self._settings.data:
            return None
        return -(-self._settings.num_held_out // self._settings.evaluation_batch_size)

    def _gather(self, pieces: list[torch.Tensor]) -> NDArray[Any]:
        return np.concatenate(self._env.communicator.all_gather_objects(torch.cat(pieces).numpy()))

    def _batch(self, examples: Examples) -> Batch:
        return Batch.of(examples, self._source.tables, self._device)

    def _print(self, text: str) -> None:
        if self._console is not None:
            self._console.print(text, markup=False)


def wait_with_news(saving: SavedCheckpoint, tell: Callable[[], None]) -> None:
    """Wait for a checkpoint, and call a function every few seconds.

    Args:
        saving: Checkpoint that is being saved.
        tell: Function that says how far it is.

    Raises:
        CheckpointError: If it could not be saved.
    """
    while True:
        try:
            saving.wait(_BETWEEN_NEWS_S)
            return
        except TimeoutError:
            tell()


@contextmanager
def _process_group(device_type: str) -> Iterator[torch.device]:
    """Join the ranks that the launcher started; gives this rank's device."""
    device = torch.device(device_type)
    if device_type != "cpu":
        device = torch.device(device_type, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group(_backend_for(device_type))
    yield device
    # Only where all went well: else the process ends, and must not wait for ranks that are gone.
    dist.destroy_process_group()


def _backend_for(device_type: str) -> str:
    """The name of a comm backend for tensors of a device: one that prefers it, or else one that can."""
    entries = host().comm_backends.entries
    able = [name for name, entry in entries.items() if device_type in entry.item.devices]
    preferring = [name for name in able if entries[name].item.devices[0] == device_type]
    return (preferring or able or [dist.get_default_backend_for_device(device_type)])[0]
