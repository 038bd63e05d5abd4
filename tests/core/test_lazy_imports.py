"""Planning must not wait for torch, and nothing may wait for plugins that are not asked for."""

from __future__ import annotations

import importlib
import pkgutil

import pytest
from tests.core.stubs import OWN_NAMES
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
