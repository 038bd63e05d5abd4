"""TorchRec's plans in and out, and TorchRec's own estimators where it is installed."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import attrs
import pytest
import shardwright_torchrec
from shardwright_torchrec.installed import why_not
from tests.contrib import distributions

import shardwright as sw

TYPES = (
    "table_wise",
    "column_wise",
    "row_wise",
    "table_row_wise",
    "table_column_wise",
    "grid_shard",
    "data_parallel",
)
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


def planned(kind: str, kernel: str | None = "fused") -> sw.ShardingPlan:
    rule = sw.ParameterConstraints(
        sharding_types=[kind], compute_kernels=[kernel] if kernel else None, min_partition=32
    )
    planner = sw.EmbeddingShardingPlanner(TOPOLOGY, 64, constraints={"*": rule})
    return planner.plan_tables(tables())


@pytest.mark.parametrize("kind", TYPES)
def test_plan_written_for_torchrec_reads_back_as_it_was(kind: str) -> None:
    plan = planned(kind)
    written = shardwright_torchrec.write_plan(plan)
    text = json.dumps(written)
    assert shardwright_torchrec.read_plan(written, tables(), TOPOLOGY).plan == plan.plan
    assert shardwright_torchrec.read_plan(text, tables(), TOPOLOGY).plan == plan.plan


def test_plan_written_has_torchrecs_fields() -> None:
    user = shardwright_torchrec.write_plan(planned("row_wise"))["plan"]["sparse.bags"]["user"]
    assert (user["sharding_type"], user["compute_kernel"], user["ranks"]) == (
        "row_wise",
        "fused",
        [0, 1, 2, 3],
    )
    assert user["shards"][1] == {
        "shard_offsets": [251, 0],
        "shard_sizes": [251, 128],
        "placement": "rank:1/cuda:1",
    }
    assert user["shards"][3]["placement"] == "rank:3/cuda:1"  # of the second host
    assert [shard["shard_sizes"][0] for shard in user["shards"]] == [251, 251, 251, 248]
    copies = shardwright_torchrec.write_plan(planned("data_parallel"))["plan"]["other"]["shop"]
    assert "shards" not in copies
    assert copies["ranks"] == [0, 1, 2, 3]


def test_plan_kernel_that_torchrec_has_no_name_for_becomes_its_fused() -> None:
    written = shardwright_torchrec.write_plan(planned("table_wise", "fused_torch"))
    assert written["plan"]["other"]["shop"]["compute_kernel"] == "fused"


# What TorchRec 1.8 prints and serialises for two tables on two devices.
BY_HAND = {
    "plan": {
        "": {
            "a": {
                "sharding_type": "column_wise",
                "compute_kernel": "batched_fused",
                "ranks": [1, 0],
                "shards": [
                    {"shard_offsets": [0, 0], "shard_sizes": [100, 32], "placement": "rank:1/cuda:1"},
                    {"shard_offsets": [0, 32], "shard_sizes": [100, 32], "placement": "rank:0/cuda:0"},
                ],
            },
            "b": {"sharding_type": "data_parallel", "compute_kernel": "dense", "ranks": [0, 1]},
        }
    }
}
BY_HAND_TABLES = [sw.TableSpec("a", 100, 64), sw.TableSpec("b", 10, 8)]
TWO = sw.Topology(world_size=2, compute_device="cuda")


def test_read_plan_keeps_the_ranks_of_the_shards() -> None:
    plan = shardwright_torchrec.read_plan(BY_HAND, BY_HAND_TABLES, TWO)
    first, second = plan.plan[""]["a"].layout.blocks
    assert [(first.columns.start, first.rank), (second.columns.start, second.rank)] == [(0, 1), (32, 0)]
    assert plan.plan[""]["a"].compute_kernel == "fused"
    assert plan.plan[""]["b"].ranks == [0, 1]
    assert plan.plan[""]["b"].sharding_spec is None
    assert sw.ShardingPlan.from_json(plan.to_json()) == plan


class _Object:
    """TorchRec's plan in objects: attributes, no plain data."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def test_read_plan_takes_objects() -> None:
    own = {}
    for name, data in BY_HAND["plan"][""].items():
        shards = [_Object(**shard) for shard in data.get("shards", ())]
        given = {field: data[field] for field in ("sharding_type", "compute_kernel", "ranks")}
        own[name] = _Object(**given, sharding_spec=_Object(shards=shards) if shards else None)
    plan = _Object(plan={"": own})
    expected = shardwright_torchrec.read_plan(BY_HAND, BY_HAND_TABLES, TWO)
    assert shardwright_torchrec.read_plan(plan, BY_HAND_TABLES, TWO) == expected


def columns(*widths: int) -> list[dict[str, Any]]:
    """Shards of so many columns on ranks 1, 0, 1, ..."""
    ends = list(itertools.accumulate(widths))
    return [
        {
            "shard_offsets": [0, end - width],
            "shard_sizes": [100, width],
            "placement": f"rank:{number % 2}/cuda:{number % 2}",
        }
        for number, (end, width) in enumerate(zip(ends, widths, strict=True), start=1)
    ]


@pytest.mark.parametrize("kind", ["column_wise", "table_column_wise"])
def test_read_plan_takes_columns_of_any_widths(kind: str) -> None:
    data = changed(sharding_type=kind, shards=columns(40, 8, 16), ranks=[1, 0, 1])
    plan = shardwright_torchrec.read_plan(data, BY_HAND_TABLES, TWO)
    blocks = plan.plan[""]["a"].layout.blocks
    assert [(len(block.columns), block.rank) for block in blocks] == [(40, 1), (8, 0), (16, 1)]
    assert sw.ShardingPlan.from_json(plan.to_json()) == plan
    assert shardwright_torchrec.write_plan(plan)["plan"][""]["a"]["shards"] == columns(40, 8, 16)


def changed(**changes: Any) -> dict[str, Any]:
    data = json.loads(json.dumps(BY_HAND))
    data["plan"][""]["a"].update(changes)
    return data


SHARD = {"shard_offsets": [0, 0], "shard_sizes": [100, 64], "placement": "rank:0/cuda:0"}


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("[[1]", "the TorchRec plan is no JSON: .* at line 1, column 5"),
        ("[" * 5000 + "]" * 5000, "the TorchRec plan is nested too deeply"),
        ("[1, 2]", r"no plan of TorchRec's \(AttributeError"),
        ({"plan": {"": [3]}}, r"no plan of TorchRec's"),
        (changed(shards=3), r"no plan of TorchRec's \(TypeError"),
        ({"plan": {"": {"a": BY_HAND["plan"][""]["a"]}}}, "'b' of module '' is not in the plan"),
        ({"plan": {"x": {}, **BY_HAND["plan"], "y": {"c": {}}}}, "'c' of module 'y' is in the plan"),
        (changed(shards=[{**SHARD, "shard_sizes": [100, 32]}]), "has no layout with the plan's shards"),
        (changed(shards=[{**SHARD, "shard_sizes": [99, 64]}]), r"rows 0\+99 x columns 0\+64"),
        (changed(shards=columns(40, 8)), "has no layout with the plan's shards"),
        (changed(shards=[{**SHARD, "placement": "cuda:0"}]), "a placement like"),
        (changed(sharding_type="table_wise", shards=[{**SHARD, "placement": "rank:7/cuda:7"}]), "rank 7"),
        (changed(sharding_type="tabel_wise"), "Did you mean 'table_wise'"),
        (changed(compute_kernel="quant"), "no compute kernel 'quant'"),
    ],
)
def test_read_plan_that_does_not_fit_says_why(plan: Any, message: str) -> None:
    with pytest.raises(sw.ShardwrightError, match=message):
        shardwright_torchrec.read_plan(plan, BY_HAND_TABLES, TWO)


def test_write_plan_type_that_torchrec_does_not_know_is_refused() -> None:
    plan = planned("table_wise")
    own = plan.plan["other"]
    own["shop"] = attrs.evolve(own["shop"], sharding_type="even_first")
    with pytest.raises(sw.UnsupportedError, match=r"'even_first', which TorchRec does not know"):
        shardwright_torchrec.write_plan(plan)


def test_read_and_write_change_nothing() -> None:
    plan = planned("table_wise")
    with distributions.nothing_changes():
        shardwright_torchrec.read_plan(shardwright_torchrec.write_plan(plan), tables(), TOPOLOGY)


def test_live_without_torchrec_says_what_to_install() -> None:
    if why_not() is None:
        pytest.skip("TorchRec is installed here")
    installed = [*metadata.entry_points(group="shardwright"), *distributions.entry_points("torchrec")]
    planner = sw.EmbeddingShardingPlanner(TOPOLOGY, 64, estimator="torchrec_live")
    needed = pytest.raises(sw.UnsupportedError, match=r"TorchRec itself is needed: .*pip install torchrec")
    with sw.host.use_host(sw.host.PluginHost(entry_points=installed)), needed:
        planner.plan_tables(tables())
    shardwright_torchrec.install()
    try:
        with pytest.raises(sw.UnsupportedError, match=r"shardwright's in this process.*uninstall\(\)"):
            shardwright_torchrec.to_torchrec(planned("table_wise"))
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


OBJECTS = """
import json, shardwright as sw, shardwright.hookspecs, shardwright_torchrec as st
from importlib.metadata import EntryPoint
labels = [kind.label for kind in sw.hookspecs.KINDS]
points = [EntryPoint("builtin_" + n, "shardwright_plugins." + n, "shardwright") for n in labels]
with sw.host.use_host(sw.host.PluginHost(entry_points=points)):
    topology = sw.Topology(world_size=4, compute_device="cuda", local_world_size=2)
    tables = [sw.TableSpec("user", 1001, 128), sw.TableSpec("item", 4096, 64)]
    plan = sw.EmbeddingShardingPlanner(topology, 64).plan_tables(tables)
    theirs = st.to_torchrec(plan)
    back = st.read_plan(theirs, tables, topology)
    print(json.dumps([type(theirs).__module__, back.plan == plan.plan, theirs._serialize() == st.write_plan(plan)]))
"""


@needs_torchrec
def test_plan_as_torchrecs_objects_is_what_torchrec_serialises() -> None:
    assert in_torchrecs_python(OBJECTS) == ["torchrec.distributed.types", True, True]


@needs_torchrec
def test_names_are_where_torchrec_has_them() -> None:
    source = """
import importlib, json
from shardwright_torchrec.names import MODULES, QUANTIZED
pairs = [(m, n) for known in (MODULES, QUANTIZED) for m, names in known.items() for n in names]
print(json.dumps([f"{m}.{n}" for m, n in pairs if not hasattr(importlib.import_module(m), n)]))
"""
    assert in_torchrecs_python(source) == []
