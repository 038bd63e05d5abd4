"""Extensions that are deliberately wrong, one mistake each. Apart from the other mutants, which import torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import shardwright as sw


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
    name = "command:diff"


class LosesTables(RightExtension):
    name = "report:titles"

    def load(self) -> Callable[..., Any]:
        return lambda data, title: title


class LoadsNothing(RightExtension):
    name = "command:loads_nothing"

    def load(self) -> Any:
        return None
