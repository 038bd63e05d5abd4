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


@pytest.mark.parametrize("argument", ["hbm_cap", "hbm_mem_bw"])
def test_topology_hbm_for_the_host_device_raises(argument):
    with pytest.raises(InvalidInputError, match=rf"{argument}=10.* host memory only; give ddr_cap"):
        Topology(2, "cpu", **{argument: 10})


def test_topology_can_be_sent_to_other_processes():
    topology = Topology(2, "cuda", hbm_cap=[1, 2])
    again = pickle.loads(pickle.dumps(topology))
    assert again == topology
    assert again.provenance == topology.provenance


@pytest.mark.parametrize("said", ["gpu", "GPU", "CUDA"])
def test_topology_of_gpus_is_told_what_they_are_called(said):
    with pytest.raises(UnknownNameError, match=rf"no compute_device '{said}'.* Did you mean 'cuda'\?"):
        Topology(2, said)


def test_topology_unknown_device_raises_with_the_nearest():
    with pytest.raises(
        UnknownNameError, match=r"no compute_device 'cudda'. Known: cpu, cuda. Did you mean 'cuda'\?"
    ):
        Topology(2, "cudda")


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


def test_topology_reads_a_further_tier_at_its_own_bandwidth_or_through_its_link():
    further = {"memory_bytes": {"ssd": 10}, "memory_bandwidths": {"ssd": 2.0}}
    assert Topology(1, "cuda", **further).read_bandwidth("ssd") == 2.0
    assert Topology(1, "cuda", **further, link_bandwidths={"hbm_to_ssd": 1.0}).read_bandwidth("ssd") == 1.0
    with pytest.raises(UnknownNameError, match=r"memory_bandwidths=\{'ssd'"):
        Topology(1, "cuda", memory_bytes={"ssd": 10}).read_bandwidth("ssd")


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


def test_part_rounds_as_torchrec_does():
    topology = Topology(1, "cuda", hbm_cap=32 * GIB)
    assert usable(StorageReservation(0.15), topology) == [int((1 - 0.15) * 32 * GIB)]


def test_reservation_is_the_sum_of_a_part_bytes_dense_tensors_and_ids():
    reservation = StorageReservation(0.5, 7, dense_multiplier=6, id_copies=20).with_dense(DENSE)
    kept = 7 + 6 * 1000 + 10 + 20 * 8 * 300
    assert usable(reservation, ids=300.0) == [5 * GIB - kept, 1.5 * GIB - kept]


def test_dense_tensors_that_are_not_known_raise():
    with pytest.raises(InvalidInputError, match=r"plan\(module, sharders\), or give fixed_bytes"):
        StorageReservation(dense_multiplier=1).capacity_bytes(TOPOLOGY, 0)


def test_reservation_larger_than_a_device_is_an_error_with_the_numbers():
    reservation = StorageReservation(0.5, 2 * GIB)
    with pytest.raises(NoPlanError, match=r"keeps 3\.5 GiB of hbm free on rank 1, which has 3\.0 GiB"):
        reservation.capacity_bytes(TOPOLOGY, 0)


ANY = st.builds(
    StorageReservation, st.floats(0, 0.5), st.integers(0, 10**9), st.just(0.0), st.integers(0, 20)
)


@given(reservation=ANY, ids=st.floats(0, 1e6))
def test_reservation_survives_json_and_leaves_no_more_than_there_is(reservation, ids):
    assert as_reservation(reservation.to_data()) == reservation
    left = reservation.capacity_bytes(TOPOLOGY, ids)
    assert (left >= 0).all()
    assert (left <= TOPOLOGY.capacity_bytes).all()


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
