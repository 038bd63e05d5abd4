"""Every hook, with plugins that implement it; a kind is one row, from which registries, commands and pages follow."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
from tests import readme

from shardwright import ShardingType, hookspecs
from shardwright.hookspecs import KINDS
from shardwright.host import PluginHost


def host_with(plugin):
    return PluginHost(entry_points=[], plugins={"made": plugin}, environment={})


def test_hook_of_a_kind_is_specified_and_documented(kind):
    function = getattr(hookspecs, kind.hook)
    assert not inspect.signature(function).parameters
    assert len(inspect.getdoc(function).splitlines()) > 2
    assert [other.hook for other in KINDS].count(kind.hook) == 1


def test_hook_classes_come_to_their_registry_and_to_no_other(kind, make_offer):
    items, plugin = make_offer(["first", "second"])
    host = host_with(plugin)
    registry = getattr(host, kind.label)
    assert registry is host.registry_of(kind.contract)
    assert {name: registry[name] for name in registry} == dict(zip(["first", "second"], items, strict=True))
    assert [other.names for other in host.registries if other is not registry] == [()] * (len(KINDS) - 1)


def test_hook_instances_come_to_their_registry(kind, make_offer):
    items, plugin = make_offer(["first"])
    instance = items[0]()
    items[:] = [instance]
    assert host_with(plugin).registry_of(kind.contract).create("first") is instance


def test_hook_abstract_class_is_refused_naming_methods(kind, make_offer):
    items, plugin = make_offer([])
    items.append(type(kind.contract)("Unfinished", (kind.contract,), {"name": "unfinished"}))
    (record,) = host_with(plugin).plugins
    assert record.state == "failed"
    missing = ", ".join(sorted(kind.contract.__abstractmethods__))
    assert record.reason.endswith(f"Unfinished does not implement {missing}.")


@pytest.mark.parametrize("answer", [None, 3, "rows", ShardingType, {"rows": ShardingType}, iter(())])
def test_hook_answer_that_is_no_list_is_refused_with_what_was_got(kind, make_offer, answer):
    from shardwright import hookimpl

    _, plugin = make_offer([])
    setattr(plugin, kind.hook, hookimpl(lambda: answer))
    (record,) = host_with(plugin).plugins
    assert record.reason == (
        f"its hook {kind.hook} returned {answer!r}; it must return a list or tuple of {kind.title}s."
    )


# A kind that is not there: the row, the hook and the contract. Only the list of kinds is told of it.
NEW_KIND = """
import inspect, sys, types
from abc import ABC, abstractmethod
from collections.abc import Sequence
from shardwright import hookspecs
from shardwright.host.offers import Kind

class InputTransform(ABC):
    api, aliases = 1, ()

    @abstractmethod
    def update(self): ...

@hookspecs.hookspec
def shardwright_input_transforms() -> "Sequence[type[InputTransform] | InputTransform]":
    'Offer input transforms.'

folder = sys.argv[1]
hookspecs.shardwright_input_transforms = shardwright_input_transforms
hookspecs.KINDS += (
    Kind(
        "input_transform", "shardwright_input_transforms", InputTransform, "input_transforms.InputTransformTests",
        folder, folder + "/page.md",
    ),
)
acme = types.ModuleType("acme")
sys.modules["acme"] = acme
exec(
    'import shardwright as sw, shardwright.hookspecs\\n'
    'class Momentum(sw.hookspecs.KINDS[-1].contract):\\n'
    '    name = "momentum"\\n'
    '    def update(self): ...\\n'
    '@sw.hookimpl\\n'
    'def shardwright_input_transforms(): return [Momentum]\\n',
    acme.__dict__,
)
"""

USE = """
import json
from importlib.metadata import EntryPoint, EntryPoints
from unittest import mock
from typer.testing import CliRunner

def shown(*words):
    return CliRunner().invoke(app, words, env={"COLUMNS": "300"}).output

points = EntryPoints([EntryPoint("acme", "acme", "shardwright")])
with mock.patch("importlib.metadata.entry_points", lambda **_: points):
    import shardwright
    from shardwright.cli import app
    import shardwright_testing as testing

    registry = shardwright.host.host().input_transforms
    print(json.dumps({
        "names": registry.names,
        "by contract": registry is shardwright.host.host().registry_of(InputTransform),
        "fingerprint": "input_transforms:momentum" in repr(shardwright.host.host().fingerprint()),
        "listed": shown("plugins"),
        "in full": shown("plugins", "momentum"),
        "kit": testing._MODULE_OF_NAME["InputTransformTests"],
    }))
"""


@pytest.fixture
def row(tmp_path: Path) -> Path:
    """A folder with the page that a row names."""
    (tmp_path / "page.md").write_text("# Input transform\n")
    return tmp_path


def test_new_row_is_a_kind_everywhere(run_python: Any, row: Path) -> None:
    done = run_python("-c", NEW_KIND + USE, str(row))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["names"] == ["momentum"]
    assert found["by contract"]
    assert found["fingerprint"]
    assert "input_transforms  momentum  loaded  acme" in " ".join(found["listed"].split()).replace(" ", "  ")
    assert f"docs of the kind {row}/page.md" in " ".join(found["in full"].split())
    assert "update" not in found["in full"]
    assert found["kit"] == "input_transforms"


def test_new_row_is_on_the_page_on_plugins(run_python: Any, row: Path) -> None:
    source = "from tests import readme\nprint(readme.with_kinds(readme.PLUGINS.read_text()))"
    kinds = NEW_KIND.replace("hookspecs.KINDS += (", "hookspecs.KINDS = (").replace(
        'folder + "/page.md"', '"input_transform.md"'
    )
    done = run_python("-c", kinds + source, str(row), PYTHONPATH=str(readme.README.parent))
    assert done.returncode == 0, done.stderr
    assert (
        "def shardwright_input_transforms() -> Sequence[type[InputTransform] | InputTransform]\n```"
        in done.stdout
    )
    assert "how to test it:\n[input transforms](input_transform.md).\n[Versions]" in done.stdout


def test_rows_are_of_different_names() -> None:
    for column in ("name", "hook", "contract", "kit", "template", "page"):
        assert len({getattr(kind, column) for kind in hookspecs.KINDS}) == len(hookspecs.KINDS), column
