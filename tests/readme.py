"""The README, or another page, as tests read it: its fenced blocks, by the name after the language.

`python -m tests.readme` writes what the page on plugins says of their kinds anew.
"""

from __future__ import annotations

import inspect
import re
import runpy
import textwrap
from pathlib import Path

import pytest
from attrs import frozen

from shardwright import hookspecs
from shardwright.cli.plugins import page_of

README = Path(__file__).parents[1] / "README.md"
CORE_DOCS = README.parent / "core/shardwright/docs"
BUILT_INS = README.parent / "plugins/shardwright_plugins/docs/built_ins.md"
PLUGINS = CORE_DOCS / "authors/plugins.md"

_FENCED = re.compile(r"^```(?P<language>\w+) ?(?P<name>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
_SPACE = "\N{NO-BREAK SPACE}"  # a link stays on one line
_HOOKS = re.compile(r"(^```python hooks\n).*?(^```$)", re.MULTILINE | re.DOTALL)
_PAGES = re.compile(r"(how to test it:\n).*?(\.\n\[Versions\])", re.DOTALL)
_ROW = re.compile(r"^\| (?P<kind>[a-z ]+) \| `(?P<name>[\w:]+)` \| .+ \|$", re.MULTILINE)


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


def check_output(name: str, page: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Run the program of this name from a folder; it prints what the page says it prints."""
    (folder / name).write_text(source(name, page))
    runpy.run_path(str(folder / name))
    assert capsys.readouterr().out == output_of(name, page)


def built_ins() -> list[tuple[str, str]]:
    """Kind and name of each row of the table of built-ins."""
    return [(row["kind"], row["name"]) for row in _ROW.finditer(BUILT_INS.read_text())]


def with_kinds(text: str) -> str:
    """The page on plugins with the hooks and the pages of the kinds as they are."""
    text = _HOOKS.sub(lambda found: found[1] + _hooks() + found[2], text)
    return _PAGES.sub(lambda found: found[1] + _pages() + found[2], text)


def _hooks() -> str:
    # Annotations are texts, which a signature shows with quotes.
    signatures = [
        f"def {kind.hook}{inspect.signature(getattr(hookspecs, kind.hook))}" for kind in hookspecs.KINDS
    ]
    return "".join(line.replace("'", "") + "\n" for line in signatures)


def _pages() -> str:
    links = [f"[{kind.title}s]({page_of(kind).name})".replace(" ", _SPACE) for kind in hookspecs.KINDS]
    filled = textwrap.fill(", ".join(links), 120, break_long_words=False, break_on_hyphens=False)
    return filled.replace(_SPACE, " ")


if __name__ == "__main__":
    PLUGINS.write_text(with_kinds(PLUGINS.read_text()))
