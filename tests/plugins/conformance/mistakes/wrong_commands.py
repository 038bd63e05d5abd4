"""Commands that are deliberately wrong, one mistake each. Apart from the other mutants, which import torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import shardwright as sw


class RightCommand(sw.Command):
    """Says nothing."""

    name = "right_command"
    help = "Say nothing."

    def load(self) -> Callable[..., Any]:
        return lambda: None


class LongHelp(RightCommand):
    name = "long_help"
    help = "Say nothing.\n\nAnd say it slowly."


class NameOfCore(RightCommand):
    name = "diff"


class LoadsNothing(RightCommand):
    name = "loads_nothing"

    def load(self) -> Any:
        return None
