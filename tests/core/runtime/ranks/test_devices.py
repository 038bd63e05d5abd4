"""Devices of ranks: which number, how much memory; as torch would tell them on a machine with accelerators."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from shardwright import (
    DistributedModelParallel,
    EmbeddingBagCollection,
    EmbeddingBagCollectionSharder,
    EmbeddingBagConfig,
    InvalidInputError,
    ShardingEnv,
    UnsupportedError,
)
from shardwright.runtime.ranks import devices
from shardwright.runtime.ranks.devices import (
    Constant,
    make_current,
    memory_bytes,
    sent_to,
    with_index,
)
from shardwright.runtime.ranks.environment import device_of_rank
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


def test_device_of_rank_is_the_one_of_the_local_rank_and_becomes_the_current_one(
    four_devices: pytest.MonkeyPatch,
) -> None:
    set_to: list[int] = []
    four_devices.setattr(torch.accelerator, "set_device_index", set_to.append)
    four_devices.setenv("LOCAL_RANK", "2")
    device = device_of_rank(ShardingEnv.local(device_type="cuda"), "cuda")
    assert device == torch.device("cuda", 2)
    make_current(device)
    make_current(torch.device("cuda", 0))  # which it is
    make_current(torch.device("cpu"))
    assert set_to == [2]


@pytest.mark.parametrize(("of_env", "asked"), [("cpu", "cuda:1"), ("cuda", "cpu")])
def test_device_that_the_env_does_not_send_from_is_refused_by_name(
    four_devices: pytest.MonkeyPatch, of_env: str, asked: str
) -> None:
    env, kind = ShardingEnv.local(device_type=of_env), asked.partition(":")[0]
    told = rf"on '{asked}', but the ranks of its env send from '{of_env}': .*device_type='{kind}'.*device='{of_env}'"
    four_devices.setattr(torch.accelerator, "set_device_index", lambda index: None)
    with pytest.raises(InvalidInputError, match=told):
        DistributedModelParallel(torch.nn.Linear(2, 1), env=env, device=asked)
    bags = EmbeddingBagCollection(
        [EmbeddingBagConfig(name="t", num_embeddings=2, embedding_dim=4, feature_names=["f"])], device="meta"
    )
    with pytest.raises(InvalidInputError, match=told):
        EmbeddingBagCollectionSharder().shard(bags, {}, env, torch.device(asked))


def test_model_on_an_accelerator_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    env = ShardingEnv.local(device_type="cuda")  # plans can be made for it
    with pytest.raises(UnsupportedError, match=r"no 'cuda' device .*device_type='cpu'"):
        DistributedModelParallel(torch.nn.Linear(2, 1), env=env)


def test_device_with_another_number_than_the_env_was_connected_with_is_refused(
    four_devices: pytest.MonkeyPatch,
) -> None:
    env = ShardingEnv.local(device_type="cuda")
    env.communicator.device = torch.device("cuda", 0)
    assert device_of_rank(env, "cuda:0") == torch.device("cuda", 0)
    with pytest.raises(InvalidInputError, match=r"current device was 'cuda:0': call .*set_device_index\(2\)"):
        device_of_rank(env, "cuda:2")


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


def test_constant_is_copied_for_each_stream_that_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy queued on one stream is not there yet for another: it would read what memory held before."""
    current, sent = SimpleNamespace(stream_id=1), []

    def copy(device: torch.device, values: torch.Tensor) -> torch.Tensor:
        sent.append(current.stream_id)
        return values.clone()

    monkeypatch.setattr(torch.accelerator, "current_stream", lambda _: current)
    monkeypatch.setattr(devices, "sent_to", copy)
    constant, device = Constant(torch.arange(3)), torch.device("cuda", 0)
    on_first = constant.on(device)
    current.stream_id = 2
    assert constant.on(device) is not on_first
    current.stream_id = 1
    assert constant.on(device) is on_first
    assert sent == [1, 2]


def test_array_that_may_not_be_written_is_copied() -> None:
    """Torch warns of one, once in a process."""
    counts = np.broadcast_to(np.array([[3], [4]]), (2, 2))[:1].reshape(-1)
    assert not counts.flags.writeable
    sent = sent_to(torch.device("cpu"), counts)
    assert sent.tolist() == [3, 3]
    assert not np.shares_memory(sent.numpy(), counts)
