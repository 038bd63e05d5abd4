"""Hostile documents and arguments that once ended in a traceback, a hang or gigabytes, and what is told of each."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attrs import frozen

from shardwright.planning.documents.limits import MOST_RANKS

DIGITS = "9" * 5000


@frozen
class Named:
    """One case.

    Args:
        words: of the command line; ``{file}`` is the document, ``{plan}`` and ``{workload}`` are right ones.
        told: stands in what is printed.
        text: the document: ``made(plan, workload) -> text``.
    """

    words: str
    told: str
    text: Callable[[Any, Any], str] = lambda plan, workload: ""


def _plan(change: Callable[[Any], Any]) -> Callable[[Any, Any], str]:
    """A plan after a change."""

    def made(plan: Any, workload: Any) -> str:
        change(plan)
        return json.dumps(plan).replace('"DIGITS"', DIGITS)

    return made


def _table(**changes: Any) -> Callable[[Any, Any], str]:
    """A workload of one table with some values."""
    table = {"name": "t", "num_embeddings": 100, "embedding_dim": 8, **changes}
    text = json.dumps({"tables": [table]}).replace('"DIGITS"', DIGITS)
    return lambda plan, workload: text


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"deep": value}
    return value


def _dealt(plan: Any) -> Any:
    return plan["modules"][""]["dealt"]


def _hot(plan: Any) -> Any:
    return plan["modules"][""]["hot"]


def _on_many_ranks(plan: Any, row_map: Any = None) -> None:
    """Let a plan have one table, cut by rows over the most ranks that there may be, so that most parts are empty."""
    ranks = MOST_RANKS
    plan["topology"].update(world_size=ranks, local_world_size=2, memory_bytes={"hbm": 1 << 30})
    table = next(table for table in plan["inputs"]["tables"]["value"] if table["name"] == "user")
    plan["inputs"]["tables"]["value"], rows = [table], table["num_embeddings"]
    plan["inputs"]["constraints"]["value"] = {"user": {"sharding_types": ["row_wise"]}}
    entry = plan["modules"][""]["user"]
    entry.update(sharding_type="row_wise", compute_kernel="fused", **(row_map or {}))
    entry["shards"] = [
        {"rank": rank, "rows": [min(rank, rows), min(rank + 1, rows)], "columns": [0, 64]}
        for rank in range(ranks)
    ]
    plan["modules"] = {"": {"user": entry}}


def _with_many_bounds(plan: Any) -> None:
    """Let it have a row map of as many bounds, too."""
    bounds = [min(rank, 20_000) for rank in range(MOST_RANKS + 1)]
    _on_many_ranks(plan, {"row_map": {"name": "split", "bounds": bounds}})


_CHECK, _TABLES = "check {file}", "plan {file} --ranks 2"
CASES: Mapping[str, Named] = {
    "row_map.parts 1e8": Named(
        _CHECK,
        "table 'dealt': the row_map has 100000000 parts, and there are 4 shards for them",
        _plan(lambda plan: _dealt(plan)["row_map"].update(parts=10**8)),
    ),
    "world_size 1e9": Named(
        _CHECK,
        "topology.world_size must be 65536 at most, got 1000000000",
        _plan(lambda plan: plan["topology"].update(world_size=10**9, local_world_size=10**9)),
    ),
    "world_size 2**65": Named(
        _CHECK,
        "topology.world_size must be 65536 at most",
        _plan(lambda plan: plan["topology"].update(world_size=1 << 65)),
    ),
    "dataflow.name a list": Named(
        _CHECK,
        "table 'user': dataflow.name must be a text, got ['exchange']",
        _plan(lambda plan: plan["modules"][""]["user"].update(dataflow={"name": ["exchange"]})),
    ),
    "plan, integer of 5000 digits": Named(
        _CHECK,
        "is not read: Exceeds the limit",
        _plan(lambda plan: plan["objective"].update(value_ms="DIGITS")),
    ),
    "workload, integer of 5000 digits": Named(
        _TABLES, "is not read: Exceeds the limit", _table(num_embeddings="DIGITS")
    ),
    "cold_parts a list": Named(
        _CHECK,
        "table 'hot': its sharding type 'hot_rows' cannot be read with these values (TypeError",
        _plan(lambda plan: _hot(plan)["row_map"].update(cold_parts=[1])),
    ),
    "cold_parts 1e9": Named(
        _CHECK,
        "table 'hot': the row_map has 1000000001 parts",
        _plan(lambda plan: _hot(plan)["row_map"].update(cold_parts=10**9)),
    ),
    "nesting of 900": Named(
        "check --rewrite {file}",
        "is nested too deeply; 400 lists and objects inside each other are the most",
        _plan(lambda plan: plan.update({"x-deep": _nested(900)})),
    ),
    "nesting of 390 is rewritten": Named(
        "check --rewrite {file}",
        "rewritten: the document says value_ms = 0.5",
        _plan(lambda plan: (plan.update({"x-deep": _nested(390)}), plan["objective"].update(value_ms=0.5))),
    ),
    "a plan of the most ranks": Named(_CHECK, "costs add up to", _plan(_on_many_ranks)),
    "a row map of many bounds": Named(_CHECK, "costs add up to", _plan(_with_many_bounds)),
    "[[[ as workload": Named(_TABLES, "is nested too deeply", lambda plan, workload: "[" * 100_000),
    "lists in pairs as workload": Named(
        _TABLES, "is nested too deeply", lambda plan, workload: "[" * 500 + "]" * 500
    ),
    "module an object": Named(_TABLES, "table 0 ('t'): module must be a text, got {}", _table(module={})),
    "rate of 10**400": Named(
        _TABLES, "table 0 ('t'): pooling_factor must be 1000000000 at most", _table(pooling_factor=10**400)
    ),
    "learning rate of 10**400": Named(
        _TABLES,
        "optimizer.learning_rate must be 1.7976931348623157e+308 at most",
        _table(optimizer={"name": "sgd", "learning_rate": 10**400}),
    ),
    "optimizer of objects": Named(
        _TABLES, "table 0 ('t'): optimizer.eps must be", _table(optimizer={"name": "sgd", "eps": {}})
    ),
    "a rate in constraints of 10**400": Named(
        "plan {workload} --ranks 2 --constraints {file}",
        "constraints['user']: pooling_factors[0] must be 1000000000 at most",
        lambda plan, workload: json.dumps({"user": {"pooling_factors": [10**400]}}),
    ),
    "cache_params of texts": Named(
        "plan {workload} --ranks 2 --constraints {file}",
        "constraints['user']: cache_params.load_factor must be null or a number, got 'half'",
        lambda plan, workload: json.dumps({"user": {"cache_params": {"load_factor": "half"}}}),
    ),
    "certificate of 10**400": Named(
        _CHECK,
        "objective.certificate.z_ms must be 1.7976931348623157e+308 at most",
        _plan(lambda plan: plan["objective"]["certificate"].update(z_ms=10**400)),
    ),
    "diff of a table name with markup": Named(
        "diff {plan} {file}",
        "[/red]",
        _plan(lambda plan: plan["modules"][""].update({"[/red]": plan["modules"][""].pop("user")})),
    ),
    "explain, name with markup": Named("explain {plan} --table [/red]", "the plan has no table '[/red]'"),
    "--ranks 100000000": Named("plan {workload} --ranks 100000000", "from 1 to 65536"),
    "demo --ranks 100000000": Named("demo --ranks 100000000", "less than or equal to 1024"),
    "plan --batch 10**30": Named(
        f"plan {{workload}} --ranks 2 --batch {10**30}",
        "batch_size must be an integer from 1 to 2147483647 or None",
    ),
    "check of a folder": Named("check /", "the plan document '/' cannot be read: Is a directory"),
}


def write(named: Named, path: Path, plan: Path, workload: Path) -> list[str]:
    """Write the document of a case; the words of its command line."""
    path.write_text(named.text(json.loads(plan.read_text()), json.loads(workload.read_text())))
    return named.words.format(file=path, plan=plan, workload=workload).split()
