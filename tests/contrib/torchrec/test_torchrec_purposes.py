"""Differences from TorchRec that are kept on purpose: the README names each, and each is as it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import shardwright as sw

README = Path(__file__).parents[3] / "contrib" / "torchrec" / "README.md"
IDS, LENGTHS = torch.arange(3), torch.tensor([1, 2])


def refused(*calls: Callable[[], object]) -> None:
    for call in calls:
        with pytest.raises(sw.ShardwrightError):
            call()


def check_batches() -> None:
    batch = sw.KeyedJaggedTensor(["a"], IDS, lengths=torch.tensor([2, 2]))
    refused(
        lambda: collection()(batch),
        lambda: batch.permute([0]),
        lambda: sw.KeyedJaggedTensor.concat([batch]),
        lambda: sw.KeyedJaggedTensor(["a"], IDS, torch.ones(4), LENGTHS),
        lambda: sw.KeyedJaggedTensor(["a"], IDS.view(3, 1), lengths=LENGTHS),
        lambda: sw.KeyedJaggedTensor(["a"], IDS, lengths=LENGTHS, stride_per_key_per_rank=[[1], [1]]),
    )


def check_bags_of_keys() -> None:
    parts = {
        "a": sw.JaggedTensor(IDS, lengths=LENGTHS),
        "b": sw.JaggedTensor(IDS, lengths=torch.ones(3).int()),
    }
    refused(lambda: sw.KeyedJaggedTensor.from_jt_dict(parts))


def collection() -> sw.EmbeddingBagCollection:
    torch.manual_seed(0)
    return sw.EmbeddingBagCollection(
        [sw.EmbeddingBagConfig(name="t", num_embeddings=4, embedding_dim=4, feature_names=["a"])]
    )


PURPOSES = {
    "A batch must be one": check_batches,
    "`force_variable_stride=True`": check_bags_of_keys,
}


@pytest.mark.parametrize("told", PURPOSES)
def test_difference_is_told_and_kept(told: str) -> None:
    _, _, kept = README.read_text().partition("Kept on purpose:")
    assert told in kept
    PURPOSES[told]()
