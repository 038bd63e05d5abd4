"""`torchrec.fx.symbolic_trace` of modules, and TorchScript of what it gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from shardwright_torchrec.modules.deepfm import DeepFM, FactorizationMachine
from shardwright_torchrec.modules.feature_processors import (
    FeatureProcessedEmbeddingBagCollection,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from shardwright_torchrec.modules.mlp import MLP
from shardwright_torchrec.modules.regroup import KTRegroupAsDict
from shardwright_torchrec.quant.tracing import symbolic_trace
from torch import nn

import shardwright as sw

BATCH = sw.KeyedJaggedTensor(["a", "b"], torch.arange(6), lengths=torch.tensor([2, 1, 0, 3]))
DENSE = [torch.arange(8.0).view(2, 4), torch.ones(2, 3)]


def bags() -> sw.EmbeddingBagCollection:
    tables = [
        sw.EmbeddingBagConfig(name=key, embedding_dim=4, num_embeddings=6, feature_names=[key])
        for key in "ab"
    ]
    return sw.EmbeddingBagCollection(tables, is_weighted=True)


def processed(processors: Any) -> nn.Module:
    return FeatureProcessedEmbeddingBagCollection(bags(), processors)


MODULES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "factorisation machine": (FactorizationMachine, DENSE),
    "deep part": (lambda: DeepFM(nn.Linear(7, 2)), DENSE),
    "position weights": (lambda: PositionWeightedModule(3), BATCH["b"]),
    "position weights of a batch": (lambda: PositionWeightedModuleCollection({"a": 3}), BATCH),
    "processed collection": (lambda: processed(PositionWeightedModuleCollection({"a": 3})), BATCH),
    "processors by feature": (lambda: processed({"a": PositionWeightedModule(3)}), BATCH),
    "groups": (
        lambda: KTRegroupAsDict([["b"], ["a"]], ["x", "y"]),
        [sw.KeyedTensor(["a", "b"], [1, 3], DENSE[0])],
    ),
}


@pytest.mark.parametrize("name", MODULES)
def test_traced_module_gives_what_the_module_gives(name: str) -> None:
    make, given = MODULES[name]
    module = make()
    for one, other in zip(*map(flat, (symbolic_trace(module)(given), module(given))), strict=True):
        torch.testing.assert_close(one, other)


def flat(result: Any) -> list[torch.Tensor]:
    return torch.utils._pytree.tree_leaves(result)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated", "ignore:The TorchScript type system")
def test_traced_module_can_be_scripted() -> None:
    module = MLP(4, [3, 2])
    scripted = torch.jit.script(symbolic_trace(module))
    torch.testing.assert_close(scripted(DENSE[0]), module(DENSE[0]))


def test_position_weights_keep_a_batch_size_per_key() -> None:
    uneven = sw.KeyedJaggedTensor(
        ["a", "b"], torch.arange(4), lengths=torch.tensor([2, 1, 1]), stride_per_key_per_rank=[[1], [2]]
    )
    processor = PositionWeightedModuleCollection({"a": 3})
    assert processor(uneven).stride_per_key_per_rank() == [[1], [2]]
    assert processor.position_weights_dict["a"] is processor.position_weights["a"]
