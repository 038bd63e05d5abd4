from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shardwright as sw
from shardwright.errors import InvalidInputError, NoPlanError, UnknownNameError
from shardwright.planning.machines.reservations import (
    DenseBytes,
    FixedAbsoluteStorageReservation,
    FixedPercentageStorageReservation,
    HeuristicalStorageReservation,
    InferenceStorageReservation,
    as_reservation,
    reservation_from_data,
)
from shardwright.planning.machines.topology import GIB, Topology
from shardwright.runtime.sharded.models.dense_bytes import dense_bytes

TOPOLOGY = Topology(2, "cuda", hbm_cap=[10 * GIB, 3 * GIB], ddr_cap=7)
DENSE = DenseBytes(parameters=1000, buffers=10)


def usable(reservation, topology=TOPOLOGY, ids=0.0):
    return reservation.capacity_bytes(topology, ids)[:, 0].tolist()


def test_percentage_keeps_a_part_of_the_devices_memory_and_none_of_the_hosts():
    capacity = FixedPercentageStorageReservation(0.25).capacity_bytes(TOPOLOGY, 0)
    np.testing.assert_array_equal(capacity, [[7.5 * GIB, 7], [2.25 * GIB, 7]])


def test_percentage_rounds_as_torchrec_does():
    topology = Topology(1, "cuda", hbm_cap=32 * GIB)
    assert usable(FixedPercentageStorageReservation(0.15), topology) == [int((1 - 0.15) * 32 * GIB)]


def test_percentage_on_a_cpu_is_of_the_hosts_memory():
    assert usable(FixedPercentageStorageReservation(0.5), Topology(1, "cpu", ddr_cap=100)) == [50]


def test_absolute_keeps_as_many_bytes_of_each_and_all_of_a_smaller_device():
    assert FixedAbsoluteStorageReservation.from_gb(4).hbm_reserved_bytes == 4 * GIB
    assert usable(FixedAbsoluteStorageReservation.from_gb(4)) == [6 * GIB, 0]


def test_heuristical_keeps_a_part_dense_tensors_with_their_training_state_and_ids_in_flight():
    reservation = HeuristicalStorageReservation(0.5).with_dense(DENSE)
    kept = 6 * 1000 + 10 + 20 * 8 * 300
    assert usable(reservation, ids=300.0) == [5 * GIB - kept, 1.5 * GIB - kept]


def test_heuristical_estimate_goes_before_the_models_tensors():
    reservation = HeuristicalStorageReservation(0.0, dense_tensor_estimate=7).with_dense(DENSE)
    assert usable(reservation) == [10 * GIB - 7, 3 * GIB - 7]


def test_inference_keeps_a_part_dense_tensors_and_one_batch_of_ids():
    reservation = InferenceStorageReservation(0.0).with_dense(DENSE)
    assert usable(reservation, ids=2.5) == [10 * GIB - 1010 - 20, 3 * GIB - 1010 - 20]


@pytest.mark.parametrize("kind", [HeuristicalStorageReservation, InferenceStorageReservation])
def test_dense_tensors_that_are_not_known_raise(kind):
    with pytest.raises(InvalidInputError, match=r"plan\(module, sharders\), or give dense_tensor_estimate"):
        kind(0.1).capacity_bytes(TOPOLOGY, 0)


def test_reservation_larger_than_a_device_is_an_error_with_the_numbers():
    reservation = HeuristicalStorageReservation(0.5, dense_tensor_estimate=2 * GIB)
    with pytest.raises(NoPlanError, match=r"keeps 3\.5 GiB of hbm free on rank 1, which has 3\.0 GiB"):
        reservation.capacity_bytes(TOPOLOGY, 0)


@pytest.mark.parametrize("value", [-0.1, 1, 1.5, True, "0.1", float("nan")])
def test_as_reservation_of_no_part_raises(value):
    with pytest.raises(InvalidInputError, match="from 0 to below 1"):
        as_reservation(value)


@pytest.mark.parametrize("percentage", [-0.1, 1.1, "x", None])
def test_percentage_of_no_part_raises(percentage):
    with pytest.raises(InvalidInputError, match="from 0 to 1"):
        HeuristicalStorageReservation(percentage)


ANY = st.one_of(
    st.builds(FixedPercentageStorageReservation, st.floats(0, 0.99)),
    st.builds(FixedAbsoluteStorageReservation, st.integers(0, 2**50)),
    st.builds(HeuristicalStorageReservation, st.floats(0, 0.5), st.floats(0, 10), st.integers(0, 10**9)),
    st.builds(InferenceStorageReservation, st.floats(0, 0.5), st.integers(0, 10**9)),
)


@given(reservation=ANY, ids=st.floats(0, 1e6))
def test_reservation_survives_json_and_leaves_no_more_than_there_is(reservation, ids):
    assert reservation_from_data(reservation.to_data()) == reservation
    left = reservation.capacity_bytes(TOPOLOGY, ids)
    assert (left >= 0).all()
    assert (left <= TOPOLOGY.capacity_bytes).all()


def test_reservation_from_unknown_data_raises():
    with pytest.raises(UnknownNameError, match="Did you mean 'heuristical'"):
        reservation_from_data({"name": "heuristcal"})
    with pytest.raises(InvalidInputError, match="cannot be read"):
        reservation_from_data({"name": "inference", "part": 1})


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
