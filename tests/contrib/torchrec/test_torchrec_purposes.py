"""Differences from TorchRec that are kept on purpose: the README names each, and each is as it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import shardwright_torchrec
import torch
from shardwright_torchrec.distributed.sharding_plan import row_wise

import shardwright as sw

README = Path(__file__).parents[3] / "contrib" / "torchrec" / "README.md"
IDS, LENGTHS = torch.arange(3), torch.tensor([1, 2])


def refused(*calls: Callable[[], object]) -> None:
    for call in calls:
        with pytest.raises(sw.ShardwrightError):
            call()


def check_batches() -> None:
    shardwright_torchrec.install()
    try:
        batches = [
            sw.KeyedJaggedTensor(["a"], IDS, lengths=torch.tensor([2, 2])),
            sw.KeyedJaggedTensor(["a"], IDS, torch.ones(4), LENGTHS),
            sw.KeyedJaggedTensor(["a"], IDS.view(3, 1), lengths=LENGTHS),
        ]
        for batch in batches:
            refused(
                lambda batch=batch: collection()(batch),
                lambda batch=batch: batch.permute([0]),
                lambda batch=batch: sw.KeyedJaggedTensor.concat([batch]),
            )
        refused(lambda: sw.KeyedJaggedTensor(["a"], IDS, lengths=LENGTHS, stride_per_key_per_rank=[[1], [1]]))
    finally:
        shardwright_torchrec.uninstall()


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


def check_cuts() -> None:
    refused(lambda: row_wise(num_buckets=2))


PURPOSES = {
    "A batch must be one": check_batches,
    "`force_variable_stride=True`": check_bags_of_keys,
    "Rows are cut anywhere": check_cuts,
}


@pytest.mark.parametrize("told", PURPOSES)
def test_difference_is_told_and_kept(told: str) -> None:
    _, _, kept = README.read_text().partition("Kept on purpose:")
    assert told in kept
    PURPOSES[told]()
