"""Type checkers see the classes behind the public names, although these are imported on first use."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from tests.core import stubs
from tests.core.public_values import classes_of, hidden_in

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


@pytest.mark.parametrize(
    "contract", sorted(CONTRACTS | {shardwright.ExecutorConfig}, key=str), ids=lambda own: own.__name__
)
def test_what_contracts_speak_of_is_public(contract: type) -> None:
    """Who implements a contract imports each class in its signatures from `shardwright`; so of an executor's config."""
    assert hidden_in(contract, classes_of(shardwright) | {"LookupBuilder"}) == []


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
