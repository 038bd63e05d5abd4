"""Topologies, the memory that they are given, and what is kept free of it."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardwright as sw
from shardwright.errors import InvalidInputError, NoPlanError, UnknownNameError
from shardwright.planning.machines.host_memory import host_memory_bytes
from shardwright.planning.machines.reservations import (
    DenseBytes,
    StorageReservation,
    as_reservation,
)
from shardwright.planning.machines.topology import GIB, Topology
from shardwright.runtime.sharded.models.dense_bytes import dense_bytes


def test_topology_defaults_are_assumed_and_say_their_source():
    topology = Topology(world_size=4, compute_device="cuda")
    assert topology.tiers == ("hbm", "ddr")
    np.testing.assert_array_equal(topology.capacity_bytes, [[32 * GIB, 128 * GIB]] * 4)
    assert topology.provenance["hbm_cap"].origin == "assumed"
    assert "TorchRec" in topology.provenance["hbm_cap"].source
    assert topology.provenance["world_size"].origin == "given"


def test_topology_given_values_are_used_and_noted():
    topology = Topology(
        2,
        "cuda",
        hbm_cap=5 * GIB,
        ddr_cap=[7, 8],
        intra_host_bw=1.0,
        inter_host_bw=2.0,
        hbm_to_ddr_mem_bw=2.5,
        hbm_mem_bw=3.0,
        ddr_mem_bw=4.0,
    )
    np.testing.assert_array_equal(topology.capacity_bytes, [[5 * GIB, 7], [5 * GIB, 8]])
    assert dict(topology.link_bandwidths) == {"intra_host": 1.0, "inter_host": 2.0, "hbm_to_ddr": 2.5}
    assert dict(topology.memory_bandwidths) == {"hbm": 3.0, "ddr": 4.0}
    assert {name for name, value in topology.provenance.items() if value.origin == "assumed"} == {
        "local_world_size",
        "intra_host_latency_ms",
        "inter_host_latency_ms",
    }


def test_topology_of_the_host_device_has_host_memory_only():
    topology = Topology(2, "cpu", ddr_cap=10)
    assert topology.tiers == ("ddr",)
    assert topology.tier_of("device") == topology.tier_of("host") == "ddr"


def test_topology_of_an_accelerator_tells_device_from_host():
    topology = Topology(2, "cuda")
    assert (topology.tier_of("device"), topology.tier_of("host")) == ("hbm", "ddr")


@pytest.mark.parametrize("argument", ["hbm_cap", "hbm_mem_bw"])
def test_topology_hbm_for_the_host_device_raises(argument):
    with pytest.raises(InvalidInputError, match=rf"{argument}=10.* host memory only; give ddr_cap"):
        Topology(2, "cpu", **{argument: 10})


def test_topology_can_be_sent_to_other_processes():
    topology = Topology(2, "cuda", hbm_cap=[1, 2])
    again = pickle.loads(pickle.dumps(topology))
    assert again == topology
    assert again.provenance == topology.provenance


def test_topology_further_tiers_and_links_are_names():
    topology = Topology(
        2, "cuda", memory_bytes={"ssd": 99}, memory_bandwidths={"ssd": 1.5}, link_bandwidths={"rack": 0.5}
    )
    assert topology.tiers == ("hbm", "ddr", "ssd")
    assert topology.tier_of("ssd") == "ssd"
    assert topology.to_data()["memory_bytes"]["ssd"] == 99
    assert topology.link_bandwidths["rack"] == 0.5


def test_topology_unknown_tier_raises_with_the_nearest():
    with pytest.raises(UnknownNameError, match=r"no memory tier 'hdm'.*Did you mean 'hbm'\?"):
        Topology(2, "cuda").tier_of("hdm")


def test_topology_of_gpus_is_told_what_they_are_called():
    with pytest.raises(UnknownNameError, match=r"no compute_device 'gpu'.* Did you mean 'cuda'\?"):
        Topology(2, "gpu")


def test_topology_unknown_device_raises_with_the_nearest():
    with pytest.raises(
        UnknownNameError, match=r"no compute_device 'cudda'. Known: cpu, cuda. Did you mean 'cuda'\?"
    ):
        Topology(2, "cudda")


def test_topology_hosts_and_links():
    topology = Topology(8, "cuda", local_world_size=4)
    assert topology.num_hosts == 2
    assert [topology.host_of(rank) for rank in (0, 3, 4, 7)] == [0, 0, 1, 1]
    assert topology.link_between(4) == "intra_host"
    assert topology.link_between(5) == "inter_host"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"world_size": 0}, "world_size must be an integer from 1 to .*, got 0"),
        ({"world_size": 2.0}, "world_size must be an integer from 1 to .*, got 2.0"),
        ({"world_size": 10**9}, "world_size must be an integer from 1 to .*, got 1000000000"),
        ({"local_world_size": 3}, "4 ranks do not divide into hosts of 3"),
        ({"local_world_size": 8}, "4 ranks do not divide into hosts of 8"),
        ({"hbm_cap": -1}, "hbm_cap must be .*, got -1"),
        ({"hbm_cap": [1, 2]}, "hbm_cap has 2 values for 4 ranks"),
        ({"hbm_cap": "1G"}, "hbm_cap must be .*, got '1G'"),
        ({"hbm_cap": 1.5}, "hbm_cap must be bytes"),
        ({"hbm_cap": float("inf")}, "hbm_cap must be .*, got inf"),
        ({"hbm_cap": 10**30}, "hbm_cap must be a finite number from 0 to 1125899906842624 .*, got 10"),
        ({"ddr_cap": [1, 2, 3, None]}, r"ddr_cap\[3\] must be a finite number .*, got None"),
        ({"intra_host_bw": 0}, "intra_host_bw must be a finite number above 0 or None, got 0"),
        ({"intra_host_bw": "fast"}, "intra_host_bw must be a finite number above 0 or None, got 'fast'"),
        ({"inter_host_bw": float("inf")}, "inter_host_bw must be a finite number above 0 or None, got inf"),
        ({"ddr_cap": np.array([1, 2, -3, 4])}, r"ddr_cap\[2\] must be a finite number from 0"),
        ({"ddr_cap": np.ones((4, 1))}, r"ddr_cap\[0\] must be a finite number from 0"),
        ({"speed": np.array([1.0, 0.5])}, "speed has 2 values for 4 ranks"),
        ({"link_latencies_ms": {"rack": -1}}, r"link_latencies_ms\['rack'\] must be a finite number from 0"),
    ],
)
def test_topology_wrong_value_raises(arguments, text):
    with pytest.raises(InvalidInputError, match=text):
        Topology(**{"world_size": 4, "compute_device": "cuda", **arguments})


def test_topology_detected_values_are_noted_so():
    topology = Topology(2, "cpu", local_world_size=2, detected=("world_size", "local_world_size"))
    assert topology.provenance["world_size"].origin == "detected"
    assert topology.provenance["compute_device"].origin == "given"


def test_topology_reads_the_hosts_memory_through_the_link_from_it():
    topology = Topology(2, "cuda", hbm_mem_bw=9.0, ddr_mem_bw=5.0, hbm_to_ddr_mem_bw=3.0)
    assert [topology.read_bandwidth(tier) for tier in ("device", "host", "hbm", "ddr")] == [
        9.0,
        3.0,
        9.0,
        3.0,
    ]
    assert Topology(2, "cpu", ddr_mem_bw=5.0).read_bandwidth("host") == 5.0


def test_topology_reads_a_further_tier_at_its_own_bandwidth_or_through_its_link():
    further = {"memory_bytes": {"ssd": 10}, "memory_bandwidths": {"ssd": 2.0}}
    assert Topology(1, "cuda", **further).read_bandwidth("ssd") == 2.0
    assert Topology(1, "cuda", **further, link_bandwidths={"hbm_to_ssd": 1.0}).read_bandwidth("ssd") == 1.0
    with pytest.raises(UnknownNameError, match=r"memory_bandwidths=\{'ssd'"):
        Topology(1, "cuda", memory_bytes={"ssd": 10}).read_bandwidth("ssd")


def test_topology_latencies_are_given_by_link_or_assumed():
    topology = Topology(4, "cuda", link_latencies_ms={"inter_host": 0.5, "pcie": 0.1})
    assert topology.link_latencies_ms == {"intra_host": 0.02, "inter_host": 0.5, "pcie": 0.1}
    assert topology.provenance["intra_host_latency_ms"].origin == "assumed"
    assert topology.provenance["inter_host_latency_ms"].origin == "given"


@pytest.mark.parametrize("latency", [-1, float("inf"), "fast", True])
def test_topology_wrong_latency_raises(latency):
    with pytest.raises(
        InvalidInputError,
        match=r"link_latencies_ms.'intra_host'. must be a finite number from 0",
    ):
        Topology(1, "cuda", link_latencies_ms={"intra_host": latency})


def test_topology_of_hosts_assumes_what_was_measured_on_one():
    provenance = Topology(2, "cpu").provenance
    for name in ("ddr_mem_bw", "intra_host_bw", "intra_host_latency_ms"):
        assert provenance[name].origin == "assumed"
        assert "measured" in provenance[name].source
    assert "hbm_to_ddr_mem_bw" not in provenance


def test_topology_takes_integers_of_numpy():
    topology = Topology(np.int64(4), "cpu", local_world_size=np.int32(2))
    assert topology == Topology(4, "cpu", local_world_size=2)
    assert type(topology.world_size) is type(topology.local_world_size) is int


def test_topology_takes_arrays_of_numpy():
    arrays = {
        "ddr_cap": np.array([4, 5]),
        "memory_bytes": {"disk": np.array([6.0, 7.0])},
        "speed": np.array([1, 0.5]),
    }
    lists = {"ddr_cap": [4, 5], "memory_bytes": {"disk": [6, 7]}, "speed": [1.0, 0.5]}
    made, expected = Topology(2, "cpu", **arrays), Topology(2, "cpu", **lists)
    assert made == expected
    assert json.dumps(made.to_data()) == json.dumps(expected.to_data())
    assert json.dumps([value.to_data() for value in made.provenance.values()])


TOPOLOGY = Topology(2, "cuda", hbm_cap=[10 * GIB, 3 * GIB], ddr_cap=7)
DENSE = DenseBytes(parameters=1000, buffers=10)


def usable(reservation, topology=TOPOLOGY, ids=0.0):
    return reservation.capacity_bytes(topology, ids)[:, 0].tolist()


def test_part_is_of_the_devices_memory_and_none_of_the_hosts():
    capacity = StorageReservation(0.25).capacity_bytes(TOPOLOGY, 0)
    np.testing.assert_array_equal(capacity, [[7.5 * GIB, 7], [2.25 * GIB, 7]])


def test_part_rounds_as_torchrec_does():
    topology = Topology(1, "cuda", hbm_cap=32 * GIB)
    assert usable(StorageReservation(0.15), topology) == [int((1 - 0.15) * 32 * GIB)]


def test_part_on_a_cpu_is_of_the_hosts_memory():
    assert usable(StorageReservation(0.5), Topology(1, "cpu", ddr_cap=100)) == [50]


def test_reservation_is_the_sum_of_a_part_bytes_dense_tensors_and_ids():
    reservation = StorageReservation(0.5, 7, dense_multiplier=6, id_copies=20).with_dense(DENSE)
    kept = 7 + 6 * 1000 + 10 + 20 * 8 * 300
    assert usable(reservation, ids=300.0) == [5 * GIB - kept, 1.5 * GIB - kept]


def test_buffers_count_only_where_dense_tensors_do():
    reservation = StorageReservation(fixed_bytes=7, id_copies=1).with_dense(DENSE)
    assert usable(reservation, ids=2.5) == [10 * GIB - 27, 3 * GIB - 27]


def test_dense_tensors_that_are_not_known_raise():
    with pytest.raises(InvalidInputError, match=r"plan\(module, sharders\), or give fixed_bytes"):
        StorageReservation(dense_multiplier=1).capacity_bytes(TOPOLOGY, 0)


def test_reservation_larger_than_a_device_is_an_error_with_the_numbers():
    reservation = StorageReservation(0.5, 2 * GIB)
    with pytest.raises(NoPlanError, match=r"keeps 3\.5 GiB of hbm free on rank 1, which has 3\.0 GiB"):
        reservation.capacity_bytes(TOPOLOGY, 0)


@pytest.mark.parametrize("value", [-0.1, 1, 1.5, True, "0.1", float("nan")])
def test_as_reservation_of_no_part_raises(value):
    with pytest.raises(InvalidInputError, match="from 0 below 1"):
        as_reservation(value)


@pytest.mark.parametrize("part", [-0.1, 1.1, "x", None, True])
def test_reservation_of_no_part_raises(part):
    with pytest.raises(InvalidInputError, match="from 0 to 1"):
        StorageReservation(part)


@pytest.mark.parametrize("name", ["fixed_bytes", "dense_multiplier", "id_copies"])
def test_reservation_of_no_number_raises(name):
    for wrong in (-1, float("inf"), "x", True):
        with pytest.raises(InvalidInputError, match=name):
            StorageReservation(**{name: wrong})


ANY = st.builds(
    StorageReservation, st.floats(0, 0.5), st.integers(0, 10**9), st.just(0.0), st.integers(0, 20)
)


@given(reservation=ANY, ids=st.floats(0, 1e6))
def test_reservation_survives_json_and_leaves_no_more_than_there_is(reservation, ids):
    assert as_reservation(reservation.to_data()) == reservation
    left = reservation.capacity_bytes(TOPOLOGY, ids)
    assert (left >= 0).all()
    assert (left <= TOPOLOGY.capacity_bytes).all()


def test_part_alone_is_a_number_in_json():
    assert StorageReservation(0.25).to_data() == 0.25
    assert StorageReservation(0.25, id_copies=1).to_data()["id_copies"] == 1


def test_reservation_from_unknown_data_raises():
    with pytest.raises(InvalidInputError, match="Known: part"):
        as_reservation({"percentage": 0.1})


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        configs = [sw.EmbeddingBagConfig(name="t", num_embeddings=100, embedding_dim=8, feature_names=["f"])]
        self.bags = sw.EmbeddingBagCollection(configs, device="meta")
        self.over = torch.nn.Linear(8, 3, device="meta")
        self.register_buffer("seen", torch.zeros(5, dtype=torch.int64))


def test_dense_bytes_are_those_that_no_sharder_shards():
    sharders = [sw.EmbeddingBagCollectionSharder()]
    assert dense_bytes(Model(), sharders) == DenseBytes(parameters=(8 * 3 + 3) * 4, buffers=40)


TOTAL = 64 << 30


def machine(root: Path, groups: str, limits: dict[str, str]) -> Path:
    """A machine whose control groups have these limits, by file below `/sys/fs/cgroup`."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in limits.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    return root


@pytest.mark.parametrize(
    ("groups", "limits", "expected"),
    [
        ("0::/\n", {}, TOTAL),
        ("0::/\n", {"memory.max": "max"}, TOTAL),
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": str(8 << 30)}, 8 << 30),
        ("0::/pod\n", {"memory.max": str(4 << 30)}, 4 << 30),  # a container that does not see its own path
        ("9:name=systemd:/\n4:memory:/job\n", {"memory/job/memory.limit_in_bytes": str(2 << 30)}, 2 << 30),
        ("4:cpu,memory:/\n", {"memory/memory.limit_in_bytes": str((1 << 63) - 4096)}, TOTAL),  # no limit
    ],
)
def test_host_memory_is_the_least_of_machine_and_groups(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    groups: str,
    limits: dict[str, str],
    expected: int,
) -> None:
    told = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": TOTAL // 4096}
    monkeypatch.setattr(os, "sysconf", told.__getitem__)
    assert host_memory_bytes(machine(tmp_path, groups, limits)) == expected


def test_host_memory_of_this_machine_is_found_without_proc_too(tmp_path: Path) -> None:
    here, by_posix = host_memory_bytes(), host_memory_bytes(tmp_path)
    assert here
    assert by_posix
    assert here <= by_posix
