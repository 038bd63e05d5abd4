"""Training that is measured beside its plan, and a plan that follows the data."""

from shardwright_plugins.following.replanner import Look, Replanner
from shardwright_plugins.following.step_times import StepTimes
from shardwright_plugins.following.times import GroupTimes, MeasuredTimes, RankTimes

__all__ = ["GroupTimes", "Look", "MeasuredTimes", "RankTimes", "Replanner", "StepTimes"]
