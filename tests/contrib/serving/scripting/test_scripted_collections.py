"""TorchScript of collections, and of their traces, gives what they give; the model that is scripted stays as it is."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from shardwright_serving.scripting import symbolic_trace
from torch import Tensor, nn

import shardwright as sw

pytestmark = pytest.mark.filterwarnings(
    "ignore:`torch.jit.(script|save|load)` is deprecated", "ignore:The TorchScript type system"
)


class Pooled(nn.Module):
    """Sums and means, of features that two tables share, and a table in half precision."""

    def __init__(self, is_weighted: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        tables = [
            sw.EmbeddingBagConfig(50, 8, name="whole", feature_names=["user", "seen"]),
            sw.EmbeddingBagConfig(40, 4, name="mean", feature_names=["seen"], pooling="MEAN"),
            sw.EmbeddingBagConfig(40, 3, name="sixteen", feature_names=["user"], data_type="FP16"),
        ]
        self.bags = sw.EmbeddingBagCollection(tables, is_weighted=is_weighted)

    def forward(self, features: sw.KeyedJaggedTensor) -> sw.KeyedTensor:
        return self.bags(features)


class Sequences(nn.Module):
    def __init__(self, need_indices: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        tables = [
            sw.EmbeddingConfig(50, 3, name="rows", feature_names=["user", "seen"]),
            sw.EmbeddingConfig(40, 5, name="sixteen", feature_names=["seen"], data_type="FP16"),
        ]
        self.rows = sw.EmbeddingCollection(tables, need_indices=need_indices)

    def forward(self, features: sw.KeyedJaggedTensor) -> dict[str, sw.JaggedTensor]:
        return self.rows(features)


def batch(
    user: list[list[int]], seen: list[list[int]], dtype: torch.dtype = torch.int64
) -> sw.KeyedJaggedTensor:
    bags = [*user, *seen]
    values = torch.tensor([id_ for bag in bags for id_ in bag], dtype=dtype)
    lengths = torch.tensor([len(bag) for bag in bags], dtype=torch.int32)
    weights = torch.linspace(-1, 2, len(values))
    return sw.KeyedJaggedTensor(["user", "seen"], values, weights, lengths=lengths)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "pooled": lambda: Pooled(is_weighted=False),
    "weighted": lambda: Pooled(is_weighted=True),
    "sequences": lambda: Sequences(need_indices=False),
    "sequences with ids": lambda: Sequences(need_indices=True),
}
BATCHES = [
    batch([[1, 2], [3]], [[], [39]]),
    batch([[], [7, 7, 9]], [[1], [2, 2]], torch.int32),
    batch([[], [], []], [[], [], []]),
    batch([[1]], [[]]),
]
FORMS: dict[str, Callable[[Any], Any]] = {
    "script": torch.jit.script,
    "trace": symbolic_trace,
    "script of a trace": lambda model: torch.jit.script(symbolic_trace(model)),
}


def tensors(result: Any) -> dict[str, Tensor]:
    """All tensors of a result, by name."""
    parts = result.to_dict() if isinstance(result, sw.KeyedTensor) else result
    found: dict[str, Tensor] = {}
    for name, part in parts.items():
        jagged = isinstance(part, sw.JaggedTensor)
        own = (part.values(), part.lengths(), part.weights_or_none()) if jagged else (part,)
        found.update({f"{name}.{place}": one for place, one in enumerate(own) if one is not None})
    return found


def assert_same(found: Any, wanted: Any) -> None:
    assert type(found) is type(wanted)
    assert list(tensors(found)) == list(tensors(wanted))
    for one, other in zip(tensors(found).values(), tensors(wanted).values(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("is_alone", [False, True], ids=["in a model", "alone"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", MODELS)
def test_form_of_a_collection_gives_what_it_gives(kind: str, form: str, is_alone: bool) -> None:
    model = MODELS[kind]()
    own = next(model.children()) if is_alone else model
    made = FORMS[form](own)
    assert made.state_dict().keys() == own.state_dict().keys()
    for features in BATCHES:
        assert_same(made(features), own(features))


def test_scripted_model_names_no_row_that_is_not_there() -> None:
    script = torch.jit.script(Pooled(is_weighted=True))
    for wrong in (batch([[50]], [[0]]), batch([[-1]], [[0]])):
        with pytest.raises((RuntimeError, IndexError), match=r"range|Expected idx"):
            script(wrong)
    with pytest.raises(RuntimeError, match="seen"):
        script(BATCHES[0].permute([0]))
    with pytest.raises(torch.jit.Error, match="ids have no weights"):
        script(sw.KeyedJaggedTensor(["user", "seen"], torch.ones(2).long(), lengths=torch.ones(2).long()))
    floats = sw.KeyedJaggedTensor(
        ["user", "seen"], torch.ones(2), torch.ones(2), lengths=torch.ones(2).long()
    )
    with pytest.raises(torch.jit.Error, match="ids are floats"):
        script(floats)


@pytest.mark.parametrize("form", ["script", "trace"])
def test_form_refuses_batch_sizes_of_their_own(form: str) -> None:
    uneven = sw.KeyedJaggedTensor(
        ["user", "seen"],
        torch.arange(3),
        lengths=torch.ones(3).int(),
        stride_per_key_per_rank=[[2], [1]],
        inverse_indices=(["user", "seen"], torch.tensor([[0, 1], [0, 0]])),
    )
    with pytest.raises((RuntimeError, AssertionError), match=r"_variable|batch sizes of their own"):
        FORMS[form](Pooled(is_weighted=False).bags)(uneven)
