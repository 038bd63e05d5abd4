from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.errors import refused

from shardwright import (
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    IdRangeError,
    InvalidInputError,
    KeyedJaggedTensor,
    UnknownNameError,
)


def config(name: str, *features: str, rows: int = 10, dim: int = 3, **more: Any) -> EmbeddingConfig:
    return EmbeddingConfig(
        name=name, num_embeddings=rows, embedding_dim=dim, feature_names=list(features), **more
    )


INPUT = KeyedJaggedTensor(["f", "g"], torch.tensor([1, 1, 9, 4]), lengths=torch.tensor([2, 0, 1, 1]))


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=5), st.sampled_from(["int32", "int64"]))
@settings(max_examples=100, deadline=None)
def test_forward_any_batch_gives_each_ids_row_and_the_lengths(bags: list[list[int]], dtype: str) -> None:
    collection = EmbeddingCollection([config("t", "f")])
    ids = [value for bag in bags for value in bag]
    lengths = torch.tensor([len(bag) for bag in bags], dtype=torch.int64)
    values = torch.tensor(ids, dtype=getattr(torch, dtype))
    output = collection(KeyedJaggedTensor(["f"], values, lengths=lengths))["f"]
    rows = [collection.embeddings["t"].weight[value] for value in ids]
    assert output.values().shape == (len(ids), 3)
    for got, expected in zip(output.values(), rows, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert output.lengths().tolist() == lengths.tolist()


def test_outputs_of_a_feature_in_several_tables_name_their_table() -> None:
    collection = EmbeddingCollection([config("a", "f"), config("b", "g", "f")])
    output = collection(INPUT)
    assert list(output) == ["f@a", "g", "f@b"] == collection.embedding_names()
    assert collection.embedding_names_by_table() == [["f@a"], ["g", "f@b"]]
    torch.testing.assert_close(output["f@b"].values(), collection.embeddings["b"].weight[[1, 1]])
    torch.testing.assert_close(output["f@a"].values(), collection.embeddings["a"].weight[[1, 1]])


@pytest.mark.parametrize("need_indices", [False, True])
def test_need_indices_returns_ids_as_weights(need_indices: bool) -> None:
    collection = EmbeddingCollection([config("t", "g")], need_indices=need_indices)
    weights = collection(INPUT)["g"].weights_or_none()
    assert collection.need_indices() is need_indices
    assert (None if weights is None else weights.tolist()) == ([9, 4] if need_indices else None)


def test_tables_of_different_dim_give_rows_of_their_own_dim() -> None:
    collection = EmbeddingCollection([config("a", "f"), config("b", "g", dim=5)])
    output = collection(INPUT)
    for name, table in (("f", "a"), ("g", "b")):
        weight = collection.embeddings[table].weight
        assert torch.equal(output[name].values(), weight[INPUT[name].values()])
    with pytest.raises(InvalidInputError, match=r"different dims: {'a': 3, 'b': 5}"):
        collection.embedding_dim()


def test_public_surface_answers_with_the_configuration() -> None:
    tables = [config("a", "f"), config("b", "g", rows=4)]
    collection = EmbeddingCollection(tables, device="meta")
    assert collection.embedding_configs() == tables
    assert collection.embedding_dim() == 3
    assert collection.device == torch.device("meta")
    assert {key: tuple(value.shape) for key, value in collection.state_dict().items()} == {
        "embeddings.a.weight": (10, 3),
        "embeddings.b.weight": (4, 3),
    }


REFUSED = [
    pytest.param(
        lambda: EmbeddingCollection([config("t", "h")])(INPUT),
        UnknownNameError,
        r"'h' of table 't' is not in the input. The input has: f, g\.",
        id="missing feature names table",
    ),
    pytest.param(
        lambda: EmbeddingCollection([config("t", "f", "g", rows=9)])(INPUT),
        IdRangeError,
        r"'g': id 9 at position 0 \(sample 0\) .*'t'.* rows 0 to 8",
        id="id out of range names everything",
    ),
    pytest.param(
        lambda: EmbeddingCollection(
            [
                config("t", "f"),
                EmbeddingBagConfig(num_embeddings=4, embedding_dim=3, name="other", feature_names=["g"]),
            ]
        ),
        InvalidInputError,
        r"takes a list of EmbeddingConfigs; number 1 is EmbeddingBagConfig\(",
        id="configuration of the other collection is refused",
    ),
    pytest.param(
        lambda: EmbeddingCollection(config("t", "f")),
        InvalidInputError,
        r"takes a list of EmbeddingConfigs, got EmbeddingConfig\(",
        id="one configuration outside a list is refused",
    ),
]


test_wrong_call_is_an_error_that_says_what_is_wrong = refused(REFUSED)
