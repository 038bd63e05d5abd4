"""Pipelines of training, whose stages overlap: the next batch's ids travel while this one is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from shardwright.contracts import Extension
from shardwright.hookspecs import hookimpl


class Pipelines(Extension):
    """Runs training loops in stages that overlap: `shardwright.TrainPipelineSparseDist` and its stages."""

    name = "names:pipelines"
    help = "Pipelines of training, whose stages overlap."

    def load(self) -> Callable[[str], Any]:
        """The function that gives what has a public name."""
        from shardwright_plugins.pipeline import stages, train_pipeline

        return (vars(stages) | vars(train_pipeline)).__getitem__


@hookimpl
def shardwright_extensions() -> list[type[Extension]]:
    """Offer the pipelines."""
    return [Pipelines]
