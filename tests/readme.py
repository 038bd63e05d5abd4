"""The README, or another page, as tests read it: its fenced blocks, by the name after the language."""

from __future__ import annotations

import re
from pathlib import Path

from attrs import frozen

README = Path(__file__).parents[1] / "README.md"

_FENCED = re.compile(r"^```(?P<language>\w+) ?(?P<name>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_ROW = re.compile(r"^\| (?P<kind>[a-z ]+) \| `(?P<name>\w+)` \| .+ \|$", re.MULTILINE)


@frozen
class Block:
    """One fenced block; ``name`` is empty where the fence gives none."""

    language: str
    name: str
    text: str


def blocks(page: Path = README) -> list[Block]:
    """All fenced blocks, in order."""
    return [Block(**match.groupdict()) for match in _FENCED.finditer(page.read_text())]


def source(name: str, page: Path = README) -> str:
    """The text of the only block of this name."""
    (block,) = (block for block in blocks(page) if block.name == name)
    return block.text


def output_of(name: str, page: Path = README) -> str:
    """The text block that follows the block of this name: what the page says it prints."""
    shown = blocks(page)
    following = shown[[block.name for block in shown].index(name) + 1]
    assert following.language == "text", f"after {name} comes {following}"
    return following.text


def built_ins() -> list[tuple[str, str]]:
    """Kind and name of each row of the table of built-ins."""
    return [(row["kind"], row["name"]) for row in _ROW.finditer(README.read_text())]
