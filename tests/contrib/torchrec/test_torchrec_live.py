"""TorchRec's own estimators and names, where it is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import shardwright_torchrec
from shardwright_torchrec.installed import torchrec_module, why_not
from tests.contrib import distributions

import shardwright as sw

KIT = Path(__file__).parent / "torchrec_scripts" / "live_kit.py"
TOPOLOGY = sw.Topology(world_size=4, compute_device="cuda", local_world_size=2)
PYTHON = os.environ.get("SHARDWRIGHT_TORCHREC_PYTHON") or (sys.executable if why_not() is None else None)
needs_torchrec = pytest.mark.skipif(
    PYTHON is None,
    reason="SHARDWRIGHT_TORCHREC_PYTHON names no Python with TorchRec, attrs, pluggy and SciPy",
)


def tables(module: str = "sparse.bags") -> list[sw.TableSpec]:
    return [
        sw.TableSpec("user", 1001, 128, feature_names=("u",), module=module),
        sw.TableSpec("item", 4096, 64, feature_names=("i", "seen"), module=module),
        sw.TableSpec("shop", 3, 64, feature_names=("s",), module="other"),  # fewer rows than ranks
    ]


def test_live_without_torchrec_says_what_to_install() -> None:
    if why_not() is None:
        pytest.skip("TorchRec is installed here")
    installed = [*metadata.entry_points(group="shardwright"), *distributions.entry_points("torchrec")]
    needed = pytest.raises(sw.UnsupportedError, match=r"TorchRec itself is needed: .*pip install torchrec")
    with sw.host.use_host(sw.host.PluginHost(entry_points=installed)), needed:
        sw.EmbeddingShardingPlanner(TOPOLOGY, 64, estimator="torchrec_live").plan_tables(tables())
    shardwright_torchrec.install()
    try:
        with pytest.raises(sw.UnsupportedError, match=r"shardwright's in this process.*uninstall\(\)"):
            torchrec_module("torchrec")
    finally:
        shardwright_torchrec.uninstall()


def in_torchrecs_python(source: str) -> Any:
    """Run source that prints JSON in a Python that has TorchRec."""
    assert PYTHON is not None
    path = os.pathsep.join([str(distributions.ROOT / "torchrec"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [PYTHON, "-W", "ignore", "-c", source],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


COMPARED = """
import json, importlib, numpy as np, shardwright as sw, shardwright.hookspecs
from importlib.metadata import EntryPoint
from shardwright_torchrec.live import TorchRecLive, TorchRecLiveStorage
labels = [kind.label for kind in sw.hookspecs.KINDS]
points = [EntryPoint("builtin_" + n, "shardwright_plugins." + n, "shardwright") for n in labels]
worst, offered = 0.0, set()
with sw.host.use_host(sw.host.PluginHost(entry_points=points)):
    create = sw.host.host().estimators.create
    own = {"performance": create("torchrec"), "storage": create("torchrec_storage")}
    class Both(sw.Estimator):
        name = "both"
        depends_on_shape_only = True
        def __init__(self, measures): self.measures = measures
        def option_space(self, topology): return TorchRecLive().option_space(topology)
        def estimate(self, options, topology):
            global worst
            live = (TorchRecLive() if self.measures == "performance" else TorchRecLiveStorage())
            told, expected = live.estimate(options, topology), own[self.measures].estimate(options, topology)
            offered.update((options.type_of(o).name, options.kernel_of(o).name) for o in range(options.num_options))
            for name in expected:
                difference = np.abs(told[name] - expected[name]) / np.maximum(np.abs(expected[name]), 1e-12)
                worst = max(worst, float(difference.max()))
            return told
    for local in (1, 2, 4):
        topology = sw.Topology(world_size=4, compute_device="cuda", local_world_size=local)
        tables = [
            sw.TableSpec("user", 1001, 128, feature_names=("u",)),
            sw.TableSpec("item", 4096, 256, feature_names=("i", "j"), pooling="MEAN", is_weighted=True),
            sw.TableSpec("seen", 5000, 64, feature_names=("s",), pooling="NONE", data_type="FP16"),
        ]
        rules = {"*": sw.ParameterConstraints(pooling_factors=[3.0])}
        rules = {"item": sw.ParameterConstraints(pooling_factors=[3.0, 5.0]), **rules}
        planner = sw.EmbeddingShardingPlanner(
            topology, 256, constraints=rules, estimator=Both("performance"), storage_estimator=Both("storage")
        )
        planner.plan_tables(tables)
print(json.dumps([worst, sorted(offered)]))
"""


@needs_torchrec
def test_live_is_what_the_published_model_says() -> None:
    worst, offered = in_torchrecs_python(COMPARED)
    assert worst < 1e-6
    kinds = {kind for kind, _ in offered}
    assert kinds >= {"table_wise", "column_wise", "row_wise", "table_row_wise", "data_parallel"}


@needs_torchrec
@pytest.mark.slow
def test_live_estimators_pass_the_kit() -> None:
    source = """
import importlib.util, json, sys
missing = [name for name in ("pytest", "hypothesis") if importlib.util.find_spec(name) is None]
print(json.dumps(missing))
"""
    if missing := in_torchrecs_python(source):
        pytest.skip(f"{PYTHON} has no {' and no '.join(missing)}")
    options = ["-q", "-c", os.devnull, "--import-mode=importlib", "-p", "no:cacheprovider"]
    arguments = [*options, "--rootdir", str(KIT.parent), str(KIT)]
    kit = f"import json, pytest\nprint(json.dumps(pytest.main({arguments!r})))"
    assert in_torchrecs_python(kit) == 0


@needs_torchrec
def test_names_are_where_torchrec_has_them() -> None:
    source = """
import importlib, json
from shardwright_torchrec.names import MODULES, QUANTIZED
pairs = [(m, n) for known in (MODULES, QUANTIZED) for m, names in known.items() for n in names]
print(json.dumps([f"{m}.{n}" for m, n in pairs if not hasattr(importlib.import_module(m), n)]))
"""
    assert in_torchrecs_python(source) == []
