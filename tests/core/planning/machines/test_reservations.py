from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardwright as sw
from shardwright.errors import InvalidInputError, NoPlanError
from shardwright.planning.machines.reservations import (
    DenseBytes,
    StorageReservation,
    as_reservation,
)
from shardwright.planning.machines.topology import GIB, Topology
from shardwright.runtime.sharded.models.dense_bytes import dense_bytes

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
