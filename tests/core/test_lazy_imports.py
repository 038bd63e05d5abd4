"""Public names are imported on first use: nothing waits for what nobody asks for, and type checkers see the classes."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from pathlib import Path
from types import ModuleType

import pytest
from tests.core import stubs
from tests.core.public_values import classes_of, hidden_in
from tests.core.stubs import OWN_NAMES
from tests.programs import printed_by
from tests.readme import CORE_DOCS

import shardwright
import shardwright.cli
import shardwright.contracts
import shardwright.host
import shardwright.planning


def modules_below(package):
    return [found.name for found in pkgutil.walk_packages(package.__path__, package.__name__ + ".")]


LIGHT_MODULES = [
    "shardwright",
    "shardwright.cli",
    *modules_below(shardwright.cli),
    "shardwright.errors",
    "shardwright.settings",
    "shardwright.host",
    *modules_below(shardwright.host),
    "shardwright.hookspecs",
    "shardwright.contracts",
    *modules_below(shardwright.contracts),
    "shardwright.planning",
    *modules_below(shardwright.planning),
    "shardwright.modules.embedding_configs",
    "shardwright.runtime.sharded.models.planner",
]
HEAVY_MODULES = {"torch", "fbgemm_gpu", "sklearn", "jsonschema_rs"}


def test_light_modules_import_no_heavy_module_and_no_plugin(run_source):
    found = run_source(
        f"""
        import importlib, json, sys
        heavy = {{}}
        for name in {LIGHT_MODULES!r}:
            importlib.import_module(name)
            loaded = {HEAVY_MODULES!r} & set(sys.modules)
            plugins = ("shardwright_plugins", "acme_")
            loaded |= {{module for module in sys.modules if module.startswith(plugins)}}
            if loaded:
                heavy[name] = sorted(loaded)
                break
        print(json.dumps(heavy))
        """
    )
    assert found == {}


def test_loading_all_plugins_imports_no_torch(run_source):
    found = run_source(
        """
        import json, sys
        import shardwright
        shardwright.host.host().plugins
        print(json.dumps([sorted({"torch", "fbgemm_gpu"} & set(sys.modules)), "acme_good" in sys.modules]))
        """
    )
    assert found == [[], True]


def test_importing_the_package_imports_nothing_but_what_asks_for_the_plugin_host(run_source):
    found = run_source(
        """
        import json, sys
        import shardwright
        print(json.dumps(sorted(name for name in sys.modules if name.startswith("shardwright"))))
        """
    )
    assert found == ["shardwright", "shardwright.host", "shardwright.host.process"]


@pytest.mark.parametrize("name", [name for name in OWN_NAMES if name != "__version__"])
def test_public_name_is_what_its_module_defines(name):
    value = getattr(shardwright, name)
    assert getattr(importlib.import_module(shardwright._MODULE_OF_NAME[name]), name) is value
    assert name in dir(shardwright)


def test_unknown_public_name_raises_with_nearest():
    with pytest.raises(
        AttributeError, match=r"no attribute 'ShardwrightEror'\. Did you mean 'ShardwrightError'\?"
    ):
        shardwright.ShardwrightEror  # noqa: B018


def test_unknown_public_name_raises_with_the_page_of_torchrecs_names():
    with pytest.raises(AttributeError, match=r"`shardwright docs .*` lists TorchRec's names") as raised:
        shardwright.get_default_sharders  # noqa: B018
    page = str(raised.value).split("`")[1].split()[-1]
    assert "get_default_sharders" in (CORE_DOCS / f"howto/{page}.md").read_text()


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
    printed_by("-m", "mypy", "--config-file", "mypy.ini", "user.py", cwd=tmp_path)
