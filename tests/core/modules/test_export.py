"""`torch.export` of unsharded collections: programs that give what the modules give, for other batches too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import shardwright as sw

TABLES = {"user": 50, "item": 40}


class Model(nn.Module):
    """Pooled and sequence outputs, of features that two tables share, and a table in half precision."""

    def __init__(self, is_weighted: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        tables = [
            sw.EmbeddingBagConfig(TABLES["user"], 8, name="user", feature_names=["user", "seen"]),
            sw.EmbeddingBagConfig(
                TABLES["item"], 4, name="item", feature_names=["seen"], pooling="MEAN", data_type="FP16"
            ),
        ]
        self.bags = sw.EmbeddingBagCollection(tables, is_weighted=is_weighted)
        rows = sw.EmbeddingConfig(TABLES["user"], 3, name="rows", feature_names=["user"])
        self.rows = sw.EmbeddingCollection([rows])
        self.over = nn.Linear(20, 1)

    def forward(self, features: sw.KeyedJaggedTensor) -> tuple[Tensor, Tensor]:
        return self.over(self.bags(features).values()), self.rows(features)["user"].values()


def batch(user: list[list[int]], seen: list[list[int]], *, is_weighted: bool) -> sw.KeyedJaggedTensor:
    values = torch.tensor([id_ for bags in (user, seen) for bag in bags for id_ in bag], dtype=torch.int64)
    lengths = torch.tensor([len(bag) for bags in (user, seen) for bag in bags])
    weights = torch.rand(len(values)) if is_weighted else None
    return sw.KeyedJaggedTensor(["user", "seen"], values, weights, lengths=lengths)


@pytest.mark.parametrize("is_weighted", [False, True])
def test_exported_model_gives_for_other_batches_what_the_module_gives(is_weighted: bool) -> None:
    model = Model(is_weighted)
    first = batch([[1, 2], [3]], [[], [39]], is_weighted=is_weighted)
    dynamic = [{0: Dim.DYNAMIC}, None, {0: Dim.DYNAMIC}] if is_weighted else [{0: Dim.DYNAMIC}, None]
    program = torch.export.export(model, (first,), dynamic_shapes=(dynamic,)).module()
    for users, seen in (([[1, 2], [3]], [[], [39]]), ([[], [7, 8, 9]], [[1], [2, 2]]), ([[], []], [[], []])):
        features = batch(users, seen, is_weighted=is_weighted)
        torch.testing.assert_close(program(features), model(features))


class OfLists(nn.Module):
    """A model that reads the features itself, and looks nothing up."""

    def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
        features = sw.KeyedJaggedTensor(["user", "seen"], values, lengths=lengths)
        return features["seen"].offsets()[1:] + features["user"].values().sum()


def test_exported_model_that_reads_features_needs_operators_of_torch_alone() -> None:
    model, lengths = OfLists(), torch.tensor([2, 0, 1, 1])
    sizes = ({0: Dim("ids", max=2**31 - 1)}, {0: 2 * Dim("half")})
    program = torch.export.export(model, (torch.tensor([3, 4, 5, 6]), lengths), dynamic_shapes=sizes)
    operators = {str(node.target) for node in program.graph.nodes if node.op == "call_function"}
    assert not [name for name in operators if "fbgemm" in name]
    other = torch.tensor([7, 8, 9]), torch.tensor([1, 0, 0, 2, 0, 0])
    torch.testing.assert_close(program.module()(*other), model(*other))
