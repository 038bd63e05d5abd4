"""How often a training step makes the host wait for a device, on one that is the CPU in disguise."""

from __future__ import annotations

import json

import pytest
from tests.programs import printed_by

TYPES = ("table_wise", "column_wise", "row_wise", "table_row_wise", "data_parallel")
# Events of a stream beside the main one. Sizes of a batch on the device, together with whether its ids are in range.
SIZES = "event at /sparse/_keyed_bags.py"
# Ids of each rank, where rows are cut: one copy more.
ROUTED = "event at /runtime/routed/routing.py"
# The update of plain torch, which counts the distinct rows.
DISTINCT = "unique_consecutive at /runtime/step/backward/row_gradients.py"

Case = tuple[int, str, str, str, str]
Waits = dict[Case, list[str]]


PLACES = ("host", "device")
# World size, sharding type, pooling, kernel, place of the batch.
HOST: list[Case] = [
    *((1, kind, "MEAN", "fused_triton", "host") for kind in TYPES),
    (2, "row_wise", "SUM", "fused_triton", "host"),
    (2, "table_row_wise", "NONE", "fused_triton", "host"),
]
DEVICE: list[Case] = [
    *((1, kind, "MEAN", "fused_triton", "device") for kind in TYPES),
    (1, "table_wise", "NONE", "fused_triton", "device"),
    (2, "table_wise", "SUM", "fused_triton", "device"),
]
CUT: list[Case] = [(2, "row_wise", pooling, "fused_triton", "device") for pooling in ("SUM", "NONE")]
TORCH: list[Case] = [(1, "table_wise", "SUM", kernel, "host") for kernel in ("fused_torch", "dense")]


def waits_of(cases: list[Case], *options: str) -> Waits:
    """The places at which the host waits in a training step of each case, without numbers of lines."""
    printed = printed_by("-m", "tests.plugins.pretend_device", json.dumps(cases), *options)
    found = [[place.rpartition(":")[0] for place in places] for places in json.loads(printed)]
    return dict(zip(cases, found, strict=True))


@pytest.mark.slow
def test_step_waits_for_the_sizes_of_a_batch_on_the_device_alone() -> None:
    pytest.importorskip("triton")
    waits = waits_of([*HOST, *DEVICE, *CUT])
    assert [waits[case] for case in HOST] == [[]] * len(HOST)
    assert [waits[case] for case in DEVICE] == [[SIZES]] * len(DEVICE)
    assert [waits[case] for case in CUT] == [[SIZES, ROUTED]] * len(CUT)


@pytest.mark.slow
def test_step_of_plain_torch_waits_once_more_in_its_update() -> None:
    assert waits_of(TORCH) == {case: [DISTINCT] for case in TORCH}


@pytest.mark.slow
def test_weights_of_ids_are_trained_wherever_the_batch_is() -> None:
    cases: list[Case] = [
        (1, kind, "WEIGHTED", "fused_torch", place)
        for kind in ("row_wise", "data_parallel")
        for place in PLACES
    ]
    assert waits_of(cases).keys() == set(cases)


@pytest.mark.slow
def test_device_without_streams_trains_by_copies_that_the_host_waits_for() -> None:
    cases: list[Case] = [
        (2, "row_wise", "MEAN", "fused_torch", "device"),
        (2, "table_wise", "NONE", "fused_torch", "host"),
        (2, "data_parallel", "SUM", "fused_torch", "host"),
        (1, "table_wise", "WEIGHTED", "fused_torch", "host"),
    ]
    for places in waits_of(cases, "--without-streams").values():
        assert any(place.startswith("blocking _to_copy") for place in places)
        assert not any(place.startswith("event") for place in places)
