"""Run of one rank of the demo, from the process group to the result."""

from __future__ import annotations

import json
import os
import time
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor

from shardwright import InvalidInputError, ShardingEnv, load_checkpoint, save_checkpoint
from shardwright_plugins.checkpoint.folder import has_checkpoint
from shardwright_plugins.commands.demo.examples import Clicks
from shardwright_plugins.commands.demo.model import Batch, ShardedDLRM
from shardwright_plugins.commands.demo.settings import DemoSettings

_BETWEEN_LINES_S = 5.0  # slow enough to be read


@frozen(kw_only=True)
class DemoResult:
    """Result of a run; its fields are the keys of the JSON document.

    Args:
        auc: area under the ROC curve over the held-out examples.
        best_auc: area for the probabilities with which the labels were drawn.
        steps: steps trained, also before the checkpoint that was resumed from.
        examples: examples trained on.
        examples_per_second: rate of all ranks together; drawing examples takes a part of the time.
        ranks: number of processes.
        plan: the plan document.
        held_out_examples: examples that the AUC is over.
    """

    auc: float
    best_auc: float
    steps: int
    examples: int
    examples_per_second: float
    ranks: int
    plan: dict[str, Any]
    held_out_examples: int

    def __str__(self) -> str:
        return (
            f"speed:        {self.examples_per_second:,.0f} examples/s on {self.ranks} rank(s)\n"
            f"AUC:          {self.auc:.4f} over {self.held_out_examples:,} held-out examples\n"
            f"best AUC:     {self.best_auc:.4f} can be reached; this is {self.auc / self.best_auc:.1%} of it"
        )


def run_rank(settings: DemoSettings) -> DemoResult | None:
    """Join the process group of the ranks that the launcher started, train, and evaluate.

    Returns:
        The result on rank 0, None elsewhere.
    """
    # There may be as many ranks as cores; and sums in one thread have one order: a run can be repeated.
    torch.set_num_threads(1)
    device = torch.device(settings.device)
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ["LOCAL_RANK"]))
        torch.accelerator.set_device_index(device.index)
    dist.init_process_group(dist.get_default_backend_for_device(device))
    result = train_and_evaluate(settings, device)
    # Only where all went well: else the process ends, and must not wait for ranks that are gone.
    dist.destroy_process_group()
    return result


def train_and_evaluate(settings: DemoSettings, device: torch.device) -> DemoResult | None:
    """Plan, shard, train and evaluate on this rank of the process group; every rank makes this call.

    Returns:
        The result on rank 0, None elsewhere.
    """
    return _Run(settings, device).result()


class _Run:
    """One rank's part of a run."""

    def __init__(self, settings: DemoSettings, device: torch.device) -> None:
        self._settings, self._device = settings, device
        self._env = ShardingEnv.from_process_group(dist.group.WORLD, device_type=device.type)
        self._clicks = Clicks(settings.seed, settings.batch_size)
        process_ids = self._env.communicator.all_gather_objects(os.getpid())
        self._print("ranks: " + ", ".join(f"{rank} is process {pid}" for rank, pid in enumerate(process_ids)))
        self._model = ShardedDLRM(self._clicks.tables, settings, self._env, device)
        self._print(str(self._model.plan))

    def result(self) -> DemoResult | None:
        """Train and evaluate."""
        first = self._resumed()
        steps = max(first, self._settings.steps)
        rate = self._train(first, steps)
        labels, probabilities, true_probabilities = self._evaluate()
        if self._env.rank != 0:
            return None
        from torchmetrics.functional.classification import binary_auroc

        return DemoResult(
            auc=float(binary_auroc(probabilities, labels)),
            best_auc=float(binary_auroc(true_probabilities, labels)),
            steps=steps,
            examples=steps * self._settings.batch_size,
            examples_per_second=rate,
            ranks=self._env.world_size,
            plan=json.loads(self._model.plan.to_json()),
            held_out_examples=len(labels),
        )

    def _resumed(self) -> int:
        """Load the newest checkpoint, if that is asked for and there is one, and return the steps it is after.

        Raises:
            InvalidInputError: it was trained on other batches.
        """
        folder, position = self._settings.checkpoint, self._settings.data_position()
        if folder is None or not self._settings.resume or not has_checkpoint(folder):
            return 0
        loaded = load_checkpoint(folder, self._model.module, self._model.dense_optimizer)
        if loaded.extra != position:
            raise InvalidInputError(
                f"{loaded.path} was trained on other batches: {dict(loaded.extra)}, now it would be {position}"
            )
        self._print(f"resumed from {loaded.path}")
        return loaded.step or 0

    def _train(self, first: int, steps: int) -> float:
        """Train from one step to another, save checkpoints meanwhile, and return the examples of a second."""
        # A step has the same examples on any number of ranks: what was trained on is passed over.
        every = self._clicks.training_batches(self._env.rank, self._env.world_size)
        saving, rate, told_at = None, 0.0, time.perf_counter()
        start = told_at
        for number, examples in enumerate(islice(every, first, steps), first + 1):
            loss = self._model.train_step(Batch.of(examples, self._clicks.tables, self._device))
            if self._settings.checkpoint is not None and number % self._settings.checkpoint_every == 0:
                saving = save_checkpoint(
                    self._settings.checkpoint,
                    self._model.module,
                    self._model.dense_optimizer,
                    step=number,
                    extra=self._settings.data_position(),
                    keep=2,
                    asynchronous=True,
                )
            now = time.perf_counter()
            rate = (number - first) * self._settings.batch_size / (now - start)
            if number in (first + 1, steps) or now > told_at + _BETWEEN_LINES_S:
                self._print(f"training {number}/{steps}, loss {loss:.4f}, {rate:,.0f} examples/s")
                told_at = now
        if saving is not None:
            saving.wait()
        return rate

    def _evaluate(self) -> tuple[Tensor, Tensor, Tensor]:
        """Labels, probabilities and true probabilities of the held-out examples of all ranks."""
        pieces = []
        held_out = self._clicks.held_out_batches(
            self._settings.num_held_out, self._env.rank, self._env.world_size
        )
        for examples in held_out:
            batch = Batch.of(examples, self._clicks.tables, self._device)
            true = torch.from_numpy(examples.true_logits)
            logits = [batch.labels.cpu().double(), self._model.logits(batch).cpu().double(), true]
            pieces.append(torch.stack(logits))
        whole = torch.cat(self._env.communicator.all_gather_objects(torch.cat(pieces, dim=1)), dim=1)
        return whole[0].long(), whole[1].sigmoid(), whole[2].sigmoid()

    def _print(self, text: str) -> None:
        if self._env.rank == 0:
            print(text, flush=True)
