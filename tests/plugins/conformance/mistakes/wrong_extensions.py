"""Extensions that are deliberately wrong, one mistake each. Apart from the other mutants, which import torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs

import shardwright as sw
from shardwright.planning.tables.constraints import Constraints


class RightExtension(sw.Extension):
    """Says nothing."""

    name = "command:right"
    help = "Say nothing."

    def load(self) -> Callable[..., Any]:
        return lambda: None


class LongHelp(RightExtension):
    name = "command:long_help"
    help = "Say nothing.\n\nAnd say it slowly."


class NameOfCore(RightExtension):
    name = "command:plan"


class LosesTables(RightExtension):
    name = "report:titles"

    def load(self) -> Callable[..., Any]:
        return lambda data, title: title


class NoFinding(RightExtension):
    name = "check:words"

    def load(self) -> Callable[..., Any]:
        return lambda: ["fine"]


class NoSharder(RightExtension):
    name = "sharder:words"

    def load(self) -> Callable[..., Any]:
        return lambda: "fine"


class BelievesAnything(RightExtension):
    name = "proof:anything"

    def load(self) -> Callable[..., Any]:
        return lambda space, z_ms, data, watch: ""


class OtherEachTime(RightExtension):
    name = "refinement:other_each_time"
    calls = 0

    def load(self) -> Callable[..., Any]:
        def make() -> Callable[..., Any]:
            OtherEachTime.calls += 1
            rank = OtherEachTime.calls % 2

            def refine(search: Any, request: Any, watch: Any) -> Any:
                rules = Constraints({"*": sw.ParameterConstraints(sharding_types=["table_wise"], ranks=rank)})
                return search(attrs.evolve(request, constraints=rules), watch)

            return refine

        return make


class LoadsNothing(RightExtension):
    name = "command:loads_nothing"

    def load(self) -> Any:
        return None
