"""Samples per second of a training loop."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright_torchrec.metrics.config import BatchSizeStage
from shardwright_torchrec.metrics.rec_metric import RecMetricException

__all__ = ["ThroughputMetric"]

_KEY = "throughput-throughput|"


class ThroughputMetric(torch.nn.Module):
    """Samples of all ranks per second: of all steps after the warm-up, of this run, and of the last seconds.

    Args:
        batch_size: samples of a batch on one rank.
        world_size: number of ranks.
        window_seconds: length of the window, s.
        warmup_steps: steps whose time does not count.
        batch_size_stages: batch sizes that follow each other, by step.

    Raises:
        InvalidInputError: window or warm-up are not positive.
    """

    def __init__(
        self,
        *,
        batch_size: int,
        world_size: int,
        window_seconds: int,
        warmup_steps: int = 100,
        batch_size_stages: Sequence[BatchSizeStage] | None = None,
    ) -> None:
        super().__init__()
        if window_seconds < 1 or warmup_steps < 1:
            raise RecMetricException(
                f"window_seconds and warmup_steps are from 1 on, got {window_seconds} and {warmup_steps}"
            )
        self._batch_size, self._world_size = batch_size, world_size
        self._window_seconds, self._warmup_steps = window_seconds, warmup_steps
        self._stages = list(batch_size_stages or ())
        self._steps, self._num_batch, self._last = 0, 0, 0.0
        self._window: deque[tuple[float, int]] = deque()
        for prefix, is_saved in (("", True), ("attempt_", False)):
            self.register_buffer(self._total(prefix), torch.tensor(0), persistent=is_saved)
            self.register_buffer(f"{prefix}warmup_examples", torch.tensor(0), persistent=is_saved)
            zero = torch.tensor(0, dtype=torch.float64)
            self.register_buffer(f"{prefix}time_lapse_after_warmup", zero, persistent=is_saved)

    @staticmethod
    def _total(prefix: str) -> str:
        return f"{prefix or 'total_'}examples"

    def set_num_batch(self, num_batch: int) -> None:
        """Set the number of batches so far, by which a stage's batch size is chosen."""
        self._num_batch = num_batch

    def _examples(self) -> int:
        """Samples of this step, of all ranks."""
        sizes = (
            stage.batch_size
            for stage in self._stages
            if stage.max_iters is None or self._num_batch <= stage.max_iters
        )
        return next(sizes, self._batch_size) * self._world_size

    def update(self) -> None:
        """Count a step."""
        now = time.monotonic()
        self._steps, self._num_batch = self._steps + 1, self._num_batch + 1
        examples, is_warm = self._examples(), self._steps > self._warmup_steps
        for prefix in ("", "attempt_"):
            getattr(self, self._total(prefix)).add_(examples)
            if is_warm:
                getattr(self, f"{prefix}time_lapse_after_warmup").add_(now - self._last)
            else:
                getattr(self, f"{prefix}warmup_examples").add_(examples)
        if is_warm:
            self._window.append((now - self._last, examples))
            while sum(seconds for seconds, _ in self._window) > self._window_seconds:
                self._window.popleft()
        self._last = now

    def compute(self) -> dict[str, Tensor]:
        """Samples so far and, after the warm-up, samples per second."""
        values = {
            f"{_KEY}total_examples": self.total_examples.clone(),
            f"{_KEY}attempt_examples": self.attempt_examples.clone(),
        }
        if self._stages:
            values[f"{_KEY}batch_size"] = torch.tensor(self._examples() // self._world_size)
        if self._steps > self._warmup_steps:
            seconds = sum(taken for taken, _ in self._window)
            windows = sum(examples for _, examples in self._window) / seconds if seconds else 0.0
            values |= {
                f"{_KEY}lifetime_throughput": self._rate(""),
                f"{_KEY}window_throughput": torch.tensor(windows, dtype=torch.float64),
                f"{_KEY}attempt_throughput": self._rate("attempt_"),
            }
        return values

    def _rate(self, prefix: str) -> Any:
        examples = getattr(self, self._total(prefix)) - getattr(self, f"{prefix}warmup_examples")
        seconds = getattr(self, f"{prefix}time_lapse_after_warmup")
        return torch.where(seconds == 0, 0.0, examples / seconds)
