"""Devices of ranks: which number, how much memory; as torch would tell them on a machine with accelerators."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from shardwright.runtime.ranks.devices import memory_bytes, with_index
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.sharded.models.planner import _topology_of

CUDA = torch.device("cuda")


@pytest.fixture
def four_devices(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Devices 0 to 3 of CUDA, with 80 GiB or, the third, 40 GiB."""
    sizes = [80 << 30, 80 << 30, 40 << 30, 80 << 30]
    module = SimpleNamespace(get_device_properties=lambda index: SimpleNamespace(total_memory=sizes[index]))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: CUDA)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: len(sizes))
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    return monkeypatch


def test_with_index_takes_the_current_device_or_that_of_the_local_rank(
    four_devices: pytest.MonkeyPatch,
) -> None:
    assert with_index(CUDA) == torch.device("cuda", 0)
    four_devices.setenv("LOCAL_RANK", "2")
    assert with_index(CUDA) == torch.device("cuda", 2)
    assert with_index(torch.device("cuda", 1)) == torch.device("cuda", 1)
    four_devices.setattr(torch.accelerator, "current_device_index", lambda: 3)
    assert with_index(CUDA) == torch.device("cuda", 3)  # set by the user
    assert with_index(torch.device("cpu")) == torch.device("cpu")


def test_with_index_of_a_rank_that_sees_its_own_device_only_is_that(
    four_devices: pytest.MonkeyPatch,
) -> None:
    four_devices.setenv("LOCAL_RANK", "2")
    four_devices.setattr(torch.accelerator, "device_count", lambda: 1)
    assert with_index(CUDA) == torch.device("cuda", 0)


def test_memory_of_devices_is_planned_with_and_said_to_be_detected(
    four_devices: pytest.MonkeyPatch,
) -> None:
    assert memory_bytes("cuda") == 40 << 30
    assert memory_bytes("cpu") is None
    topology = _topology_of(ShardingEnv.local(device_type="cuda"))
    assert topology.provenance["hbm_cap"].origin == "detected"
    assert topology.provenance["hbm_cap"].value == 40 << 30
    assert topology.provenance["ddr_cap"].origin == "detected"
    assert topology.provenance["hbm_mem_bw"].origin == "assumed"  # nobody measured it
