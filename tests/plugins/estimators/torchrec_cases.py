"""Tables and topologies for which our estimates are compared with TorchRec's, and the comparison.

    python -m tests.plugins.estimators.torchrec_cases TORCHREC_PYTHON

asks TorchRec for the numbers of the small cases, and writes them to torchrec_golden.json.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from attrs import Factory, frozen

from shardwright.host import host
from shardwright.planning.machines.topology import Topology
from shardwright.planning.options.enumeration import enumerate_options
from shardwright.planning.options.options import Options
from shardwright.planning.tables.codecs import QCommsConfig
from shardwright.planning.tables.constraints import Constraints, ParameterConstraints
from shardwright.planning.tables.optimizers import OptimizerSpec
from shardwright.planning.tables.spec import TableSpec
from shardwright_plugins.estimators.torchrec_performance import TorchRecPerformance

HERE = Path(__file__).parent
SCRIPT, GOLDEN = HERE / "torchrec_numbers.py", HERE / "torchrec_golden.json"
PHASES = (
    "forward_compute",
    "forward_communication",
    "backward_compute",
    "backward_communication",
    "prefetch",
)
ALL_TYPES = (
    "table_wise",
    "column_wise",
    "table_column_wise",
    "row_wise",
    "table_row_wise",
    "grid_shard",
    "data_parallel",
)


@frozen
class Case:
    """Tables on a topology; `tables` are of name, rows, columns and pooling_factors (one a feature)."""

    tables: tuple[dict[str, Any], ...]
    ranks: int = 8
    local: int = 8
    batch_size: int = 512
    pooling: str = "SUM"
    data_type: str = "FP32"
    optimizer: str = "sgd"
    is_weighted: bool = False
    min_partition: int | None = None
    sharding_types: tuple[str, ...] | None = ALL_TYPES
    cache: dict[str, Any] | None = None
    bandwidths: dict[str, float] = Factory(dict)
    codecs: tuple[str, str] | None = None
    """Of results and of gradients."""


def table(name: str, rows: int, columns: int, *pooling_factors: float) -> dict[str, Any]:
    return {"name": name, "rows": rows, "columns": columns, "pooling_factors": list(pooling_factors)}


TABLES = (
    table("tiny", 3, 4, 0.25),
    table("narrow", 1000, 16, 1.0),
    table("middle", 5003, 64, 3.5, 0.25),
    table("wide", 100_000, 256, 20.0),
    table("odd", 777_777, 384, 2.2, 7.0, 0.0),
    table("huge", 400_000_000, 512, 1.0),
)
SEQUENCES = (table("few", 5, 128, 0.25), table("many", 100_001, 128, 3.5, 0.25, 20.0))
STATS = {
    "cacheability": 0.2,
    "expected_lookups": 123_456,
    "mrc_hist_counts": [9, 4, 2, 1, 0.5],
    "height": 5003,
}
SMALL = (
    Case(TABLES),
    Case(TABLES, ranks=1, local=1),
    Case(TABLES, ranks=2, local=1, batch_size=100),
    Case(TABLES, ranks=16, local=4, batch_size=4096, optimizer="row_wise_adagrad"),
    Case(TABLES, ranks=16, local=8, batch_size=8192, is_weighted=True, optimizer="adam"),
    Case(TABLES, ranks=4, local=4, data_type="FP16", optimizer="adagrad", min_partition=32),
    Case(TABLES, ranks=8, local=4, cache={"load_factor": 0.07}),
    Case(TABLES, ranks=8, local=4, cache={"load_factor": 0.3, "stats": STATS}, optimizer="adam"),
    Case(TABLES, ranks=8, local=4, cache={"stats": STATS}),
    Case(
        TABLES,
        ranks=6,
        local=3,
        pooling="MEAN",
        bandwidths={
            "hbm_mem_bw": 3e9,
            "ddr_mem_bw": 2e8,
            "hbm_to_ddr_mem_bw": 6e7,
            "intra_host_bw": 4e8,
            "inter_host_bw": 5e7,
        },
    ),
    Case(SEQUENCES, ranks=8, local=4, pooling="NONE", optimizer="adagrad"),
    Case(TABLES, sharding_types=None),
    Case(TABLES, ranks=16, local=4, codecs=("fp16", "bf16")),
    Case(TABLES, ranks=8, local=8, codecs=("fp32", "fp16"), data_type="FP16", is_weighted=True),
    Case(SEQUENCES, ranks=8, local=4, pooling="NONE", codecs=("bf16", "fp32")),
)


def workload_cases(path: Path) -> Iterator[Case]:
    """The tables of a workload file, on one host and on two."""
    listed = json.loads(path.read_text()).get("tables")
    if not listed:
        return
    tables = tuple(
        table(item["name"], item["num_embeddings"], item["embedding_dim"], *_pooling_factors(item))
        for item in listed
    )
    yield Case(tables, ranks=8, local=8, batch_size=8192)
    yield Case(tables, ranks=16, local=8, batch_size=4096, sharding_types=None)


def _pooling_factors(item: dict[str, Any]) -> list[float]:
    return item.get("pooling_factors") or [item["pooling_factor"]] * item["num_features"]


def ask_torchrec(cases: Iterable[Case], python: str) -> list[dict[str, Any]]:
    """The cases as JSON data with TorchRec's `options`."""
    with tempfile.TemporaryDirectory() as folder:
        asked, answered = Path(folder, "cases.json"), Path(folder, "numbers.json")
        asked.write_text(json.dumps([attrs.asdict(case) for case in cases]))
        subprocess.run([python, str(SCRIPT), str(asked), str(answered)], check=True)
        return json.loads(answered.read_text())


@frozen
class Comparison:
    """How far apart the numbers are, over how many options and shards; and TorchRec's options that we do not offer."""

    deviation: float
    num_options: int
    num_shards: int
    missing: tuple[str, ...]


def compare(case: dict[str, Any]) -> Comparison:
    """Our estimates beside TorchRec's."""
    ours, deviation, num_shards, missing = dict(_our_options(case)), 0.0, 0, []
    for name, kind, kernel, shards in case["options"]:
        theirs = np.array(shards, dtype=np.float64)
        found = ours.get((name, kind, kernel, _key(theirs)))
        if found is None:
            missing.append(f"{name} {kind} {kernel} {_key(theirs)}")
            continue
        expected = _expanded(theirs)[:, 2:]
        scale = np.maximum(np.abs(expected), np.finfo(float).tiny)
        deviation = max(deviation, float((np.abs(found - expected) / scale).max()))
        num_shards += len(found)
    return Comparison(deviation, len(case["options"]), num_shards, tuple(missing))


def _expanded(runs: np.ndarray) -> np.ndarray:
    return np.repeat(runs[:, 1:], runs[:, 0].astype(int), axis=0)


def _key(runs: np.ndarray) -> tuple[tuple[int, int], ...]:
    return tuple((int(rows), int(columns)) for rows, columns in _expanded(runs)[:, :2])


def _our_options(case: dict[str, Any]) -> Iterator[tuple[tuple[Any, ...], np.ndarray]]:
    topology = Topology(case["ranks"], "cuda", local_world_size=case["local"], **case["bandwidths"])
    options = our_options(case, topology)
    estimators = host().estimators
    times = estimators.create("torchrec").estimate(options, topology)
    assert tuple(times) == PHASES
    memory = estimators.create("torchrec_storage").estimate(options, topology)
    columns = [
        options.count,
        options.num_rows,
        options.num_columns,
        *times.values(),
        memory["hbm"],
        memory["ddr"],
    ]
    numbers = np.stack([np.asarray(column, dtype=np.float64) for column in columns], axis=1)
    for spec, alike in zip(options.all_tables, options.distinct_table.tolist(), strict=True):
        for option in options.of_table(alike):
            runs = numbers[options.shards_of(option)]
            names = (options.type_of(option).name, options.kernel_of(option).name)
            yield (spec.name, *names, _key(runs)), _expanded(runs)[:, 2:]


def our_options(case: dict[str, Any], topology: Topology) -> Options:
    """Every option in TorchRec's space, and those of the sharding types that the case names."""
    tables = [
        TableSpec(
            item["name"],
            item["rows"],
            item["columns"],
            [f"{item['name']}_{i}" for i in range(len(item["pooling_factors"]))],
            case["data_type"],
            case["pooling"],
            is_weighted=case["is_weighted"],
            optimizer=OptimizerSpec(
                case["optimizer"], is_assumed=True
            ),  # also of copies, which the script updates
            qcomms_config=QCommsConfig(*case["codecs"]) if case.get("codecs") else None,
        )
        for item in case["tables"]
    ]
    rules = {
        item["name"]: ParameterConstraints(
            pooling_factors=item["pooling_factors"],
            sharding_types=case["sharding_types"],
            min_partition=case["min_partition"],
            cache_params=case["cache"],
        )
        for item in case["tables"]
    }
    space = TorchRecPerformance(published_options=True).option_space(topology)
    return enumerate_options(
        tables, topology, Constraints(rules), host(), batch_size=case["batch_size"], space=space
    )


if __name__ == "__main__":
    GOLDEN.write_text(json.dumps(ask_torchrec(SMALL, sys.argv[1]), separators=(",", ":")) + "\n")
