"""What holds for every distribution next door."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest
from tests.contrib import distributions

import shardwright
from shardwright.plugins import PluginHost, host


def test_distribution_imports_public_names_only(distribution: str) -> None:
    private = {
        path.name: uses
        for path in distributions.sources(distribution)
        if (uses := distributions.private_uses(path.read_text()))
    }
    assert private == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import shardwright as sw\nsw.Topology", []),
        ("from shardwright import Topology", []),
        ("from shardwright.contracts import Estimator", []),
        (
            "from shardwright.planning.options import fold_requests",
            ["shardwright.planning.options.fold_requests"],
        ),
        ("from shardwright import _fbgemm", ["shardwright._fbgemm"]),
        ("import shardwright_plugins.estimators", ["shardwright_plugins.estimators"]),
        ("from shardwright_plugins.estimators import roofline", ["shardwright_plugins.estimators.roofline"]),
        ("import shardwright as sw\nsw.planning", ["shardwright.planning"]),
    ],
)
def test_private_uses_finds_what_is_not_public(source: str, found: list[str]) -> None:
    assert distributions.private_uses(source) == found


def test_nothing_changes_notices_a_patch(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = shardwright.Topology  # imported before the look at what there is
    name = r"shardwright\.planning\.topology\.Topology\.host_of"
    with pytest.raises(AssertionError, match=name), distributions.nothing_changes():
        monkeypatch.setattr(topology, "host_of", lambda self, rank: 0)


def test_distribution_loads_and_changes_nothing(distribution: str, entry_points: list[EntryPoint]) -> None:
    host().fingerprint()  # the built-ins are there
    with distributions.nothing_changes():
        own = PluginHost(entry_points=entry_points, environment={"SHARDWRIGHT_STRICT_PLUGINS": "1"})
        offered = [registry[name] for registry in own.registries for name in registry.names]
    assert [record.state for record in own.plugins] == ["loaded"] * len(entry_points)
    assert bool(offered) == bool(entry_points)


def test_distribution_says_what_it_is(distribution: str) -> None:
    folder = distributions.ROOT / distribution
    assert distributions.project(distribution)["description"]
    assert (folder / "README.md").read_text().startswith(f"# {distributions.project(distribution)['name']}\n")
    assert distributions.lines_of_code(distribution) > 0
