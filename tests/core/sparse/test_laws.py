"""Laws that hold for every batch, over batches that Hypothesis draws."""

from __future__ import annotations

from itertools import chain, pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.sparse import JaggedTensor, KeyedJaggedTensor

pytestmark = pytest.mark.usefixtures("ops_path")
many = settings(max_examples=25, deadline=None)

Bags = dict[str, list[list[int]]]

INDEX_DTYPES = st.sampled_from([torch.int32, torch.int64])


@st.composite
def batches(draw: st.DrawFn) -> tuple[Bags, KeyedJaggedTensor]:
    """Bags by key, and the same as a `KeyedJaggedTensor`; weights, if any, are a quarter of the ids, counts double."""
    stride = draw(st.integers(0, 4))
    keys = draw(st.lists(st.text(max_size=3), max_size=5, unique=True))
    bag = st.lists(st.integers(0, 2**31 - 1), max_size=4)
    bags = {key: draw(st.lists(bag, min_size=stride, max_size=stride)) for key in keys}
    flat = list(chain.from_iterable(bags.values()))
    values = torch.tensor(list(chain.from_iterable(flat)), dtype=draw(INDEX_DTYPES))
    kjt = KeyedJaggedTensor(
        keys=keys,
        values=values,
        weights=values.double() / 4 if draw(st.booleans()) else None,
        lengths=torch.tensor([len(bag) for bag in flat], dtype=draw(INDEX_DTYPES)),
        stride=stride,
        columns={"count": values.long() * 2} if draw(st.booleans()) else None,
    )
    if draw(st.booleans()):
        kjt = KeyedJaggedTensor(keys, values, offsets=kjt.offsets(), stride=stride, columns=kjt.columns())
    return bags, kjt


def lists(kjt: KeyedJaggedTensor) -> Bags:
    return {key: [bag.tolist() for bag in jt.to_dense()] for key, jt in kjt.to_dict().items()}


def state(kjt: KeyedJaggedTensor) -> tuple[Any, ...]:
    for name, column in kjt.columns().items():
        assert torch.equal(
            column, kjt.values().double() / 4 if name == "weights" else kjt.values().long() * 2
        )
    return (
        kjt.keys(),
        kjt.stride(),
        (kjt.values().dtype, kjt.values().tolist()),
        (kjt.lengths().dtype, kjt.lengths().tolist()),
        {name: (column.dtype, column.tolist()) for name, column in kjt.columns().items()},
        kjt.length_per_key(),
    )


@many
@given(batches())
def test_from_jt_dict_undoes_to_dict(batch: tuple[Bags, KeyedJaggedTensor]) -> None:
    bags, kjt = batch
    if bags:  # Without keys nothing is left that could remember the stride and the dtypes.
        assert state(KeyedJaggedTensor.from_jt_dict(kjt.to_dict())) == state(kjt)


@many
@given(batches(), st.data())
def test_permute_is_undone_by_the_inverse(batch: tuple[Bags, KeyedJaggedTensor], data: st.DataObject) -> None:
    bags, kjt = batch
    order = data.draw(st.permutations(range(len(bags))))
    permuted = kjt.permute(order)
    permuted.validate()
    assert lists(permuted) == {kjt.keys()[i]: bags[kjt.keys()[i]] for i in order}
    assert (permuted.keys(), permuted.stride()) == ([kjt.keys()[i] for i in order], kjt.stride())
    assert state(permuted.permute([order.index(i) for i in range(len(order))])) == state(kjt)


@many
@given(batches(), st.data())
def test_concat_undoes_split(batch: tuple[Bags, KeyedJaggedTensor], data: st.DataObject) -> None:
    bags, kjt = batch
    cuts = sorted(data.draw(st.lists(st.integers(0, len(bags)), max_size=4)))
    bounds = [0, *cuts, len(bags)]
    segments = [end - start for start, end in pairwise(bounds)]
    parts = kjt.split(segments)
    assert [(len(part.keys()), part.stride()) for part in parts] == [
        (size, kjt.stride()) for size in segments
    ]
    for part in parts:
        part.validate()
    assert state(KeyedJaggedTensor.concat(parts)) == state(kjt)


@many
@given(batches(), st.integers(0, 5), st.integers(-(2**31), 2**31 - 1))
def test_from_dense_lengths_undoes_to_padded_dense(
    batch: tuple[Bags, KeyedJaggedTensor], extra: int, padding: int
) -> None:
    _, kjt = batch
    jt = JaggedTensor(kjt.values(), kjt.weights_or_none(), kjt.lengths())
    width = max(kjt.lengths().tolist(), default=0) + extra
    again = JaggedTensor.from_dense_lengths(
        jt.to_padded_dense(width, padding), jt.lengths(), jt.to_padded_dense_weights(width, padding)
    )
    again.validate()
    assert torch.equal(again.values(), jt.values())
    assert jt.weights_or_none() is None or torch.equal(again.weights(), jt.weights())
