"""Type checkers see the classes behind the public names, although these are imported on first use."""

from __future__ import annotations

import functools
import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tests.core import stubs

import shardwright

USER = """
from collections.abc import Iterable, Sequence
from typing import assert_type

import pytest
import shardwright as sw
from shardwright_testing import ShardingTypeTests


class Halves(sw.ShardingType):
    name, abbreviation = "halves", "HA"

    def layouts(
        self, table: sw.TableSpec, topology: sw.Topology, constraints: sw.ParameterConstraints
    ) -> Iterable[sw.Layout]:
        assert_type(table.num_embeddings, int)
        rows = sw.RowsRange(table.num_embeddings, parts=2)
        yield sw.Layout(sw.Block(part, table.all_columns) for part in rows)


@sw.hookimpl
def shardwright_sharding_types() -> Sequence[type[sw.ShardingType]]:
    return [Halves]


class TestHalves(ShardingTypeTests):
    @pytest.fixture
    def sharding_type(self) -> sw.ShardingType:
        return Halves()


plan = sw.EmbeddingShardingPlanner(sw.Topology(world_size=2, compute_device="cpu")).plan_tables([])
assert_type(plan, sw.ShardingPlan)
assert_type(sw.__version__, str)
sw.Topolgy  # type: ignore[attr-defined]
sw.Topology(wold_size=2)  # type: ignore[call-arg]
"""


@pytest.mark.parametrize("package", stubs.PACKAGES[1:], ids=lambda package: package.__name__)
def test_stub_is_made_from_the_names_that_are_imported_on_first_use(package: ModuleType) -> None:
    """After a change of names: `python -m tests.core.stubs`."""
    assert stubs.path_of(package).read_text() == stubs.text_of(package)


PUBLIC = [getattr(shardwright, name) for name in stubs.OWN_NAMES]
CONTRACTS = {value for value in PUBLIC if inspect.isabstract(value) or getattr(value, "_is_protocol", False)}


@functools.cache
def classes_of_core() -> set[str]:
    return {
        name
        for path in Path(shardwright.__file__).parent.rglob("*.py")
        for name in re.findall(r"^class (\w+)", path.read_text(), re.MULTILINE)
    }


def spoken_by(contract: type) -> Iterator[tuple[str, str]]:
    """Names of the public attributes and methods of a contract, each with an annotation of its signature."""
    for cls in contract.__mro__:
        if not cls.__module__.startswith("shardwright"):
            continue
        yield from inspect.get_annotations(cls).items()
        for name, value in vars(cls).items():
            function = getattr(value, "fget", None) or getattr(value, "__func__", value)
            if inspect.isfunction(function) and (name == "__init__" or not name.startswith("_")):
                yield from ((name, str(told)) for told in function.__annotations__.values())


@pytest.mark.parametrize(
    "contract", sorted(CONTRACTS | {shardwright.ExecutorConfig}, key=str), ids=lambda own: own.__name__
)
def test_what_contracts_speak_of_is_public(contract: type) -> None:
    """Who implements a contract imports each class in its signatures from `shardwright`; so of an executor's config."""
    own = classes_of_core() | {"LookupBuilder"}
    hidden = [
        (name, word)
        for name, told in spoken_by(contract)
        for word in re.findall(r"\w+", told)
        if word in own and word not in shardwright.__all__ and not name.startswith("_")
    ]
    assert hidden == []


@pytest.mark.slow
def test_users_file_has_real_types(tmp_path: Path) -> None:
    (tmp_path / "user.py").write_text(USER)
    (tmp_path / "mypy.ini").write_text("[mypy]\nstrict = True\n")
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "user.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
