"""Words that only this project's authors understand, with what to write instead.

They are looked for in pages, docstrings of public names, help texts and errors. `python -m tests.packages.words` prints
each place.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

import shardwright
import shardwright_testing
from shardwright.cli import app

ROOT = Path(__file__).parents[2]

INSTEAD = {
    r"\bdear(er|est)\b": "slowest, most expensive",
    r"\btold\b": "given, notified, or name the subject: 'is called with'",
    r"\bas (it|they) (was|were)\b|\bas things are\b": "unchanged",
    r"\bof (yours|ours|mine|theirs|one's own)\b": "your own, or the library's",
    r"\banew\b": "again, from scratch",
    r"\bwhat is there\b": "what is installed, what exists",
    r"\bbears? (the|that|its|no|their)\b": "has, holds",
    r"\bnobody\b": "no rank, no caller: name the subject",
    r"\b(come|comes|take|takes|brings?|go|straight|at|way) home\b|\bhomecoming\b": "return",
    r"\b(on|from|for|the) (its|their|the) way\b|\bthe way back\b": "while it is sent",
    r"\bunder way\b": "in progress",
    r"\bin a way of\b": "by your own ...",
    r"\b(is|are|be) no more\b": "no longer",
    r"\bshall\b": "must, will",
    r"\breckon": "compute, count",
    r"\blast resort\b": "fallback",
    r"@@|\bTODO\b|\bTBD\b": "what the placeholder stands for",
    r"\band its like\b|\bthe like\b": "and similar ones",
}
_CODE = re.compile(r"```.*?^```|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def pages() -> Iterator[tuple[str, str]]:
    """Prose of each page, without code, by its path."""
    for path in [
        ROOT / "README.md",
        *(page for name in ("core", "plugins", "contrib") for page in (ROOT / name).rglob("*.md")),
    ]:
        yield str(path.relative_to(ROOT)), _CODE.sub("", path.read_text())


def docstrings() -> Iterator[tuple[str, str]]:
    """Docstrings of public names and of their public members, by name."""
    for package in (shardwright, shardwright_testing):
        for name in package.__all__:
            found = getattr(package, name)
            yield name, inspect.getdoc(found) or ""
            for kind in found.__mro__ if inspect.isclass(found) else ():
                for member in vars(kind) if kind.__module__.startswith("shardwright") else ():
                    if not member.startswith("_"):
                        yield f"{name}.{member}", inspect.getdoc(getattr(found, member)) or ""


def help_texts() -> Iterator[tuple[str, str]]:
    """Help of every command and option, by the command's words."""

    def below(words: str, command: Any) -> Iterator[tuple[str, str]]:
        yield words, command.help or ""
        for option in command.params:
            yield f"{words} {option.name}", getattr(option, "help", None) or ""
        for name in command.list_commands(None) if isinstance(command, typer.core.TyperGroup) else ():
            # Of a plugin's command the list has a stand-in.
            inner = command.commands.get(name) or command.resolve_command(None, [name])[1]
            yield from below(f"{words} {name}", inner)

    yield from below("shardwright", typer.main.get_command(app))


def errors() -> Iterator[tuple[str, str]]:
    """Texts of errors, by place: all strings below a ``raise``."""
    for path in [source for name in ("core", "plugins") for source in (ROOT / name).rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Raise):
                for inner in ast.walk(node):
                    if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
                        yield f"{path.relative_to(ROOT)}:{inner.lineno}", inner.value


def found() -> list[str]:
    """Each use of such a word, with its place and what to write instead."""
    return [
        f"{place}: {match[0]!r} in '...{text[max(match.start() - 60, 0) : match.end() + 40]}...': write {instead}"
        for texts in (pages(), docstrings(), help_texts(), errors())
        for place, text in texts
        for word, instead in INSTEAD.items()
        for match in re.finditer(word, text, re.IGNORECASE)
    ]


if __name__ == "__main__":
    print(*(one.replace("\n", " ") for one in found()), sep="\n")
