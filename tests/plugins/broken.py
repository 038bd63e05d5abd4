"""Plugins that are right, to be given one answer that is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import shardwright as sw

TABLE = sw.TableSpec("user", 100, 16, ["u"])


class Kind(sw.ShardingType):
    """The whole table on rank 0."""

    name, abbreviation = "broken_type", "BT"

    def layouts(self, table: Any, topology: Any, constraints: Any) -> Any:
        return [sw.Layout([sw.Block(table.all_rows, table.all_columns, 0)])]


class Cost(sw.Estimator):
    """A millisecond a shard."""

    name, depends_on_shape_only = "broken_cost", True

    def estimate(self, options: Any, topology: Any) -> Any:
        return {"lookup": np.ones(options.num_shards)}


class Memory(sw.Estimator):
    """A byte a shard."""

    name, measures, depends_on_shape_only = "broken_memory", "storage", True

    def estimate(self, options: Any, topology: Any) -> Any:
        return {topology.tier_of("device"): np.ones(options.num_shards)}


class Search(sw.Proposer):
    """The first option of each table."""

    name = "broken_search"

    def proposals(self, space: Any) -> Any:
        yield space.options.first_option[:-1].copy()


class Yields(Search):
    """One thing that is said."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def proposals(self, space: Any) -> Any:
        yield self._value


class Place(sw.Partitioner):
    """Everything on rank 0."""

    name = "broken_place"

    def place(self, shards: Any) -> Any:
        return np.zeros(len(shards), dtype=np.int64)


class Kernel(sw.ComputeKernel):
    """Whatever is asked, as long as nothing is built."""

    name = "broken_kernel"

    def supports(self, request: Any) -> Any:
        return True

    def memory_bytes(self, request: Any, num_rows: int) -> Any:
        return {"device": 5 * num_rows}

    def build(self, blocks: Any, *, device: Any) -> Any:
        raise NotImplementedError


class Coded(sw.Codec):
    """Values as they are, a byte more a vector."""

    name = "broken_codec"

    def row_bytes(self, num_columns: int) -> Any:
        return 4 * num_columns + 1

    def encode(self, values: torch.Tensor, encoded: torch.Tensor) -> None:
        raise NotImplementedError

    def decode(self, encoded: torch.Tensor, values: torch.Tensor) -> None:
        raise NotImplementedError

    def error_bound(self, values: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


def answering(plugin: Any, method: str, answer: Callable[..., Any]) -> Any:
    """A plugin whose method answers otherwise."""
    changed = type(
        plugin.__name__, (plugin,), {method: lambda self, *args, **kwargs: answer(*args, **kwargs)}
    )
    return changed()


VALUES: dict[str, Callable[..., Any]] = {
    "None": lambda *_, **__: None,
    "True": lambda *_, **__: True,
    "0": lambda *_, **__: 0,
    "-1": lambda *_, **__: -1,
    "0.5": lambda *_, **__: 0.5,
    "nan": lambda *_, **__: float("nan"),
    "text": lambda *_, **__: "text",
    "[]": lambda *_, **__: [],
    "{}": lambda *_, **__: {},
    "{'a': None}": lambda *_, **__: {"a": None},
    "{'a': 'b'}": lambda *_, **__: {"a": "b"},
    "{1: 2}": lambda *_, **__: {1: 2},
    "{'device': -1}": lambda *_, **__: {"device": -1},
    "[None]": lambda *_, **__: [None],
    "['a']": lambda *_, **__: ["a"],
    "[[0], [1, 2]]": lambda *_, **__: [[0], [1, 2]],
    "[0.5]": lambda *_, **__: [0.5],
    "[999999]": lambda *_, **__: [999999],
    "an object": lambda *_, **__: object(),
    "a class": lambda *_, **__: int,
    "an iterator": lambda *_, **__: iter([np.zeros(1, dtype=np.int64)]),
    "a Placed": lambda *_, **__: sw.Placed(np.zeros(1, dtype=np.int64), None),  # type: ignore[arg-type]
    "raises": lambda *_, **__: [][0],
}
"""What plugins may answer that is wrong, for most methods."""

__all__ = [
    "TABLE",
    "VALUES",
    "Coded",
    "Cost",
    "Kernel",
    "Kind",
    "Memory",
    "Place",
    "Search",
    "Yields",
    "answering",
]
