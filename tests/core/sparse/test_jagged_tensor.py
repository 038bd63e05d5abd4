from __future__ import annotations

from itertools import accumulate, chain, product

import pytest
import torch

from shardwright import InvalidInputError, JaggedTensor

pytestmark = pytest.mark.usefixtures("ops_path")

INDEX_DTYPES = [torch.int32, torch.int64]

# Every batch of up to 3 bags of up to 2 values: empty batches and empty bags in every place.
ALL_SHAPES = [shape for num_bags in range(4) for shape in product(range(3), repeat=num_bags)]


def bags_of(shape: tuple[int, ...]) -> list[list[int]]:
    ids = iter(range(10, 100))
    return [[next(ids) for _ in range(length)] for length in shape]


def jagged(
    bags: list[list[int]],
    values_dtype: torch.dtype = torch.int64,
    slices_dtype: torch.dtype = torch.int64,
    *,
    by_offsets: bool = False,
) -> JaggedTensor:
    lengths = [len(bag) for bag in bags]
    values = torch.tensor(list(chain.from_iterable(bags)), dtype=values_dtype)
    return JaggedTensor(
        values=values,
        lengths=None if by_offsets else torch.tensor(lengths, dtype=slices_dtype),
        offsets=torch.tensor([0, *accumulate(lengths)], dtype=slices_dtype) if by_offsets else None,
    )


def lists(tensors: list[torch.Tensor]) -> list[list[float]]:
    return [tensor.tolist() for tensor in tensors]


@pytest.mark.parametrize("width", [None, 0, 1, 2, 3])
@pytest.mark.parametrize(
    "dtype", [*INDEX_DTYPES, torch.int8, torch.float16, torch.bfloat16, torch.float32, torch.float64]
)
def test_to_padded_dense_every_small_batch_pads_and_cuts(dtype: torch.dtype, width: int | None) -> None:
    for shape in ALL_SHAPES:
        bags = bags_of(shape)
        columns = max(shape, default=0) if width is None else width
        expected = [(bag + [7] * columns)[:columns] for bag in bags]
        result = jagged(bags, dtype).to_padded_dense(width, padding_value=7)
        assert result.dtype == dtype
        assert tuple(result.shape) == (len(bags), columns)
        assert result.tolist() == expected


def test_to_padded_dense_default_pads_with_zero_to_the_longest_bag() -> None:
    assert jagged([[1], [], [2, 3, 4]]).to_padded_dense().tolist() == [[1, 0, 0], [0, 0, 0], [2, 3, 4]]


@pytest.mark.parametrize("inner", [(2,), (2, 3), (0,)])
def test_to_padded_dense_values_of_more_dimensions_keep_their_rows(inner: tuple[int, ...]) -> None:
    rows = torch.arange(3 * torch.Size(inner).numel(), dtype=torch.float32).view(3, *inner)
    padding = torch.full(inner, -1.0)
    result = JaggedTensor(rows, lengths=torch.tensor([1, 0, 2])).to_padded_dense(2, -1.0)
    expected = [[rows[0], padding], [padding, padding], [rows[1], rows[2]]]
    torch.testing.assert_close(result, torch.stack([torch.stack(row) for row in expected]))


def test_weights_missing_are_none_or_an_error() -> None:
    jt = jagged([[1]])
    assert jt.weights_or_none() is None
    assert jt.to_dense_weights() is None
    assert jt.to_padded_dense_weights() is None
    with pytest.raises(InvalidInputError, match="has no weights"):
        jt.weights()


def test_from_dense_makes_a_bag_of_each_tensor() -> None:
    values = [torch.tensor([1.0]), torch.tensor([]), torch.tensor([7.0, 8.0])]
    jt = JaggedTensor.from_dense(values, weights=[value * 2 for value in values])
    assert lists(jt.to_dense()) == [[1.0], [], [7.0, 8.0]]
    assert lists(jt.to_dense_weights() or []) == [[2.0], [], [14.0, 16.0]]


@pytest.mark.parametrize(
    ("bags", "dtype", "lengths"),
    [
        (
            [torch.tensor([3]), torch.tensor([])],
            torch.int64,
            [1, 0],
        ),  # the empty one, of floats, makes no ids floats
        ([torch.tensor([], dtype=torch.int32)] * 2, torch.int32, [0, 0]),
    ],
)
def test_from_dense_takes_empty_bags(
    bags: list[torch.Tensor], dtype: torch.dtype, lengths: list[int]
) -> None:
    jt = JaggedTensor.from_dense(bags)
    assert (jt.values().dtype, jt.lengths().tolist()) == (dtype, lengths)


def test_empty_like_keeps_dtypes_and_columns() -> None:
    like = JaggedTensor(torch.ones(2, 3), torch.ones(2, dtype=torch.float16), torch.tensor([2]))
    jt = JaggedTensor.empty_like(like)
    assert tuple(jt.values().shape) == (0, 3)
    assert (jt.weights().dtype, jt.lengths().dtype) == (torch.float16, torch.int64)
    jt.validate()


@pytest.mark.parametrize(
    ("jt", "text"),
    [
        (
            JaggedTensor(torch.tensor([1.0, 2.5]), lengths=torch.tensor([2, 0])),
            "JaggedTensor({\n    [[1.0, 2.5], []]\n})",
        ),
        (  # without float32's noise
            JaggedTensor(torch.tensor([1, 2]), torch.tensor([0.1, 0.2]), torch.tensor([1, 1])),
            'JaggedTensor({\n    "values": [[1], [2]],\n    "weights": [[0.1], [0.2]]\n})',
        ),
        (
            JaggedTensor(torch.tensor([[1, 2], [3, 4]]), lengths=torch.tensor([0, 2])),
            "JaggedTensor({\n    [[], [[1, 2], [3, 4]]]\n})",
        ),
    ],
    ids=["values", "weights", "rows"],
)
def test_str_shows_bags_as_torchrec_does(jt: JaggedTensor, text: str) -> None:
    assert str(jt) == text


def test_repr_names_sizes() -> None:
    assert repr(jagged([[1], [2, 3]], by_offsets=True)) == (
        "JaggedTensor(bags=2, values=3, dtype=int64, weighted=False, device='cpu')"
    )


def test_size_in_bytes_counts_all_tensors() -> None:
    assert jagged([[1], [2, 3]], torch.int32, torch.int64).size_in_bytes() == 3 * 4 + 2 * 8


def test_offsets_beyond_int32_become_int64() -> None:
    num_values = 2**31
    values = torch.zeros(1, dtype=torch.int64).expand(num_values)
    jt = JaggedTensor(values, lengths=torch.tensor([num_values - 1, 1], dtype=torch.int32))
    assert jt.offsets().tolist() == [0, num_values - 1, num_values]
