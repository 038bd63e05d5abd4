"""Times of shards, fitted to measurements by any regressor of scikit-learn, for shardwright's planner."""

from __future__ import annotations

from shardwright_learned.estimator import LearnedEstimator
from shardwright_learned.measurements import Measurement
from shardwright_learned.measuring import measure

__all__ = ["LearnedEstimator", "Measurement", "measure"]
