"""The optimizer of the page for authors: a rule that no built-in plugin knows."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Any

from shardwright.contracts import Optimizer


def acme_ftrl() -> Optimizer:
    """FTRL as the page on optimizers writes it."""
    page = (files("shardwright") / "docs/authors/optimizer.md").read_text()
    found = re.search(r"```python acme_ftrl\.py\n(.*?)```", page, re.DOTALL)
    assert found is not None
    names: dict[str, Any] = {}
    exec(found.group(1), names)
    made: Optimizer = names["AcmeFtrl"]()
    return made
