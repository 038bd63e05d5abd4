"""The page for authors who come from a patched TorchRec: what it names exists, and its counts are those of its rows."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest
from tests import readme

import shardwright
import shardwright_plugins
from shardwright import contracts, hookspecs

PAGE = Path(shardwright_plugins.__file__).parent / "docs" / "patched_torchrec.md"
ROOT = readme.README.parent
_ROW = re.compile(
    r"^\| E(?P<number>\d+) \| .* \| (?P<state>\w+) \| (?P<here>.*) \| `(?P<test>[^`]*)` \|$", re.MULTILINE
)
_PUBLIC = re.compile(r"`([A-Z_a-z]\w*(?:\.\w+)?)`")
_POINTS = re.compile(r"extensions? ((?:`\w+`(?:, | and )?)+)")
ROWS = {f"E{row['number']}": row for row in _ROW.finditer(PAGE.read_text())}
# Words of other libraries, arguments, and what the page says is documented and not promised.
OTHERS = {
    "StorageWriter",
    "StorageReader",
    "label",
    "end_of_data",
    "empty_batch",
    "renames",
    "parts",
    "inputs_ahead",
}
OTHERS |= {"eviction"}


@cache
def known_tests(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}


def is_there(name: str) -> bool:
    """True for a public name or its attribute, for a hook, and for a name that a distribution of contrib exports."""
    first, _, attribute = name.partition(".")
    if first.startswith("shardwright_"):
        exported = [path.read_text() for path in ROOT.glob(f"contrib/*/{first}/__init__.py")]
        return any(f'"{attribute}"' in text for text in exported) or hasattr(hookspecs, first)
    if first not in {*shardwright.__all__, *contracts.__all__}:
        return False
    found = getattr(shardwright if first in shardwright.__all__ else contracts, first)
    return not attribute or hasattr(found, attribute) or attribute in getattr(found, "__annotations__", {})


def test_page_has_the_61_places_in_order_and_counts_them() -> None:
    assert list(ROWS) == [f"E{number}" for number in range(1, 62)]
    states = Counter(row["state"] for row in ROWS.values())
    assert f"{states['clean']} are clean, {states['partly']} partly" in PAGE.read_text()
    assert states.total() == states["clean"] + states["partly"]


@pytest.mark.parametrize("place", ROWS)
def test_page_names_contracts_and_tests_that_exist(place: str) -> None:
    row = ROWS[place]
    points = {point for told in _POINTS.findall(row["here"]) for point in re.findall(r"`(\w+)`", told)}
    extension_page = (readme.CORE_DOCS / "authors/extension.md").read_text()
    assert [point for point in points if f"\n| `{point}` |" not in extension_page] == []
    named = set(_PUBLIC.findall(row["here"])) - points - OTHERS
    assert [name for name in sorted(named) if not is_there(name)] == []
    path, _, test = row["test"].partition("::")
    assert test in known_tests(ROOT / path)
