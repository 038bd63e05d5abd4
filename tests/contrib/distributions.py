"""The distributions next door, and the rules that hold for all of them.

They import public names only, and nothing of core or of a plugin is changed by having or using them.

`python -m tests.contrib.distributions` prints how many lines of code each has.
"""

from __future__ import annotations

import ast
import importlib
import sys
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from inspect import getattr_static
from pathlib import Path
from types import ModuleType
from typing import Any

from tests import stranger

import shardwright
from shardwright.host.plugin_host import GROUP

ROOT = Path(__file__).parents[2] / "contrib"
NAMES = sorted(path.parent.name for path in ROOT.glob("*/pyproject.toml"))
OURS = ("shardwright", "shardwright_plugins")
PARTS = ("by_fbgemm", "by_numba", "by_torch", "by_triton", "machine")
PUBLIC = (
    "shardwright",
    "shardwright.contracts",
    "shardwright.host",
    "shardwright.host.extensions",
    "shardwright_testing",
    "shardwright_plugins.arrow",
    "shardwright_plugins.compute_kernels.indexed_rows",
    "shardwright_plugins.compute_kernels.row_cache",
    "shardwright_plugins.dataflows",
    "shardwright_plugins.following",
    "shardwright_plugins.launch",
    "shardwright_plugins.measuring.steps",
    "shardwright_plugins.sharding_groups",
    *(f"shardwright_plugins.kernel_parts.{name}" for name in PARTS),
)
FUNCTIONS_AND_CLASSES = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_MISSING = object()


def project(name: str) -> dict[str, Any]:
    """The `[project]` table of a distribution."""
    return tomllib.loads((ROOT / name / "pyproject.toml").read_text())["project"]


def install(names: Iterable[str], target: Path) -> Path:
    """Have pip install distributions into a folder; the folder."""
    offline = ["--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check"]
    folders = [str(ROOT / name) for name in names]
    done = stranger.run_python("-m", "pip", "install", "--quiet", *offline, "--target", str(target), *folders)
    assert done.returncode == 0, done.stdout + done.stderr
    return target


def entry_points(name: str) -> list[EntryPoint]:
    """The plugins of a distribution, as if it were installed; its folder must be on the path."""
    listed = project(name).get("entry-points", {}).get(GROUP, {})
    return [EntryPoint(plugin, value, GROUP) for plugin, value in listed.items()]


def sources(name: str) -> list[Path]:
    """Its Python files: those of the package and nothing else."""
    return sorted(path for path in (ROOT / name).rglob("*.py") if "__pycache__" not in path.parts)


def lines_of_code(name: str) -> int:
    """Lines with code on them: no blank lines, comments or docstrings."""
    return sum(_lines_of_code(ast.parse(path.read_text())) for path in sources(name))


def _lines_of_code(tree: ast.AST) -> int:
    strings = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    lines = {
        line
        for node in ast.walk(tree)
        if hasattr(node, "lineno") and not isinstance(node, ast.Module)
        for line in (node.lineno, node.end_lineno)
    }
    return len(lines - strings)


def own_names(name: str) -> set[str]:
    """Everything that a distribution's files define: functions, classes, variables and attributes."""
    nodes = [node for path in sources(name) for node in ast.walk(ast.parse(path.read_text()))]
    defined = {node.name for node in nodes if isinstance(node, FUNCTIONS_AND_CLASSES)}
    variables = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    set_on_self = {
        node.attr
        for node in nodes
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value)
    }
    return defined | variables | set_on_self


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def insides_touched(source: str, own: set[str]) -> list[str]:
    """The attributes with an underscore that a source reads or sets and that are not `own`: insides of others."""
    attributes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)]
    return [
        ast.unparse(node)
        for node in attributes
        if node.attr.startswith("_") and not node.attr.startswith("__") and node.attr not in own
    ]


def words(tree: ast.AST) -> Iterator[str]:
    """Every string of a file, and every module that it imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.Import):
            yield from (name.name.partition(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]


def private_uses(source: str) -> list[str]:
    """What a source takes from shardwright that is not public.

    Public is what stands in the `__all__` of the package, its contracts, its host, its kit, and of the packages of
    built-ins that users import; the others are as private as anybody else's insides.
    """
    tree, found = ast.parse(source), []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and _is_ours(node.module):
            found += [
                f"{node.module}.{name.name}" for name in node.names if not _is_public(node.module, name.name)
            ]
        elif isinstance(node, ast.Import):
            found += [name.name for name in node.names if _is_ours(name.name) and name.name != "shardwright"]
    packages = _aliases(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in packages:
            name = f"shardwright.{node.attr}"
            found += [] if node.attr in shardwright.__all__ or name in PUBLIC else [name]
    return found


def _aliases(tree: ast.AST) -> set[str]:
    """What the package is called in a file."""
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    return {name.asname or name.name for node in imports for name in node.names if name.name == "shardwright"}


def _is_ours(module: str | None) -> bool:
    return (module or "").partition(".")[0] in OURS


def _is_public(module: str | None, name: str) -> bool:
    return module in PUBLIC and name in importlib.import_module(module).__all__


@contextmanager
def nothing_changes() -> Iterator[None]:
    """Check that no attribute of a module of core or the built-ins, or of a class of theirs, is another afterwards.

    Names that a lazy package or a cache adds are not changes; what was there must be what is there.
    """
    before = dict(_attributes())
    yield
    after = {name: getattr_static(owner, name[-1], _MISSING) for name, (owner, _) in before.items()}
    changed = sorted(
        ".".join(name) for name, (_, value) in before.items() if not _is_same(value, after[name])
    )
    assert not changed, f"changed: {changed}"


def _is_same(before: object, after: object) -> bool:
    # Bound methods and properties of classes are made anew at each look.
    return before is after or (not isinstance(before, type | ModuleType) and before == after)


def _attributes() -> Iterator[tuple[tuple[str, ...], tuple[object, object]]]:
    for module_name, module in sorted(sys.modules.items()):
        if module is None or not _is_ours(module_name):
            continue
        for name, value in list(vars(module).items()):
            if name.startswith("__"):
                continue
            yield (module_name, name), (module, value)
            if isinstance(value, type) and value.__module__ == module_name:
                yield from _class_attributes(module_name, value)


def _class_attributes(module: str, owner: type) -> Iterator[tuple[tuple[str, ...], tuple[object, object]]]:
    members: Mapping[str, object] = vars(owner)
    for name in list(members):
        if not name.startswith("_abc"):
            yield (module, owner.__name__, name), (owner, members[name])


def main() -> None:
    """Print the lines of code of each distribution, and where they are."""
    for name in NAMES:
        files = {path.name: _lines_of_code(ast.parse(path.read_text())) for path in sources(name)}
        parts = ", ".join(f"{file} {lines}" for file, lines in files.items() if lines)
        print(f"{name:<18} {sum(files.values()):5}  ({parts})")


if __name__ == "__main__":
    main()
