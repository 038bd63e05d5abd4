"""The built-in comm backends: what they declare and read, shared memory, and NCCL where there is a CUDA device."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.equality import Case, Table, shardings_of
from tests.ports import group_of_one, nccl_group_of_one

from shardwright import (
    CommBackend,
    DataType,
    DistributedError,
    EmbeddingBagCollectionSharder,
    KernelRequest,
    OptimizerSpec,
    ShardingEnv,
    spec_to_torch,
)
from shardwright.errors import InvalidInputError
from shardwright.host import host
from shardwright_plugins.comm_backends import _mailboxes
from shardwright_plugins.comm_backends._mailboxes import (
    ALL_RINGS_BYTES,
    MESSAGES,
    RING_BYTES,
    Mailboxes,
    Ring,
    ring_bytes,
)
from shardwright_plugins.comm_backends._segments import LINE_BYTES
from shardwright_plugins.comm_backends.settings import SHARED_MEMORY_VARIABLE, may_share_memory


@pytest.mark.parametrize(("name", "devices"), [("gloo", ("cpu",)), ("nccl", ("cuda",))])
def test_backend_declares_its_name_and_devices(name: str, devices: tuple[str, ...]) -> None:
    backend = host().comm_backends.create(name)
    assert isinstance(backend, CommBackend)
    assert (backend.name, backend.devices, backend.api) == (name, devices, 1)
    assert getattr(CommBackend, name.upper()).value == name


def test_gloo_group_has_no_backend_for_cuda() -> None:
    with (
        group_of_one() as group,
        pytest.raises(
            DistributedError,
            match=r"on cuda\. Known: gloo \(cpu\), nccl \(cuda\)\. Make it with init_process_group\('nccl'\)",
        ),
    ):
        ShardingEnv.from_process_group(group, device_type="cuda")


@pytest.fixture
def nccl_group() -> Iterator[object]:
    with nccl_group_of_one() as group:
        yield group


@pytest.mark.gpu
def test_nccl_connects_and_serves_cuda(nccl_group: object) -> None:
    env = ShardingEnv.from_process_group(nccl_group)
    assert env.device_type == "cuda"
    output = torch.empty(3, device="cuda")
    env.communicator.all_to_all(output, torch.ones(3, device="cuda"), [3], [3]).wait()
    assert output.tolist() == [1, 1, 1]
    assert env.communicator.broadcast_object({"a": 1}) == {"a": 1}


@pytest.mark.gpu
def test_nccl_device_that_waits_in_vain_is_an_error_of_the_next_call(nccl_group: object) -> None:
    env = ShardingEnv.from_process_group(dist.new_group(timeout=timedelta(seconds=4), backend="nccl"))
    env.communicator.barrier()

    class NeverComes:
        def wait(self) -> None:  # longer than the time-out, on the device's stream
            torch.cuda._sleep(int(8 * 2e9))

    env.communicator.wait_for(NeverComes(), "the exchange of results")  # type: ignore[attr-defined]
    torch.cuda.synchronize()
    with pytest.raises(DistributedError, match="the exchange of results failed: the device had waited for"):
        env.communicator.barrier()


@pytest.mark.gpu
@pytest.mark.parametrize("optimizer", ["sgd", "row_wise_adagrad", "adam"])
@pytest.mark.parametrize("kernel", ["fused", "fused_torch", "fused_triton", "pinned_caching", "dense"])
def test_nccl_trains_equal_to_the_unsharded_module_on_the_cpu(
    nccl_group: object, kernel: str, optimizer: str
) -> None:
    request = KernelRequest(
        "cuda", DataType.FP32, 8, 8, optimizer=OptimizerSpec(optimizer), on_this_machine=True
    )
    answer = host().compute_kernels.create(kernel).supports(request)
    if answer is not True:
        pytest.skip(str(answer))
    tables = [
        Table(17, 8, ("a",), "SUM", "table_wise", kernel),
        Table(9, 8, ("b", "a"), "MEAN", "row_wise", kernel),
    ]
    case = Case(tables, (5,), optimizer, is_weighted=True)
    sharder = EmbeddingBagCollectionSharder(fused_params=case.fused_params)
    shardings = shardings_of(case, sharder.tables(case.module()))
    env = ShardingEnv.from_process_group(nccl_group)
    sharded, unsharded = sharder.shard(case.module(), shardings, env, torch.device("cuda")), case.module()
    dense = [p for p in sharded.parameters() if not hasattr(p, "_in_backward_optimizers")]
    optimizers = [spec_to_torch(sharder.optimizer, list(unsharded.parameters()))]
    optimizers += [spec_to_torch(sharder.optimizer, dense)] if dense else []
    for step in range(4):
        expected = unsharded(case.batch(step, 0)).values()
        actual = sharded(case.batch(step, 0).to(torch.device("cuda"))).values()
        assert actual.device.type == "cuda"
        torch.testing.assert_close(actual.cpu(), expected, rtol=1e-4, atol=1e-5)
        for each in optimizers:
            each.zero_grad()
        gradient = case.gradient(step, 0, expected)
        expected.backward(gradient)
        actual.backward(gradient.cuda())
        for each in optimizers:
            each.step()
    for name, weight in unsharded.state_dict().items():
        torch.testing.assert_close(sharded.full_state_dict()[name].cpu(), weight, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("told", "may"),
    [(None, True), ("", True), ("on", True), ("off", False)],
    ids=["nothing", "", "on", "off"],
)
def test_memory_is_shared_unless_the_variable_says_off(
    monkeypatch: pytest.MonkeyPatch, told: str | None, may: bool
) -> None:
    monkeypatch.delenv(SHARED_MEMORY_VARIABLE, raising=False)
    if told is not None:
        monkeypatch.setenv(SHARED_MEMORY_VARIABLE, told)
    assert may_share_memory() is may


def test_variable_that_says_neither_on_nor_off_is_refused() -> None:
    with pytest.raises(
        InvalidInputError, match="SHARDWRIGHT_SHARED_MEMORY is 'of'; it must be 'on' or 'off'"
    ):
        may_share_memory({SHARED_MEMORY_VARIABLE: "of"})


SIZE = 256


@settings(max_examples=200, deadline=None)
@given(asked=st.lists(st.one_of(st.none(), st.integers(1, SIZE - 16)), max_size=60))
def test_ring_gives_messages_in_their_order_and_never_overwrites_one(asked: list[int | None]) -> None:
    room, read = memoryview(bytearray(LINE_BYTES + SIZE)), memoryview(bytearray(8)).cast("q")
    sender, receiver = Ring(room, read), Ring(room, read)
    under_way = deque[tuple[int, bytes]]()
    for number, size in enumerate(asked):
        message = bytes((number + place) % 256 for place in range(size or 0))
        if size is not None and sender.put(number, memoryview(message)):
            under_way.append((number, message))
        elif under_way:  # a message is asked for, or there is no room
            exchange, message = under_way.popleft()
            assert receiver.has_message
            assert receiver.header == (exchange, len(message))
            target = bytearray(len(message))
            if exchange % 3:
                assert not receiver.take(exchange + 1, memoryview(target))
                assert not receiver.take(exchange, memoryview(bytearray(len(message) + 1)))
                assert receiver.take(exchange, memoryview(target))
                assert target == message
            else:
                receiver.skip()
        assert receiver.has_message == bool(under_way)


@pytest.mark.parametrize(("world_size", "size"), [(2, RING_BYTES), (16, RING_BYTES), (64, RING_BYTES // 4)])
def test_ring_bytes_of_many_ranks_are_no_more_than_those_of_sixteen(world_size: int, size: int) -> None:
    assert ring_bytes(world_size) == size
    assert world_size * size <= ALL_RINGS_BYTES


def test_ring_bytes_of_very_many_ranks_are_a_page() -> None:
    assert ring_bytes(100_000) // MESSAGES >= 512


def test_message_that_finds_room_while_the_other_rank_ends_is_written_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_mailboxes, "_SPIN_S", 0.0)
    monkeypatch.setattr(Mailboxes, "_reason_to_end", lambda *_: "its process has ended")
    answers = iter([False, True])  # a third question, which would write it again, is an error
    object.__new__(Mailboxes)._wait(1, lambda: next(answers), math.inf)
    assert list(answers) == []
