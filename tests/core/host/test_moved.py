"""Names of the plugin host are found where they were, with a warning."""

from __future__ import annotations

import importlib

import pytest

import shardwright
from shardwright import host


@pytest.mark.parametrize(
    "name", ["Fingerprint", "PluginHost", "Registry", "compare_fingerprints", "use_host"]
)
def test_name_of_the_host_is_deprecated_at_the_top(name: str) -> None:
    with pytest.warns(DeprecationWarning, match=rf"from shardwright\.host import {name}") as found:
        assert getattr(shardwright, name) is getattr(host, name)
    assert found[0].filename == __file__
    assert name not in shardwright.__all__


@pytest.mark.parametrize(
    ("module", "name"),
    [("plugins", "host"), ("plugins", "use_host"), ("registry", "Registry"), ("fingerprint", "Fingerprint")],
)
def test_module_of_the_host_is_deprecated(module: str, name: str) -> None:
    old = importlib.import_module(f"shardwright.{module}")
    with pytest.warns(DeprecationWarning, match=rf"from shardwright\.host import {name}") as found:
        assert getattr(old, name) is getattr(host, name)
    assert found[0].filename == __file__


def test_package_of_the_host_is_called_as_the_function_was() -> None:
    with pytest.warns(DeprecationWarning, match="from shardwright.host import host") as found:
        assert shardwright.host() is host.host()  # type: ignore[operator]
    assert found[0].filename == __file__


def test_name_that_was_nowhere_is_no_alias() -> None:
    with pytest.raises(AttributeError, match="Registri"):
        importlib.import_module("shardwright.registry").Registri  # noqa: B018
