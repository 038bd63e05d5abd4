"""Metrics of the held-out examples that are means over all ranks, by torchmetrics."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

__all__ = ["ClickMetrics"]


class ClickMetrics:
    """Normalized entropy and calibration (He et al. 2014, "Practical lessons from predicting clicks on ads").

    Each rank updates them with its own examples, and takes part in :meth:`compute`, which adds up over the ranks.

    Args:
        device: Of the logits.
    """

    def __init__(self, device: torch.device) -> None:
        from torchmetrics import MeanMetric  # of the extra ``demo``

        self._loss, self._clicked, self._predicted = (
            MeanMetric().set_dtype(torch.float64).to(device) for _ in range(3)
        )

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Count examples.

        Args:
            logits: [B] float64.
            labels: [B], 0 or 1.
        """
        if not len(labels):
            return
        labels = labels.to(logits)
        self._loss.update(binary_cross_entropy_with_logits(logits, labels, reduction="none"))
        self._clicked.update(labels)
        self._predicted.update(logits.sigmoid())

    def compute(self) -> tuple[float | None, float | None]:
        """Return normalized entropy and calibration, of all ranks' examples; every rank makes this call.

        Normalized entropy is the mean cross entropy over that of the share of clicks, below 1 for a model that knows
        something. Calibration is the mean prediction over that share. Both are None if all have one label.
        """
        loss, clicked, predicted = (
            metric.compute() for metric in (self._loss, self._clicked, self._predicted)
        )
        if not 0 < float(clicked) < 1:
            return None, None
        entropy = torch.special.entr(clicked) + torch.special.entr(1 - clicked)
        return float(loss / entropy), float(predicted / clicked)
