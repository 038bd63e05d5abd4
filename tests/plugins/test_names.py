"""Public names of `shardwright` that plugins bring."""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.core import stubs
from tests.core.public_values import untold

import shardwright
import shardwright_plugins
from shardwright import hookimpl
from shardwright.contracts import Extension
from shardwright.errors import UnknownPluginError
from shardwright.host import PluginHost, use_host
from shardwright_plugins.commands.pages.command import docs

BROUGHT = sorted({*shardwright.__all__} - {*stubs.OWN_NAMES})


def test_stub_is_made_from_the_names_that_are_imported_on_first_use() -> None:
    """After a change of names: `python -m tests.core.stubs`."""
    assert stubs.path_of(shardwright).read_text() == stubs.text_of(shardwright)


@pytest.mark.parametrize("name", BROUGHT)
def test_name_of_a_plugin_is_what_the_plugin_defines(name: str) -> None:
    value = getattr(shardwright, name)
    assert value.__name__ == name
    assert value.__module__.startswith("shardwright_plugins.")


def test_signatures_of_values_that_plugins_bring_say_what_their_arguments_take() -> None:
    assert untold(BROUGHT) == []


def test_name_of_a_plugin_that_is_off_is_an_error_that_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(shardwright.__dict__, "save_checkpoint", raising=False)
    with (
        use_host(PluginHost(environment={"SHARDWRIGHT_PLUGINS": ""})),
        pytest.raises(UnknownPluginError) as told,
    ):
        shardwright.save_checkpoint  # noqa: B018
    assert str(told.value).startswith("shardwright.save_checkpoint comes from a plugin that is not loaded: ")
    assert "'builtin_checkpoint'" in str(told.value)


def test_reference_has_every_name_of_a_plugin_on_one_page(capsys: pytest.CaptureFixture[str]) -> None:
    pages = sorted((Path(shardwright_plugins.__file__).parent / "docs" / "reference").glob("*.md"))
    named = re.compile(r"^::: shardwright\.(\w+)$", re.MULTILINE)
    assert sorted(name for page in pages for name in named.findall(page.read_text())) == BROUGHT
    for page in pages:
        docs(page.stem)
    assert ":::" not in capsys.readouterr().out


class OwnCheckpoints(Extension):
    name = "names:checkpoints"

    def load(self) -> Callable[[str], Any]:
        return lambda name: f"my {name}"


def test_name_of_a_plugin_is_what_another_plugin_brings_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(shardwright.__dict__, "save_checkpoint", raising=False)
    plugin = types.SimpleNamespace(shardwright_extensions=hookimpl(lambda: [OwnCheckpoints]))
    with use_host(PluginHost(entry_points=(), plugins={"mine": plugin}, environment={})):
        assert shardwright.save_checkpoint == "my save_checkpoint"
    monkeypatch.delitem(shardwright.__dict__, "save_checkpoint")
