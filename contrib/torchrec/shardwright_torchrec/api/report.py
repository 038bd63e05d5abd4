"""`python -m shardwright_torchrec api`: names and signatures that scripts use, here and in an installed TorchRec."""

from __future__ import annotations

import argparse
import inspect
import json
import typing
from collections import Counter
from collections.abc import Iterator, Sequence
from enum import Enum
from importlib import import_module, resources
from typing import Any

import attrs

from shardwright_torchrec.api.contract import CONTRACT
from shardwright_torchrec.api.left_out import LEFT_OUT
from shardwright_torchrec.installed import torchrec_module
from shardwright_torchrec.names import PATHS, find

__all__ = ["Compared", "compare", "main", "markdown", "public_imports"]

SAME, DIFFERENT, MISSING, UNRESOLVED = "same", "different", "missing", "hints"
_Variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


@attrs.frozen
class _Missing:
    """A name that is not here; `reason`, if any, names the package without which it cannot be imported."""

    reason: str = ""


@attrs.frozen
class Compared:
    """Comparison of one of TorchRec's names with the name here.

    Args:
        name: module path and name, `"torchrec.optim.keyed.KeyedOptimizer.init_state"`.
        kind: `"contract"`, a signature that TorchRec promises to keep, or `"import"`, a name that scripts import.
        state: `"same"`, `"different"` (the signature), `"missing"`, or `"hints"` (the type hints do not resolve).
        theirs: TorchRec's signature, where it differs.
        ours: the signature here, or the reason why a name that should be here is missing.
    """

    name: str
    kind: str
    state: str
    theirs: str = ""
    ours: str = ""


def compare() -> list[Compared]:
    """All of the contract, then all imports.

    Raises:
        UnsupportedError: TorchRec is not installed.
    """
    return [*_contract(), *_imports()]


def public_imports() -> list[tuple[str, str]]:
    """Names that scripts import: module path and name; ones that TorchRec no longer has are among them."""
    text = (resources.files(__package__) / "imports.txt").read_text()
    lines = [line.split() for line in text.splitlines() if line and not line.startswith("#")]
    return [(module, name) for module, *names in lines for name in names]


def _contract() -> Iterator[Compared]:
    for module, names in CONTRACT.items():
        theirs = torchrec_module(module)
        for name, methods in names.items():
            own = _found(module, name)
            if not methods:
                yield _compared(f"{module}.{name}", getattr(theirs, name), own)
            for method in methods:
                mine = own if isinstance(own, _Missing) else getattr(own, method, _Missing())
                yield _compared(f"{module}.{name}.{method}", getattr(getattr(theirs, name), method), mine)


def _imports() -> Iterator[Compared]:
    for module, name in public_imports():
        own = _found(module, name)
        is_missing = isinstance(own, _Missing)
        reason = own.reason if is_missing else ""
        yield Compared(f"{module}.{name}", "import", MISSING if is_missing else SAME, ours=reason)


def _found(module: str, name: str) -> Any:
    if f"{module}.{name}" in PATHS:
        return None  # a module
    try:
        return find(module, name)
    except AttributeError:
        return _Missing()
    except ImportError as error:  # of a package that it needs
        return _Missing(f"cannot be imported: {error}")


def _compared(name: str, theirs: Any, ours: Any) -> Compared:
    if isinstance(ours, _Missing):
        return Compared(name, "contract", MISSING, _text(theirs), ours.reason)
    if not inspect.isroutine(theirs):
        return Compared(name, "contract", SAME)
    if not _is_same(inspect.signature(theirs), inspect.signature(ours)):
        return Compared(name, "contract", DIFFERENT, _text(theirs), _text(ours))
    try:
        typing.get_type_hints(ours)
    except NameError as error:
        return Compared(name, "contract", UNRESOLVED, ours=str(error))
    return Compared(name, "contract", SAME)


def _is_same(theirs: inspect.Signature, ours: inspect.Signature) -> bool:
    """True if each call that fits theirs fits ours: names, order, kinds and defaults; ours may have further ones."""
    mine = list(ours.parameters.values())
    wanted = list(theirs.parameters.values())
    further = mine[len(wanted) :]
    return all(map(_is_same_parameter, wanted, mine)) and (
        len(wanted) <= len(mine)
        and all(one.default is not one.empty or one.kind in _Variadic for one in further)
    )


def _is_same_parameter(theirs: inspect.Parameter, ours: inspect.Parameter) -> bool:
    same = (theirs.name, theirs.kind) == (ours.name, ours.kind)
    return same and (theirs.default is theirs.empty or _plain(theirs.default) == _plain(ours.default))


def _plain(default: Any) -> str:
    """A default as text: an enumeration's member by its name, a factory of a list as itself."""
    if isinstance(default, Enum):
        return default.name
    is_empty_list = default in ((), []) or default is attrs.NOTHING or "factory" in repr(default)
    return "[]" if is_empty_list else repr(default)


def _text(value: Any) -> str:
    try:
        parameters = inspect.signature(value).parameters.values()
    except (TypeError, ValueError):
        return ""
    return f"({', '.join(str(one.replace(annotation=one.empty)) for one in parameters)})"


def main(arguments: Sequence[str]) -> None:
    """Print what differs; with `--json` all of it as JSON, with `--markdown` the tables of the README."""
    parser = argparse.ArgumentParser("python -m shardwright_torchrec api", description=__doc__)
    parser.add_argument("--json", action="store_true", help="all names, as JSON")
    parser.add_argument(
        "--markdown", action="store_true", help="counts, and names that are left out, as tables"
    )
    options = parser.parse_args(arguments)
    compared = compare()
    if options.json:
        print(json.dumps([attrs.asdict(one) for one in compared], indent=1))
        return
    if options.markdown:
        print(markdown(compared))
        return
    print(f"TorchRec {getattr(import_module('torchrec'), '__version__', 'unknown')}\n")
    for kind in ("contract", "import"):
        states = Counter(one.state for one in compared if one.kind == kind)
        print(f"{kind:9} {states[SAME]} of {states.total()} the same")
    for one in compared:
        if one.state != SAME:
            print(f"\n{one.kind} {one.name}: {one.state}")
            print("".join(f"  {label} {text}\n" for label, text in _differences(one)), end="")


def _differences(one: Compared) -> list[tuple[str, str]]:
    reason = LEFT_OUT.get(one.name, "")
    lines = (("TorchRec", one.theirs), ("here    ", one.ours), ("because ", reason))
    return [(label, text) for label, text in lines if text]


_ROWS = {
    "contract": "signatures of the contract that its schema tests hold",
    "import": "names that public scripts import (`api/imports.txt`)",
}


def markdown(compared: Sequence[Compared]) -> str:
    """Tables of the counts, and of the imports that are left out with their reasons."""
    lines = ["| | the same here | of |", "|---|--:|--:|"]
    for kind, title in _ROWS.items():
        states = Counter(one.state for one in compared if one.kind == kind)
        lines.append(f"| {title} | {states[SAME]} | {states.total()} |")
    missing = [one.name for one in compared if one.kind == "import" and one.state != SAME]
    lines += ["", "| not here | because |", "|---|---|"]
    return "\n".join([*lines, *(f"| `{name}` | {LEFT_OUT.get(name, '')} |" for name in missing)])
