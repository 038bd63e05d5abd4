"""Small plugins, good and broken, as real distributions and as modules of this process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from shardwright import contracts, hookimpl
from shardwright.hookspecs import KINDS

OFFER = """
from shardwright import hookimpl
from shardwright.contracts import ShardingType

class {title}(ShardingType):
    name = "{name}"
    abbreviation = "XX"

    def layouts(self, table, topology, constraints):
        return []
"""

HOOK = """
@hookimpl
def shardwright_sharding_types():
    return [{titles}]
"""


def offer(*names: str) -> str:
    """The source of a plugin that offers sharding types under these names."""
    titles = [name.title().replace("_", "") for name in names]
    classes = [OFFER.format(name=name, title=title) for name, title in zip(names, titles, strict=True)]
    return "\n".join([*classes, HOOK.format(titles=", ".join(titles))])


# Distribution -> (version, the source of its one module). Plugin and module are called as the distribution.
DISTRIBUTIONS: Mapping[str, tuple[str, str]] = {
    "acme-good": ("1.2.0", offer("good")),
    "acme-bad-import": ("0.3.1", "import acme_needs_this\n" + offer("unreachable")),
    "acme-exits": ("0.1", "import sys\nsys.exit('no licence')\n"),
    "acme-wrong-api": ("0.2", "api = 2\n" + offer("from_the_future")),
    "acme-wrong-class-api": (
        "0.2.1",
        offer("old_friend", "newer") + "\nNewer.api = 7\n",
    ),
    "acme-duplicate-one": ("1.0", offer("contested", "only_one")),
    "acme-duplicate-two": ("2.0", offer("contested", "only_two")),
    "acme-misspelt": (
        "0.4",
        offer("lonely").replace("_sharding_types():", "_sharding_type():"),
    ),
    "acme-raises": (
        "0.5",
        offer("half")
        + "\n@hookimpl\ndef shardwright_comm_backends():\n    raise ValueError('no such device')\n",
    ),
    "acme-slow": ("0.6", "import time\ntime.sleep(0.3)\n" + offer("slow")),
}


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as if `DISTRIBUTIONS` were installed there, each with one module that is also its plugin."""
    folder = tmp_path_factory.mktemp("site")
    for distribution, (version, source) in DISTRIBUTIONS.items():
        module = distribution.replace("-", "_")
        (folder / f"{module}.py").write_text(source)
        info = folder / f"{module}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n"
            "Project-URL: Homepage, https://acme.example\n"
            f"Project-URL: Documentation, https://acme.example/docs/{distribution}\n"
        )
        (info / "entry_points.txt").write_text(f"[shardwright]\n{module} = {module}\n")
    return folder


@pytest.fixture
def installed(site: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[metadata.EntryPoint]]:
    """`installed("acme-good", ...)`: the entry points of these distributions, importable during the test."""
    monkeypatch.syspath_prepend(site)
    for name in DISTRIBUTIONS:
        monkeypatch.delitem(sys.modules, name.replace("-", "_"), raising=False)
    found = {distribution.name: distribution for distribution in metadata.distributions(path=[str(site)])}

    def entry_points(*names: str) -> list[metadata.EntryPoint]:
        return [point for name in names or found for point in found[name].entry_points]

    return entry_points


@pytest.fixture
def run_python(site: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python with `DISTRIBUTIONS` installed; keywords are environment variables."""

    def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("SHARDWRIGHT_")}
        path = os.pathsep.join(filter(None, [str(site), kept.get("PYTHONPATH", "")]))
        return subprocess.run(
            [sys.executable, *arguments],
            env={**kept, "PYTHONPATH": path, "COLUMNS": "400", **environment},
            capture_output=True,
            text=True,
        )

    return run


@pytest.fixture
def run_source(run_python: Callable[..., Any]) -> Callable[..., Any]:
    """Run Python source that prints one JSON value, and give the value."""

    def run(source: str, **environment: str) -> Any:
        done = run_python("-c", textwrap.dedent(source), **environment)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def make_class(contract: type, name: object, **attributes: object) -> type:
    """A class that fulfils a contract in form, whatever its methods are."""
    stubs = {method: lambda self, *_, **__: None for method in contract.__abstractmethods__}
    return type(contract)("Made", (contract,), {**stubs, "name": name, **attributes})


def make_plugin(hooks: Mapping[str, Callable[[], object]], **attributes: object) -> types.ModuleType:
    """A module with these hooks."""
    module = types.ModuleType("made_plugin")
    for name, function in hooks.items():
        setattr(module, name, hookimpl(function))
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


@pytest.fixture
def sharding_type() -> Callable[..., type]:
    """`sharding_type("name", aliases=...)`: a class that fulfils the contract in form."""
    return lambda name, **attributes: make_class(contracts.ShardingType, name, **attributes)


@pytest.fixture
def plugin_of() -> Callable[..., types.ModuleType]:
    """`plugin_of(item, ...)`: a plugin that offers these sharding types."""

    def make(*items: object, **attributes: object) -> types.ModuleType:
        return make_plugin({"shardwright_sharding_types": lambda: list(items)}, **attributes)

    return make


@pytest.fixture(params=KINDS, ids=lambda kind: kind.label)
def kind(request: pytest.FixtureRequest) -> Any:
    """Each of the kinds."""
    return request.param


@pytest.fixture
def make_offer(kind: Any) -> Callable[[Sequence[str]], tuple[list[type], types.ModuleType]]:
    """Classes of each kind with these names, and a plugin that offers them."""

    def make(names: Sequence[str]) -> tuple[list[type], types.ModuleType]:
        items = [make_class(kind.contract, name) for name in names]
        return items, make_plugin({kind.hook: lambda: items})

    return make
