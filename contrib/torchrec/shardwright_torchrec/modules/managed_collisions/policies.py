"""Rules that say which ids keep a row of their own.

Legend: N ids that compete for rows. Higher scores stay; of equal ones, those that have a row already.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

ThresholdFilter = Callable[[Tensor], tuple[Tensor, "float | Tensor"]]


class MCHEvictionPolicy(ABC):
    """A score of each id, from its uses and its last one.

    Args:
        threshold_filtering_func: function of the counts of an interval's ids ``[N]``, which gives a mask of those that
            count, and the threshold.
    """

    uses_counts: bool = True
    uses_last_access: bool = True

    def __init__(self, threshold_filtering_func: ThresholdFilter | None = None) -> None:
        self.threshold_filtering_func = threshold_filtering_func

    @abstractmethod
    def scores(self, counts: Tensor, last_access: Tensor, step: int) -> Tensor:
        """Scores of ids ``[N]``.

        Args:
            counts: uses of each id ``[N]``.
            last_access: step of each id's last use ``[N]``.
            step: the step that this is.
        """


class LFU_EvictionPolicy(MCHEvictionPolicy):
    """Least frequently used: the score is the number of uses."""

    uses_last_access = False

    def scores(self, counts: Tensor, last_access: Tensor, step: int) -> Tensor:
        """Uses of each id."""
        return counts


class _Decaying(MCHEvictionPolicy):
    """A score that falls with the steps since the last use.

    Args:
        decay_exponent: power of the steps.
        threshold_filtering_func: see `MCHEvictionPolicy`.
    """

    def __init__(
        self, decay_exponent: float = 1.0, threshold_filtering_func: ThresholdFilter | None = None
    ) -> None:
        super().__init__(threshold_filtering_func)
        self._decay_exponent = decay_exponent

    def _distance(self, last_access: Tensor, step: int) -> Tensor:
        return torch.pow(step - last_access + 1, self._decay_exponent)


class LRU_EvictionPolicy(_Decaying):
    """Least recently used: the score is minus the steps since the last use."""

    uses_counts = False

    def scores(self, counts: Tensor, last_access: Tensor, step: int) -> Tensor:
        """Minus the decayed distance of the last use."""
        return -self._distance(last_access, step)


class DistanceLFU_EvictionPolicy(_Decaying):
    """Uses over the steps since the last one."""

    def scores(self, counts: Tensor, last_access: Tensor, step: int) -> Tensor:
        """Uses over the decayed distance of the last one."""
        return counts / self._distance(last_access, step)


def average_threshold_filter(id_counts: Tensor) -> tuple[Tensor, Tensor]:
    """Mask of ids ``[N]`` that are used more than the mean, and the mean."""
    threshold = id_counts.float().mean()
    return id_counts > threshold, threshold


def dynamic_threshold_filter(
    id_counts: Tensor, threshold_skew_multiplier: float = 10.0
) -> tuple[Tensor, Tensor]:
    """Mask of ids ``[N]`` used as often as a multiple of the mean share of them, and that threshold.

    Args:
        id_counts: uses of each id ``[N]``.
        threshold_skew_multiplier: the multiple.
    """
    threshold = id_counts.sum() * (threshold_skew_multiplier / id_counts.numel())
    return id_counts > threshold, threshold


def probabilistic_threshold_filter(
    id_counts: Tensor, per_id_probability: float = 0.01
) -> tuple[Tensor, Tensor]:
    """Mask of ids ``[N]``: each use of an id chooses it with a probability.

    Args:
        id_counts: uses of each id ``[N]``.
        per_id_probability: probability that one use chooses the id.
    """
    chance = 1 - torch.pow(torch.full_like(id_counts, 1 - per_id_probability, dtype=torch.float32), id_counts)
    threshold = torch.rand(len(id_counts), device=id_counts.device)
    return chance > threshold, threshold
