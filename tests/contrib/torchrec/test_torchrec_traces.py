"""`torchrec.fx.symbolic_trace` of modules, and TorchScript of them and of what it gives."""

import io
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from shardwright_torchrec.models.deepfm import SimpleDeepFMNN
from shardwright_torchrec.models.dlrm import DLRM, DLRM_DCN, DLRM_Projection
from shardwright_torchrec.modules.activation import SwishLayerNorm
from shardwright_torchrec.modules.crossnet import (
    CrossNet,
    LowRankCrossNet,
)
from shardwright_torchrec.modules.deepfm import DeepFM, FactorizationMachine
from shardwright_torchrec.modules.feature_processors import (
    FeatureProcessedEmbeddingBagCollection,
    PositionWeightedModule,
    PositionWeightedModuleCollection,
)
from shardwright_torchrec.modules.mlp import MLP, Perceptron
from shardwright_torchrec.modules.regroup import KTRegroupAsDict
from shardwright_torchrec.quant import symbolic_trace
from torch import Tensor, nn

import shardwright as sw

pytestmark = pytest.mark.usefixtures("scripting")
BATCH = sw.KeyedJaggedTensor(["a", "b"], torch.arange(6), lengths=torch.tensor([2, 1, 0, 3]))
DENSE = [torch.arange(8.0).view(2, 4), torch.ones(2, 3)]


def bags(is_weighted: bool = True) -> sw.EmbeddingBagCollection:
    tables = [
        sw.EmbeddingBagConfig(name=key, embedding_dim=4, num_embeddings=6, feature_names=[key])
        for key in "ab"
    ]
    return sw.EmbeddingBagCollection(tables, is_weighted=is_weighted)


def processed(processors: Any) -> nn.Module:
    return FeatureProcessedEmbeddingBagCollection(bags(), processors)


DENSE_MODULES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "perceptron": (lambda: Perceptron(4, 3), DENSE[0]),
    "perceptrons": (lambda: MLP(4, [3, 2], activation="swish_layernorm"), DENSE[0]),
    "activation": (lambda: SwishLayerNorm(4), DENSE[0]),
    "cross network": (lambda: CrossNet(4, 2), DENSE[0]),
    "cross network of low rank": (lambda: LowRankCrossNet(4, 2), DENSE[0]),
    "factorisation machine": (FactorizationMachine, DENSE),
    "deep part": (lambda: DeepFM(nn.Linear(7, 2)), DENSE),
}
MODULES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    **DENSE_MODULES,
    "position weights": (lambda: PositionWeightedModule(3), BATCH["b"]),
    "position weights of a batch": (lambda: PositionWeightedModuleCollection({"a": 3}), BATCH),
    "processed collection": (lambda: processed(PositionWeightedModuleCollection({"a": 3})), BATCH),
    "processors by feature": (lambda: processed({"a": PositionWeightedModule(3)}), BATCH),
    "groups": (
        lambda: KTRegroupAsDict([["b"], ["a"]], ["x", "y"]),
        [sw.KeyedTensor(["a", "b"], [1, 3], DENSE[0])],
    ),
}


def flat(result: Any) -> list[torch.Tensor]:
    return torch.utils._pytree.tree_leaves(result)


SCRIPTS = pytest.mark.filterwarnings(
    "ignore:`torch.jit.(script|save|load)` is deprecated", "ignore:The TorchScript type system"
)


@SCRIPTS
@pytest.mark.parametrize(
    ("name", "trace"),
    [*product(MODULES, [symbolic_trace]), *product(DENSE_MODULES, [torch.fx.symbolic_trace])],
)
def test_traced_module_can_be_scripted(name: str, trace: Callable[[nn.Module], nn.Module]) -> None:
    make, given = MODULES[name]
    module = make()
    scripted = torch.jit.script(trace(module))
    for one, other in zip(*map(flat, (scripted(given), module(given))), strict=True):
        torch.testing.assert_close(one, other)


@SCRIPTS
def test_position_weights_are_scripted_without_a_trace() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.processor = PositionWeightedModuleCollection({"a": 3, "other key": 2})

        def forward(self, features: sw.KeyedJaggedTensor) -> torch.Tensor:
            processed: sw.KeyedJaggedTensor = self.processor(features)
            return processed.weights()

    module = Weighted()
    with torch.no_grad():
        for number, weight in enumerate(module.processor.position_weights.values()):
            weight.copy_(torch.arange(len(weight)) + 2.0 + 3 * number)
    batch = sw.KeyedJaggedTensor(
        ["a", "c", "other key"], torch.arange(7), lengths=torch.tensor([2, 1, 0, 1, 2, 1])
    )
    torch.jit.script(module)
    module.processor.position_weights["a"] = nn.Parameter(torch.tensor([7.0, 8.0, 9.0]))
    scripted = torch.jit.script(module)
    assert scripted(batch).tolist() == module(batch).tolist() == [7, 8, 7, 1, 5, 6, 5]
    assert type(module.processor) is PositionWeightedModuleCollection
    assert list(scripted.state_dict()) == list(module.state_dict())
    scripted(batch).sum().backward()
    assert module.processor.position_weights["a"].grad.tolist() == [2, 1, 0]
    saved = io.BytesIO()
    torch.jit.save(scripted, saved)
    assert torch.jit.load(io.BytesIO(saved.getvalue()))(batch).tolist() == [7, 8, 7, 1, 5, 6, 5]


class TwoTowers(nn.Module):
    """Two perceptrons over the embeddings of one collection."""

    def __init__(self) -> None:
        super().__init__()
        self.bags, self.query, self.candidate = tables(), MLP(4, [3, 2]), MLP(4, [3, 2])

    def forward(self, dense: Tensor, features: sw.KeyedJaggedTensor) -> Tensor:
        pooled = self.bags(features)
        return (self.query(pooled["a"]) * self.candidate(pooled["b"])).sum(dim=1) + dense.sum(dim=1)


class Sequences(nn.Module):
    """A perceptron over padded sequences of embeddings."""

    def __init__(self) -> None:
        super().__init__()
        rows = sw.EmbeddingConfig(name="rows", embedding_dim=4, num_embeddings=6, feature_names=["b"])
        self.rows, self.over = sw.EmbeddingCollection([rows]), nn.Linear(4, 1)

    def forward(self, dense: Tensor, features: sw.KeyedJaggedTensor) -> Tensor:
        return self.over(self.rows(features)["b"].to_padded_dense(3)).sum(dim=1) + dense


def tables() -> sw.EmbeddingBagCollection:
    return bags(is_weighted=False)


PERCEPTRONS: dict[str, Any] = {
    "dense_in_features": 4,
    "dense_arch_layer_sizes": [3, 4],
    "over_arch_layer_sizes": [3, 1],
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "DLRM": lambda: DLRM(tables(), **PERCEPTRONS),
    "DLRM_Projection": lambda: DLRM_Projection(
        tables(),
        interaction_branch1_layer_sizes=[8],
        interaction_branch2_layer_sizes=[8],
        **PERCEPTRONS,
    ),
    "DLRM_DCN": lambda: DLRM_DCN(tables(), dcn_num_layers=2, dcn_low_rank_dim=2, **PERCEPTRONS),
    "DeepFM": lambda: SimpleDeepFMNN(4, tables(), hidden_layer_size=3, deep_fm_dimension=2),
    "two towers": TwoTowers,
    "sequences": Sequences,
}
OTHER = sw.KeyedJaggedTensor(["a", "b"], torch.arange(4), lengths=torch.tensor([0, 1, 0, 0, 3, 0]))


@SCRIPTS
@pytest.mark.parametrize("is_traced", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_model_is_scripted_and_saved(name: str, is_traced: bool) -> None:
    if name == "DLRM_DCN" and not is_traced:
        pytest.skip("its layers are read by number, as TorchRec's")
    model = MODELS[name]()
    saved = io.BytesIO()
    torch.jit.save(torch.jit.script(symbolic_trace(model) if is_traced else model), saved)
    saved.seek(0)
    scripted = torch.jit.load(saved)
    assert dict(scripted.named_parameters()).keys() == dict(model.named_parameters()).keys()
    for features in (BATCH, OTHER):
        dense = torch.linspace(-1, 1, 4 * features.stride()).view(-1, 4)
        torch.testing.assert_close(scripted(dense, features), model(dense, features))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "DeepFM" else pytest.mark.slow) for name in MODELS]
)
def test_model_of_any_batch_is_exported(name: str) -> None:
    model = MODELS[name]()

    class OfTensors(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, dense: Tensor, values: Tensor, lengths: Tensor) -> Tensor:
            return self.model(dense, sw.KeyedJaggedTensor(["a", "b"], values, lengths=lengths))

    size = torch.export.Dim("size", min=2, max=1000)
    shapes = ({0: size}, {0: torch.export.Dim.DYNAMIC}, {0: 2 * size})
    first = (DENSE[0], BATCH.values(), BATCH.lengths())
    program = torch.export.export(OfTensors(), first, dynamic_shapes=shapes).module()
    other = (torch.ones(3, 4), OTHER.values(), OTHER.lengths())
    torch.testing.assert_close(program(*other), OfTensors()(*other))
