"""Pipelines of training, whose stages overlap: the next batch's ids travel while this one is computed."""

from __future__ import annotations

from shardwright.contracts import Extension
from shardwright.hookspecs import hookimpl
from shardwright_plugins.imported import names_of


@hookimpl
def shardwright_extensions() -> list[type[Extension]]:
    """Offer the pipelines."""
    return [
        names_of(
            "names:pipelines",
            ("shardwright_plugins.pipeline.stages", "shardwright_plugins.pipeline.train_pipeline"),
            "Pipelines of training, whose stages overlap.",
        )
    ]
