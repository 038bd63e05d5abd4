"""Hooks of mkdocs and griffe: a site of the pages that lie with their packages, and of docstrings with real signatures.

Sources keep their paths in the repository, so that links between pages work in both; only addresses are shorter.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
import typer
from attrs import NOTHING
from mkdocs.structure.files import File, Files, InclusionLevel
from typer.cli import get_docs_for_click

from shardwright.cli import app

ROOT = Path(__file__).parents[1]
FOLDERS = ("core/shardwright/docs", "plugins/shardwright_plugins/docs")
"""Folders whose pages are those of the site, by the same paths."""

COMMANDS = "core/shardwright/docs/reference/environment.md"
"""Page below which the options of all commands stand."""

_LINK = re.compile(r"\[(?P<text>[^\]]*)\]\((?P<target>[^)#:\s]+)(?P<anchor>#[^)]*)?\)")
_NAMED_FENCE = re.compile(r"^```(\w+) (.+)$", re.MULTILINE)
_ROLE = re.compile(r":\w+:`~?(?:[\w.]+\.)?(\w+)`")
_EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)


def pages() -> dict[str, str]:
    """Each page by its path in the repository, with its address in the site."""
    found = {
        "README.md": "index.html",
        "CHANGELOG.md": "changelog.html",
        "CONTRIBUTING.md": "contributing.html",
    }
    for folder in (*FOLDERS, *sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("contrib/*/*/docs"))):
        for path in sorted((ROOT / folder).rglob("*.md")):
            inner = path.relative_to(ROOT / folder).with_suffix(".html").as_posix()
            found[path.relative_to(ROOT).as_posix()] = inner if folder in FOLDERS else f"contrib/{inner}"
    for path in sorted((ROOT / "contrib").rglob("README.md")):
        found[path.relative_to(ROOT).as_posix()] = f"{path.parent.relative_to(ROOT).as_posix()}.html"
    return found


def links(path: str, text: str) -> Iterator[tuple[re.Match[str], str]]:
    """Links of a page to what is in the repository, each with the path of its target there."""
    for match in _LINK.finditer(text):
        yield match, posixpath.normpath(posixpath.join(posixpath.dirname(path), match["target"]))


def on_files(files: Files, config: Any) -> Files:
    """The pages, the files that they link, and nothing else."""
    site = Files([file for file in files if file.src_uri.startswith("assets/")])
    known = pages()
    linked = {
        target for path in known for _, target in links(path, (ROOT / path).read_text(encoding="utf-8"))
    }
    others = {target: f"files/{target}" for target in linked - known.keys() if (ROOT / target).is_file()}
    for path, address in {**known, **others}.items():
        places = (path, str(ROOT), config.site_dir, config.use_directory_urls)
        site.append(File(*places, dest_uri=address, inclusion=InclusionLevel.INCLUDED))
    return site


def on_page_markdown(markdown: str, page: Any, **others: Any) -> str:
    """Names of code blocks as titles, links to folders as their texts; notebooks' cells and commands' options below."""
    for match, target in links(page.file.src_uri, markdown):
        if (ROOT / target).is_dir():
            markdown = markdown.replace(match[0], match["text"])
        elif target.endswith(".ipynb"):
            markdown += _cells(ROOT / target)
    if page.file.src_uri == COMMANDS:
        markdown += _options()
    return _NAMED_FENCE.sub(r'```\1 title="\2"', markdown)


def _options() -> str:
    """The help of every command, as Typer writes it for pages."""
    group = typer.main.get_command(app)
    context = group.make_context("shardwright", ["doctor"])
    found = [group.resolve_command(context, [name]) for name in group.list_commands(context)]
    texts = (
        get_docs_for_click(obj=command, ctx=context, indent=2, name=name or "", call_prefix="shardwright")
        for name, command, _ in found
    )
    return "\n\n## Options of each command\n\n" + "\n".join(texts)


def _cells(notebook: Path) -> str:
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    texts = [(cell["cell_type"], "".join(cell["source"])) for cell in cells]
    return "".join(
        f"\n\n```python\n{text}\n```\n" if kind == "code" else f"\n\n{re.sub('^# ', '## ', text)}\n"
        for kind, text in texts
    )


class Docstrings(griffe.Extension):
    """Signatures of attrs classes, which they have when they are made, and roles of Sphinx as Markdown."""

    def on_class(self, *, cls: griffe.Class, **others: Any) -> None:
        """Give an attrs class the signature that `help()` shows."""
        if "__init__" in cls.members or not any(
            "frozen" in str(one.value) or "define" in str(one.value) for one in cls.decorators
        ):
            return
        made = importlib.import_module(cls.module.path)
        for name in cls.path.removeprefix(f"{cls.module.path}.").split("."):
            made = getattr(made, name)
        signature = inspect.signature(made)
        parameters = [griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)]
        for one in signature.parameters.values():
            default = (
                None if one.default is one.empty else "..." if one.default is NOTHING else repr(one.default)
            )
            kind = griffe.ParameterKind[one.kind.name.lower()]
            parameters.append(
                griffe.Parameter(
                    one.name, annotation=_expression(one.annotation, cls), kind=kind, default=default
                )
            )
        init = griffe.Function("__init__", parameters=griffe.Parameters(*parameters), parent=cls)
        cls.set_member("__init__", init)

    def on_object(self, *, obj: griffe.Object, **others: Any) -> None:
        """Turn ``:class:`Name``` into `Name`, a link where it is public."""
        if obj.docstring is not None:
            text = _ROLE.sub(r"`\1`", obj.docstring.value)
            obj.docstring.value = _EXAMPLE.sub("Examples:", text)


def _expression(annotation: Any, cls: griffe.Class) -> Any:
    if not isinstance(annotation, str):
        return None if annotation is inspect.Parameter.empty else str(annotation)
    return griffe.safe_get_expression(ast.parse(annotation, mode="eval").body, parent=cls)
