"""A plugin that breaks its contract while planning or building is told so by name."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.errors import taken
from tests.plugins import broken
from tests.ports import group_of_one

import shardwright as sw
from shardwright_testing import installed, run_simulated

TABLE = sw.TableSpec("user", 100, 16, ["u"])


def plan(estimator: Any = None, **rules: Any) -> sw.ShardingPlan:
    topology = sw.Topology(world_size=1, compute_device="cpu")
    constraints = {"*": sw.ParameterConstraints(**rules)}
    planner = sw.EmbeddingShardingPlanner(topology, 8, estimator=estimator, constraints=constraints)
    return planner.plan_tables([TABLE])


@pytest.mark.parametrize("name", ["", "values", "weights"])
def test_kernel_whose_columns_have_names_that_no_column_has_is_named(name: str) -> None:
    kernel = broken.answering(broken.Kernel, "columns", lambda request: {name: "int64"})
    with pytest.raises(
        sw.PlanningError, match=r"'broken_kernel' broke its contract: columns\(\) must not name ''"
    ):
        planned(kernel)


def test_kernel_that_reads_less_than_nothing_of_a_tier_is_named() -> None:
    kernel = broken.answering(broken.Kernel, "reads", lambda request: {"device": 1.5, "host": -0.5})
    with pytest.raises(sw.PlanningError, match=r"'broken_kernel' broke its contract: the parts of reads\(\)"):
        planned(kernel, estimator="roofline")


def raised(request: Any) -> Any:
    raise KeyError("acme")


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (
            lambda request: 2,
            r"broke its contract: what needs_whole_rows\(\) returns must be True or False, got 2",
        ),
        (raised, "failed: KeyError: 'acme'"),
    ],
)
def test_kernel_that_does_not_tell_which_gradients_it_needs_is_named(answer: Any, text: str) -> None:
    kernel = broken.answering(broken.Kernel, "needs_whole_rows", answer)
    with pytest.raises(sw.PlanningError, match=rf"compute kernel 'broken_kernel' {text}"):
        planned(kernel)


def zeros_of(work: Any) -> Any:
    return np.zeros(len(work.ids))


TIMES: dict[str, Any] = {
    "one array": lambda work: zeros_of(work),
    "an array of both": lambda work: np.zeros((2, len(work.ids))),
    "two scalars": lambda work: (0.0, 0.0),
    "lists": lambda work: ([0.0] * len(work.ids), zeros_of(work)),
    "a third": lambda work: (zeros_of(work),) * 3,
    "of other blocks": lambda work: (np.zeros(7), np.zeros(7)),
    "a column": lambda work: (zeros_of(work)[:, None], zeros_of(work)),
    "complex": lambda work: (zeros_of(work), 1j * zeros_of(work)),
    "texts": lambda work: (zeros_of(work).astype(str), zeros_of(work)),
    "below 0": lambda work: (zeros_of(work), zeros_of(work) - 1),
    "not a number": lambda work: (zeros_of(work), zeros_of(work) * np.nan),
    "infinite": lambda work: (zeros_of(work) + np.inf, zeros_of(work)),
    "none of these blocks": lambda work: None if len(work.ids) else (zeros_of(work), zeros_of(work)),
}


@pytest.mark.parametrize("answer", TIMES.values(), ids=list(TIMES))
def test_kernel_that_tells_what_are_no_times_of_its_blocks_is_told_what_to_tell(answer: Any) -> None:
    kernel = broken.answering(broken.Kernel, "times_ms", lambda request, work: answer(work))
    text = (
        r"compute kernel 'broken_kernel' broke its contract: times_ms\(\) must return a pair, .* it returned "
    )
    with pytest.raises(sw.PlanningError, match=text):
        planned(kernel, estimator="engine")


def test_kernel_cannot_change_the_work_that_it_is_asked_about() -> None:
    def answer(request: Any, work: Any) -> Any:
        work.ids[:] = 0
        return zeros_of(work), zeros_of(work)

    with pytest.raises(sw.PlanningError, match=r"'broken_kernel' failed: ValueError: .* read-only"):
        planned(broken.answering(broken.Kernel, "times_ms", answer), estimator="engine")


def test_kernel_that_builds_no_lookup_is_named_with_the_tables() -> None:
    config = sw.EmbeddingBagConfig(name="user", num_embeddings=100, embedding_dim=16, feature_names=["u"])
    module, sharder = sw.EmbeddingBagCollection([config]), sw.EmbeddingBagCollectionSharder()
    torch.set_num_threads(1)
    with installed(broken.answering(broken.Kernel, "build", lambda blocks, device: None)):
        made = plan(compute_kernels=["broken_kernel"])
        text = r"'broken_kernel' broke its contract: build\(\) for the tables 'user' returned a NoneType"
        with pytest.raises(sw.UnsupportedError, match=text):
            run_simulated(lambda env: sharder.shard(module, made.plan[""], env, "cpu"), 1)


def planned(*plugins: Any, **parts: Any) -> Any:
    """A plan of one table by plugins, each of which is installed or given as a part."""
    rules: dict[str, Any] = {}
    with ExitStack() as stack:
        for plugin in plugins:
            stack.enter_context(installed(plugin))
            if isinstance(plugin, sw.ShardingType):
                rules["sharding_types"] = [plugin.name]
            if isinstance(plugin, sw.ComputeKernel):
                rules["compute_kernels"] = [plugin.name]
            if isinstance(plugin, sw.Codec):
                rules["qcomms_config"] = sw.QCommsConfig(plugin.name, plugin.name)
        planner = sw.EmbeddingShardingPlanner(
            sw.Topology(world_size=2, compute_device="cpu"),
            8,
            constraints={"*": sw.ParameterConstraints(**rules)},
            **parts,
        )
        return planner.plan_tables([broken.TABLE]).to_json()


_ASKS = {"times_ms": "engine"}

# What is asked, its method, the planner's argument or none where it is installed, and which answers will do.
METHODS: list[tuple[Any, str, str, str]] = [
    (broken.Kind, "supports", "", "True"),
    (broken.Kind, "layouts", "", ""),
    (broken.Cost, "estimate", "estimator", ""),
    (broken.Cost, "option_space", "estimator", ""),
    (broken.Cost, "provenance", "estimator", "{}|{'a': None}|{'a': 'b'}|{'device': -1}"),
    (broken.Memory, "estimate", "storage_estimator", ""),
    (broken.Search, "proposals", "proposer", ""),
    (broken.Place, "place", "partitioner", ""),
    (broken.Kernel, "supports", "", "True"),
    (broken.Kernel, "memory_bytes", "", ""),
    (broken.Kernel, "reads", "", ""),
    (broken.Kernel, "bandwidth_fraction", "", "0.5"),
    (broken.Kernel, "columns", "", "{}"),
    (broken.Kernel, "times_ms", "", "None"),
    (broken.Kernel, "extras", "", "{}|{'a': None}|{'a': 'b'}|{'device': -1}"),
    (broken.Coded, "row_bytes", "", ""),
]


@pytest.mark.parametrize(
    ("plugin", "method", "argument", "accepted"),
    METHODS,
    ids=[f"{plugin.__name__}.{method}" for plugin, method, _, _ in METHODS],
)
def test_answer_against_the_contract_is_an_error_that_names_the_plugin(
    plugin: Any, method: str, argument: str, accepted: str
) -> None:
    def ask(answer: Any) -> None:
        changed = broken.answering(plugin, method, answer)
        # A kernel's bandwidth and what it reads are asked by the one estimator, its times by the other.
        parts = {argument: changed} if argument else {"estimator": _ASKS.get(method, "roofline")}
        if argument == "partitioner":
            parts["proposer"] = broken.Search()  # the usual one brings ranks of its own
        planned(*([] if argument else [changed]), **parts)

    calls = {kind: partial(ask, answer) for kind, answer in broken.VALUES.items()}
    assert taken(calls, f"{plugin.name!r}") == set(filter(None, accepted.split("|")))


@pytest.mark.parametrize("kind", broken.VALUES)
def test_proposer_that_yields_what_is_no_proposal_is_named(kind: str) -> None:
    if kind == "raises":
        pytest.skip("a generator that raises is in the test above")
    with pytest.raises(sw.PlanningError, match="proposer 'broken_search' broke its contract"):
        planned(proposer=broken.Yields(broken.VALUES[kind]()))


@pytest.mark.parametrize("plugin", [broken.Cost, broken.Search, broken.Place, broken.Coded, broken.Kind])
@pytest.mark.parametrize("name", [None, 5, "", "a b"])
def test_plugin_without_a_name_is_told_so(plugin: Any, name: Any) -> None:
    nameless = type("Nameless", (plugin,), {"name": name})()
    argument = {broken.Cost: "estimator", broken.Search: "proposer", broken.Place: "partitioner"}.get(plugin)
    text = r"Nameless has the name .*; a name is a text without spaces"
    with pytest.raises(sw.ShardwrightError, match=text):
        planned(**{argument: nameless}) if argument else planned(nameless)


def test_comm_backend_that_connects_to_nothing_is_named() -> None:
    class Nowhere(sw.CommBackend):
        name, devices = "nowhere", ("cpu",)

        def connect(self, process_group: Any) -> Any:
            return None

    text = (
        r"comm backend 'nowhere' broke its contract: connect\(\) must return a Communicator, it returned None"
    )
    with group_of_one(), pytest.raises(sw.DistributedError, match=text):
        sw.ShardingEnv.from_process_group(comm_backend=Nowhere())
