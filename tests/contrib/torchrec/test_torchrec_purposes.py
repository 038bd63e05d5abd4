"""Differences from TorchRec that are kept on purpose: the README names each, and each is as it says."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from shardwright_torchrec.distributed.sharding_plan import column_wise, row_wise
from shardwright_torchrec.quant.tracing import symbolic_trace

import shardwright as sw

README = Path(__file__).parents[3] / "contrib" / "torchrec" / "README.md"
IDS, LENGTHS = torch.arange(3), torch.tensor([1, 2])


def refused(*calls: Callable[[], object]) -> None:
    for call in calls:
        with pytest.raises(sw.ShardwrightError):
            call()


def check_batches() -> None:
    refused(
        lambda: sw.KeyedJaggedTensor(["a"], IDS, lengths=torch.tensor([2, 2])),
        lambda: sw.KeyedJaggedTensor(["a"], IDS, torch.ones(4), LENGTHS),
        lambda: sw.KeyedJaggedTensor(["a"], IDS, lengths=LENGTHS, stride_per_key_per_rank=[[1], [1]]),
        lambda: sw.KeyedJaggedTensor(["a"], IDS.view(3, 1), lengths=LENGTHS),
    )


def check_bags_of_keys() -> None:
    parts = {
        "a": sw.JaggedTensor(IDS, lengths=LENGTHS),
        "b": sw.JaggedTensor(IDS, lengths=torch.ones(3).int()),
    }
    refused(lambda: sw.KeyedJaggedTensor.from_jt_dict(parts))


def check_errors() -> None:
    with pytest.raises(ValueError, match="int32 or int64"):
        sw.KeyedJaggedTensor(["a"], IDS, lengths=LENGTHS.float())


def collection() -> sw.EmbeddingBagCollection:
    torch.manual_seed(0)
    return sw.EmbeddingBagCollection(
        [sw.EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=4, feature_names=["a"])]
    )


def check_scripts() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(RuntimeError):
            torch.jit.script(collection())
    refused(lambda: symbolic_trace(collection()))


def check_text() -> None:
    assert str(sw.KeyedJaggedTensor(["a"], IDS, lengths=LENGTHS)).endswith("})")


def check_draws() -> None:
    torch.manual_seed(0)
    once = torch.empty(4, 4).uniform_(-0.5, 0.5)
    assert torch.equal(collection().embedding_bags["t"].weight, once)


def check_cuts() -> None:
    refused(
        lambda: column_wise(size_per_rank=[2, 2]),
        lambda: row_wise(sizes_placement=([2, 2], "cpu")),
    )


def check_gradients() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = sw.KeyedOptimizerWrapper(
        {"w": weight}, lambda given: torch.optim.SGD(given, momentum=0.1, lr=0.1)
    )
    optimizer.init_state()
    assert "w" in optimizer.state_dict()["state"]
    assert weight.grad is None


PURPOSES = {
    "A batch must be one": check_batches,
    "`force_variable_stride=True`": check_bags_of_keys,
    "that are `ValueError`s": check_errors,
    "There is no TorchScript": check_scripts,
    "has no newline at its end": check_text,
    "Tables begin with one draw a weight": check_draws,
    "Columns and rows are cut into equal parts": check_cuts,
    "`init_state()` leaves no gradients": check_gradients,
}


@pytest.mark.parametrize("told", PURPOSES)
def test_difference_is_told_and_kept(told: str) -> None:
    _, _, kept = README.read_text().partition("Kept on purpose:")
    assert told in kept
    PURPOSES[told]()
