"""Bandwidths and memory that are detected where ranks have an accelerator; here a CPU that is called one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.plugins.parts.brought import bringing

from shardwright import (
    EmbeddingBagCollection,
    EmbeddingBagCollectionSharder,
    EmbeddingBagConfig,
    EmbeddingShardingPlanner,
    PlanningError,
    ShardingEnv,
    Topology,
)
from shardwright.host import PluginHost, use_host
from shardwright.planning.assumptions import assumptions_of
from shardwright.runtime.ranks import devices
from shardwright.runtime.sharded.models import planner as planners
from shardwright.runtime.sharded.models.planner import _measured, _topology_of
from shardwright_plugins.bandwidths import measured as bandwidths
from shardwright_testing.simulated import run_simulated

CPU = torch.device("cpu")
SMALL = 1 << 12


def test_links_are_measured_by_exchanges_of_all_ranks_and_are_the_same_on_each() -> None:
    def measure(env: ShardingEnv) -> dict[str, float]:
        return bandwidths.link_bandwidths(env, CPU, num_bytes=SMALL)

    told = run_simulated(measure, 4, local_world_size=2)
    assert set(told[0]) == {"intra_host", "inter_host"}
    assert all(one == told[0] for one in told)
    assert set(run_simulated(measure, 2)[0]) == {"intra_host"}
    assert bandwidths.link_bandwidths(ShardingEnv.local(device_type="cpu"), CPU) == {}


def test_bandwidths_by_a_copy_are_rounded_and_by_attributes_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bandwidths, "_time_ms", lambda work, device: (work(), 0.123456)[1])
    assert bandwidths.memory_bandwidth(CPU, num_bytes=SMALL) == 66000.0  # 2 x 4096 / 0.123456
    assert bandwidths.host_link_bandwidth(CPU, num_bytes=SMALL) == 33000.0
    # An H100: 2.619 GHz, 5120 bits, two transfers a clock.
    module = SimpleNamespace(
        get_device_properties=lambda _: SimpleNamespace(memory_clock_rate=2_619_000, memory_bus_width=5120)
    )
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    assert bandwidths.memory_bandwidth(torch.device("cuda", 0)) == pytest.approx(3.352e12 / 1000, rel=1e-3)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """The CPU counts as an accelerator with 1 GiB of memory."""
    monkeypatch.setattr(devices, "has_accelerator", lambda _: True)
    monkeypatch.setattr(devices, "memory_bytes", lambda _: 1 << 30)
    monkeypatch.setattr(bandwidths, "memory_bandwidth", lambda device: 5.0)
    monkeypatch.setattr(bandwidths, "host_link_bandwidth", lambda device: 7.0)
    return monkeypatch


def test_least_of_all_ranks_counts_and_is_said_to_be_detected(pretended: pytest.MonkeyPatch) -> None:
    def measure(env: ShardingEnv) -> Topology:
        measured = _measured(env, is_wanted=env.rank == 0)
        return _topology_of(ShardingEnv(env.communicator, "cuda"), measured)

    topology = run_simulated(measure, 2)[0]
    assert topology.read_bandwidth("host") == 7.0
    origins = {name: value.origin for name, value in topology.provenance.items()}
    found = {"hbm_cap", "ddr_cap", "hbm_mem_bw", "hbm_to_ddr_mem_bw", "intra_host_bw"}
    assert {name for name in found if origins[name] == "detected"} == found
    assert origins["inter_host_bw"] == "assumed"  # there is one host
    assert topology.provenance["inter_host_bw"].source == assumptions_of("cuda")["inter_host_bw"].source


def test_nothing_is_measured_where_rank_0_has_a_topology(pretended: pytest.MonkeyPatch) -> None:
    told = run_simulated(lambda env: _measured(env, is_wanted=env.rank == 1), 2)
    assert told == [{}, {}]


def test_collective_plan_is_made_with_what_was_measured(pretended: pytest.MonkeyPatch) -> None:
    tables = [EmbeddingBagConfig(name="t", num_embeddings=8, embedding_dim=4, feature_names=["f"])]
    seen: list[Any] = []

    def topology_of(env: Any, measured: Any) -> Topology:
        seen.append(measured)
        raise PlanningError("that is enough")

    pretended.setattr(planners, "_topology_of", topology_of)
    pretended.setattr(planners, "_memory_of", lambda env: {"ddr_cap": 1 << 30})

    def plan(env: ShardingEnv) -> None:
        bags = EmbeddingBagCollection(tables, device="meta")
        with pytest.raises(PlanningError, match="that is enough"):
            EmbeddingShardingPlanner().collective_plan(bags, [EmbeddingBagCollectionSharder()], env=env)

    run_simulated(plan, 2)
    assert [set(one) for one in seen] == [{"ddr_cap", "hbm_mem_bw", "hbm_to_ddr_mem_bw", "intra_host_bw"}]


def test_strangers_source_of_a_topology_is_asked_on_every_rank(pretended: pytest.MonkeyPatch) -> None:
    def links(env: ShardingEnv) -> dict[str, float]:
        return {"intra_host_bw": 90.0 - 10.0 * env.rank, "hbm_cap": 1 << 29}

    acme = bringing("topology:acme_links", links)

    def measure(env: ShardingEnv) -> Topology:
        return _topology_of(ShardingEnv(env.communicator, "cuda"), _measured(env, is_wanted=env.rank == 0))

    with use_host(PluginHost(entry_points=(), plugins={"acme": acme}, environment={})):
        alone, other = run_simulated(measure, 2)
    assert alone == other
    found = alone.provenance["intra_host_bw"]
    assert (found.value, found.origin) == (80.0, "detected")  # the least of both ranks
    assert alone.provenance["hbm_cap"].value == 1 << 29  # prevails over what core found
    assert alone.provenance["hbm_mem_bw"].origin == "assumed"  # the built-in source is not loaded
