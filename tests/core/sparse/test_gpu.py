"""On an accelerator: nothing waits for it unless it must."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from shardwright import InvalidInputError, JaggedTensor, KeyedJaggedTensor

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("ops_path")]


@pytest.fixture
def no_waiting() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode("default")


def example(device: str = "cuda", total: int = 3) -> KeyedJaggedTensor:
    values = torch.arange(total, device=device)
    lengths = torch.tensor([1, 0, 0, 2], device=device)
    return KeyedJaggedTensor(["a", "b"], values, values.float() / 4, lengths)


def test_construction_on_a_gpu_does_not_wait(no_waiting: None) -> None:
    values, lengths = torch.arange(3, device="cuda"), torch.ones(4, dtype=torch.int32, device="cuda")
    kjt = KeyedJaggedTensor(["a", "b"], values, lengths=lengths)
    assert kjt.offsets().shape[0] == 5
    assert "cuda" in repr(kjt)


def test_validate_on_a_gpu_finds_what_is_wrong() -> None:
    with pytest.raises(InvalidInputError, match=r"lengths add up to 3, but there are 2 values"):
        example(total=2).validate()


def test_operations_on_a_gpu_equal_those_on_the_cpu() -> None:
    there, here = example("cuda"), example("cpu")
    assert str(there.permute([1, 0])) == str(here.permute([1, 0]))
    assert [str(part) for part in there.split([1, 1])] == [str(part) for part in here.split([1, 1])]
    assert there["b"].to_padded_dense(3, 9).tolist() == here["b"].to_padded_dense(3, 9).tolist()
    assert str(JaggedTensor.from_dense(there["b"].to_dense())) == str(
        JaggedTensor.from_dense(here["b"].to_dense())
    )


def test_permute_of_synced_on_a_gpu_does_not_wait() -> None:
    kjt, order = example().sync(), torch.tensor([1, 0], dtype=torch.int32, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        permuted = kjt.permute([1, 0], order)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert permuted.values().tolist() == [1, 2, 0]


def test_pinned_batch_moves_and_records_its_stream() -> None:
    pinned = example("cpu").sync().pin_memory()
    assert pinned.values().is_pinned()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        moved = pinned.to("cuda", non_blocking=True)
    torch.cuda.current_stream().wait_stream(stream)
    moved.record_stream(torch.cuda.current_stream())
    assert moved.length_per_key_or_none() == [1, 2]
    assert str(moved) == str(pinned)
