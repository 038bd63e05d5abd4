from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from tests.drawn import drawn
from tests.errors import refused
from torch import Tensor, nn

from shardwright import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingConfig,
    IdRangeError,
    InvalidInputError,
    KeyedJaggedTensor,
    PoolingType,
    UnknownNameError,
    apply_optimizer_in_backward,
)
from shardwright.optim.optimizers import in_backward_optimizers


def config(name: str, *features: str, rows: int = 10, dim: int = 4, **more: Any) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name, num_embeddings=rows, embedding_dim=dim, feature_names=list(features), **more
    )


def bags(bags_by_feature: dict[str, list[list[int]]], weighted: bool = False) -> KeyedJaggedTensor:
    every = [bag for feature_bags in bags_by_feature.values() for bag in feature_bags]
    values = torch.tensor([value for bag in every for value in bag], dtype=torch.int64)
    return KeyedJaggedTensor(
        keys=list(bags_by_feature),
        values=values,
        lengths=torch.tensor([len(bag) for bag in every], dtype=torch.int64),
        weights=torch.rand(values.numel()) + 0.5 if weighted else None,
    )


def by_loops(collection: EmbeddingBagCollection, features: KeyedJaggedTensor) -> dict[str, Tensor]:
    """The output of each (feature, table), one row at a time, in float64 Python arithmetic on tensors."""
    outputs = {}
    for table in collection.embedding_bag_configs():
        rows = collection.embedding_bags[table.name].weight.double()
        for feature in table.feature_names:
            jagged = features[feature]
            offsets = jagged.offsets().tolist()
            pooled = []
            for start, stop in itertools.pairwise(offsets):
                total = 0 * rows[0]
                for position in range(start, stop):
                    factor = jagged.weights()[position].double() if collection.is_weighted() else 1.0
                    total = total + rows[jagged.values()[position]] * factor
                count = max(stop - start, 1) if table.pooling is PoolingType.MEAN else 1
                pooled.append(total / count)
            outputs[f"{feature}@{table.name}"] = torch.stack(pooled) if pooled else rows[:0]
    return outputs


@st.composite
def collections_and_inputs(draw: st.DrawFn) -> tuple[EmbeddingBagCollection, KeyedJaggedTensor]:
    features = [f"f{index}" for index in range(draw(st.integers(1, 4)))]
    rows = draw(st.integers(1, 12))
    tables = [
        config(
            f"t{index}",
            *draw(st.lists(st.sampled_from(features), min_size=1, unique=True)),
            rows=rows,
            dim=draw(st.integers(1, 5)),
            pooling=draw(st.sampled_from([PoolingType.SUM, PoolingType.MEAN])),
        )
        for index in range(draw(st.integers(1, 3)))
    ]
    weighted = draw(st.booleans())
    batch_size = draw(st.integers(0, 4))
    bag = st.lists(st.integers(0, rows - 1), max_size=4)
    ids = {feature: draw(st.lists(bag, min_size=batch_size, max_size=batch_size)) for feature in features}
    return EmbeddingBagCollection(tables, is_weighted=weighted), bags(ids, weighted)


@drawn(collections_and_inputs(), quick=60, thorough=150)
def test_any_tables_and_batch_equal_loops_forward_and_backward(
    case: tuple[EmbeddingBagCollection, KeyedJaggedTensor],
) -> None:
    collection, features = case
    twin = copy.deepcopy(collection)
    output, by_name = collection(features), by_loops(twin, features)
    for name, names in zip(by_name, output.keys(), strict=True):
        assert names in (name, name.split("@")[0])
    expected = torch.cat([*by_name.values()], dim=1).float()
    torch.testing.assert_close(output.values(), expected)
    cotangent = torch.randn_like(expected)
    output.values().backward(cotangent)
    expected.backward(cotangent)
    for (name, parameter), other in zip(collection.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, msg=lambda text, name=name: f"{name}: {text}")


def test_forward_half_precision_table_is_summed_in_float32() -> None:
    table = config("t", "f", dim=1, data_type="fp16", init_fn=nn.init.ones_)
    output = EmbeddingBagCollection([table])(bags({"f": [[0] * 2049]}))
    assert output.values().item() == 2049  # float16 has no 2049


def test_forward_superfluous_weights_are_ignored() -> None:
    collection = EmbeddingBagCollection([config("t", "f")])
    plain, weighted = bags({"f": [[1, 2], [3]]}), bags({"f": [[1, 2], [3]]}, weighted=True)
    torch.testing.assert_close(collection(weighted).values(), collection(plain).values())


@pytest.mark.parametrize("wrong", [-1, 10, 2**40])
def test_forward_id_out_of_range_names_feature_table_value_and_position(wrong: int) -> None:
    collection = EmbeddingBagCollection([config("t", "g", "f")])
    with pytest.raises(
        IdRangeError,
        match=rf"'f': id {wrong} at position 2 \(sample 2\) .* table 't', which has rows 0 to 9\. 1 of 4 ids",
    ):
        collection(bags({"g": [[], [], []], "f": [[0, 9], [], [wrong, 1]]}))


@pytest.mark.parametrize("name", ["a.b", "type", "keys"])
def test_table_name_that_torch_refuses_is_named(name: str) -> None:
    with pytest.raises(InvalidInputError, match=f"table '{name}' cannot be part of"):
        EmbeddingBagCollection([config(name, "f")])


@pytest.mark.parametrize("is_frozen", [False, True])
def test_copies_have_the_optimizers_of_their_weights_in_the_same_state(is_frozen: bool) -> None:
    collection = EmbeddingBagCollection([config("t", "f"), config("u", "f")])
    weight = collection.embedding_bags["t"].weight
    apply_optimizer_in_backward(torch.optim.Adagrad, [weight], {"lr": 0.5})
    features = bags({"f": [[1, 2], []]})
    collection(features).values().sum().backward()
    collection.requires_grad_(not is_frozen)
    twin = copy.deepcopy(torch.nn.ModuleDict({"under": collection}))["under"]
    (own,), (copied,) = map(in_backward_optimizers, (weight, twin.embedding_bags["t"].weight))
    assert (type(copied), copied.defaults) == (type(own), own.defaults)
    assert in_backward_optimizers(twin.embedding_bags["u"].weight) == ()
    assert twin.embedding_bags["t"].weight.requires_grad is not is_frozen
    before = weight.detach().clone()
    twin.requires_grad_(True)(features).values().sum().backward()
    assert torch.equal(weight, before)
    collection.requires_grad_(True)(features).values().sum().backward()
    assert torch.equal(twin.embedding_bags["t"].weight, weight)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_batch_on_meta_gives_the_outputs_shape(device: str) -> None:
    collection = EmbeddingBagCollection([config("t", "f", "g"), config("u", "h", dim=3)], device=device)
    features = bags({"f": [[1], []], "g": [[2, 3], [4]], "h": [[], [5]]}).to("meta")
    output = collection(features)
    assert output.values().is_meta
    assert output.values().shape == (2, 11)
    assert output.length_per_key() == [4, 4, 3]
    assert output.values().requires_grad


REFUSED = [
    pytest.param(
        lambda: EmbeddingBagCollection([config("t", "f")], is_weighted=True)(bags({"f": [[1]]})),
        InvalidInputError,
        r"feature 'f' of table 't' has no weights",
        id="forward missing weights names feature and table",
    ),
    pytest.param(
        lambda: EmbeddingBagCollection([config("users", "user_id")])(bags({"user_di": [[1]]})),
        UnknownNameError,
        r"'user_id' of table 'users' is not .* has: user_di\. Did you mean 'user_di'",
        id="forward missing feature names table and nearest",
    ),
    pytest.param(
        lambda: EmbeddingBagCollection([]),
        InvalidInputError,
        "EmbeddingBagCollection got no tables",
        id="no tables is refused",
    ),
    pytest.param(
        lambda: EmbeddingBagCollection([config("t", "f"), config("t", "g")]),
        InvalidInputError,
        "two tables are named 't'",
        id="two tables of one name are refused",
    ),
    pytest.param(
        lambda: EmbeddingBagCollection([config("t", "f", data_type=DataType.INT8)]),
        InvalidInputError,
        "table 't': INT8 is no type that torch trains",
        id="quantized table is refused by name",
    ),
    pytest.param(
        lambda: EmbeddingBagCollection(
            [
                config("t", "f"),
                EmbeddingConfig(num_embeddings=4, embedding_dim=3, name="other", feature_names=["g"]),
            ]
        ),
        InvalidInputError,
        r"takes a list of EmbeddingBagConfigs; number 1 is EmbeddingConfig\(",
        id="configuration of the other collection is refused",
    ),
    pytest.param(
        lambda: EmbeddingBagCollection(config("t", "f")),
        InvalidInputError,
        r"takes a list of EmbeddingBagConfigs, got EmbeddingBagConfig\(",
        id="one configuration outside a list is refused",
    ),
]


test_wrong_call_is_an_error_that_says_what_is_wrong = refused(REFUSED)
