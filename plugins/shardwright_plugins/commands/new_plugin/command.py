"""`shardwright plugin new`: a distribution with one plugin, its tests, and nothing else."""

from __future__ import annotations

import importlib.util
import keyword
import re
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any

import typer

from shardwright.errors import DuplicateNameError, InvalidInputError, UnknownNameError, nearest
from shardwright.hookspecs import KINDS
from shardwright.host.offers import Kind, qualified

_TEMPLATES = files("shardwright_plugins.commands.new_plugin") / "templates"

_KINDS = {kind.name: kind for kind in KINDS}

plugin = typer.Typer(help="Write plugins.", no_args_is_help=True)


@plugin.callback()
def _plugin() -> None:
    """Write plugins."""


@plugin.command()
def new(
    name: Annotated[str, typer.Argument(help="What planner and report call it, such as round_robin.")],
    kind: Annotated[str, typer.Option(help=f"What it is: {', '.join(_KINDS)}.")],
    output: Annotated[Path, typer.Option(help="The folder to write; it must not exist, or be empty.")],
) -> None:
    """Write a distribution that installs and passes the conformance kit, to be changed into what you want."""
    _check_name_is_free(name, kind)
    for path, text in distribution(name, kind).items():
        target = output / path
        _check_free(output, target)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text)
    typer.echo(f"Wrote {output}. Try: pip install -e '{output}[test]' && pytest {output}")


def distribution(name: str, kind: str) -> dict[str, str]:
    """The files of a distribution, by path.

    Raises:
        InvalidInputError: the name is no name for a module.
        UnknownNameError: there is no such kind.
    """
    row = _known_kind(kind)
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise InvalidInputError(
            f"the name {name!r} must begin with a small letter and have small letters, digits and _ only, as "
            "round_robin has: it is also the name of a module"
        )
    words, package = _words(name, row), f"shardwright_{name}"
    sources = {
        f"{package}/{file.name.removesuffix('.txt')}": file for file in (_TEMPLATES / row.template).iterdir()
    }
    sources |= {f"tests/test_{name}.py": _TEMPLATES / "test.txt"}
    sources |= {"pyproject.toml": _TEMPLATES / "pyproject.txt", "README.md": _TEMPLATES / "readme.txt"}
    return {path: _filled(template.read_text(), words) for path, template in sorted(sources.items())}


def _known_kind(kind: str) -> Kind[Any]:
    name = kind.replace("-", "_").replace(" ", "_")
    if name not in _KINDS:
        raise UnknownNameError(f"no kind {name!r}. Known: {', '.join(_KINDS)}.{nearest(name, _KINDS)}")
    return _KINDS[name]


def _check_name_is_free(name: str, kind: str) -> None:
    """Check that what is written could be used beside what is installed.

    Raises:
        DuplicateNameError: something of that kind has the name, or the module has another distribution's name.
    """
    from shardwright.host.plugin_host import host

    registry = host().registry_of(_known_kind(kind).contract)
    if name in registry:
        entry = registry.entry(name)
        raise DuplicateNameError(
            f"the {registry.kind.title} {name!r} is there already: {qualified(entry.item)} of plugin "
            f"{entry.provenance}. Two of one name cannot be used beside each other; give yours another."
        )
    package = f"shardwright_{name}"
    if importlib.util.find_spec(package) is not None:
        raise DuplicateNameError(
            f"the module of a plugin {name!r} would be {package}, and a module of that name is installed already; "
            "give yours another name"
        )


def _words(name: str, kind: Kind[Any]) -> dict[str, str]:
    parts = [part for part in name.split("_") if part]
    if keyword.iskeyword("".join(parts).capitalize()):  # None, True and False are no names of classes
        parts += kind.name.split("_")
    return {
        "ABBREVIATION": ("".join(part[0] for part in parts) + parts[0][1:] + "X").upper()[:2],
        "CLASS": "".join(part.capitalize() for part in parts),
        "DISTRIBUTION": f"shardwright_{name}",
        "FIXTURE": kind.name,
        "KIND": kind.title,
        "NAME": name,
        "PROJECT": f"shardwright-{name.replace('_', '-')}",
        "TESTS": kind.kit.rpartition(".")[2],
    }


def _filled(text: str, words: dict[str, str]) -> str:
    return re.sub("|".join(words), lambda found: words[found[0]], text)


def _check_free(output: Path, target: Path) -> None:
    taken = output if output.exists() and not output.is_dir() else target
    if taken.exists():
        raise InvalidInputError(f"{taken} exists already. Give another --output than {output}, or remove it.")
