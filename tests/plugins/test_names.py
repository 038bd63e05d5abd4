"""Public names of `shardwright` that plugins bring."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.core import stubs
from tests.core.public_values import classes_of, hidden_in, untold
from tests.plugins.parts.brought import bringing

import shardwright
import shardwright_plugins
from shardwright import NameNotLoadedError, UnknownPluginError
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


@pytest.mark.parametrize("name", BROUGHT)
def test_what_names_of_plugins_speak_of_is_public(name: str) -> None:
    classes = classes_of(shardwright) | classes_of(shardwright_plugins)
    assert hidden_in(getattr(shardwright, name), classes) == []


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


def test_name_that_an_extension_lacks_is_an_error_that_names_its_plugin(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(shardwright.__dict__, "save_checkpoint", raising=False)
    plugin = bringing("names:checkpoints", {"load_checkpoint": 1}.__getitem__)
    with (
        use_host(PluginHost(entry_points=(), plugins={"mine": plugin}, environment={})),
        pytest.raises(NameNotLoadedError, match=r"save_checkpoint.*'names:checkpoints'.*mine"),
    ):
        shardwright.save_checkpoint  # noqa: B018


def test_name_of_a_plugin_is_what_another_plugin_brings_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(shardwright.__dict__, "save_checkpoint", raising=False)
    plugin = bringing("names:checkpoints", lambda name: f"my {name}")
    with use_host(PluginHost(entry_points=(), plugins={"mine": plugin}, environment={})):
        assert shardwright.save_checkpoint == "my save_checkpoint"
    monkeypatch.delitem(shardwright.__dict__, "save_checkpoint")
