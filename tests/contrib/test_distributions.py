"""What holds for every distribution next door."""

from __future__ import annotations

import ast
import functools
import json
import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from tests import stranger
from tests.contrib import distributions

import shardwright
import shardwright_plugins
from shardwright.host import PluginHost, host

OURS = {distributions.project(name)["name"] for name in distributions.NAMES}
ROOTS = [Path(package.__file__ or "").parent for package in (shardwright, shardwright_plugins)]


def test_distribution_imports_public_names_only(distribution: str) -> None:
    private = {
        path.name: uses
        for path in distributions.sources(distribution)
        if (uses := distributions.private_uses(path.read_text()))
    }
    assert private == {}


# Torch's public functions that make a ShardedTensor are collectives.
OF_TORCHREC = {"ShardedTensor._init_from_local_shards_and_global_metadata"}


# Torch has no public names for these: packages of AOTInductor, operators of exported programs, TorchScript's classes.
OF_TORCH = {
    *("torch._C._aoti", "torch._inductor", "torch._ops", "node.target._schema"),
    *("torch.ops.aten._assert_scalar", "torch.ops.aten._assert_tensor_metadata"),
    *("torch._C._dispatch_has_kernel_for_dispatch_key", "torch._disable_dynamo", "table._buffers"),
    *("torch._jit_internal", "torch._jit_internal._qualified_name", "script._jit_override_qualname"),
    *("_state._add_script_class", "_state._name_to_pyclass", "_state._script_classes"),
}
# Torch has no public names for these: tensors whose elements are elsewhere, and which functions change their arguments.
OF_TENSORS = {"torch.Tensor._make_wrapper_subclass", "func._schema"}
INSIDES = {"serving": OF_TORCH, "store": OF_TENSORS, "torchrec": OF_TORCHREC}


def test_distribution_touches_nobodys_insides(distribution: str) -> None:
    own = distributions.own_names(distribution)
    touched = {
        attribute
        for path in distributions.sources(distribution)
        for attribute in distributions.insides_touched(path.read_text(), own)
    }
    assert touched == INSIDES.get(distribution, set())


def test_insides_touched_finds_what_is_read_and_set() -> None:
    source = "self._rows = planner._cache\nhost()._discover()\nlookup._mine\nclass_.__name__"
    assert distributions.insides_touched(source, {"_rows", "_mine"}) == ["planner._cache", "host()._discover"]


@functools.cache
def words_of_core_and_built_ins() -> dict[Path, set[str]]:
    files = sorted(path for root in ROOTS for path in root.rglob("*.py"))
    return {path: set(distributions.words(ast.parse(path.read_text()))) for path in files}


def test_core_and_built_ins_know_nothing_of_the_distribution(
    distribution: str, entry_points: list[EntryPoint]
) -> None:
    """To add it nothing else was changed: no string is its name or the name of what it offers, no file imports it."""
    own = PluginHost(entry_points=entry_points, environment={})
    offered = {name for registry in own.registries for name in registry.names}
    packages = {
        path.relative_to(distributions.ROOT / distribution).parts[0].removesuffix(".py")
        for path in distributions.sources(distribution)
    }
    names = {*offered, *packages, distributions.project(distribution)["name"]}
    told = {file: names & words for file, words in words_of_core_and_built_ins().items()}
    assert len(told) > 100
    assert {file: found for file, found in told.items() if found} == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import shardwright as sw\nsw.Topology", []),
        ("from shardwright import Topology", []),
        ("from shardwright.contracts import Estimator", []),
        (
            "from shardwright.planning.options.options import Refusal",
            ["shardwright.planning.options.options.Refusal"],
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
    name = r"shardwright\.planning\.machines\.topology\.Topology\.host_of"
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


@pytest.mark.parametrize(
    "page", sorted(distributions.ROOT.parent.glob("*/**/*.md")), ids=lambda page: page.stem
)
def test_pages_install_with_a_distribution_those_that_it_needs(page: Path) -> None:
    """None is on PyPI, so that pip finds them only where the commands name them."""
    commands = re.findall(r"pip install [^`\n]*", page.read_text())
    named = set(re.findall(r"\./contrib/([a-z_]+)", " ".join(commands)))
    needed = {text for name in named for text in distributions.project(name)["dependencies"]}
    assert needed & OURS <= {distributions.project(name)["name"] for name in named}


TYPES = {"round_robin": "round_robin", "hot_rows": "hot_rows", "hash_embedding": "hash_rows"}


"""Distribution -> its sharding type."""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which pip has installed them."""
    return distributions.install(TYPES, tmp_path_factory.mktemp("site"))


def test_installed_distributions_are_listed_with_what_they_offer(site: Path) -> None:
    done = stranger.run_python("-m", "shardwright", "plugins", "--json", site=site)
    rows = {row["name"]: row for row in json.loads(done.stdout)}
    for name, kind in TYPES.items():
        project = distributions.project(name)
        assert rows[kind]["state"] == "loaded"
        assert (rows[kind]["distribution"], rows[kind]["version"]) == (project["name"], project["version"])
