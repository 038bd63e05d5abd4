"""Wrong input to the jagged types: an error that gives both numbers, of a batch's bags where it is first used."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.errors import refused
from torch.utils._pytree import tree_map

from shardwright import (
    Collection,
    DuplicateNameError,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    InvalidInputError,
    JaggedTensor,
    KeyedJaggedTensor,
    KeyedTensor,
    TableSpec,
)
from shardwright.runtime.step.batches.inputs import BatchReader

IDS = torch.tensor([1, 2, 3])
LENGTHS = torch.tensor([1, 2])

# What is wrong with any batch of bags, keys or no keys: arguments and the error's text.
WRONG_BAGS: list[tuple[dict[str, Any], str]] = [
    ({}, r"either lengths or offsets .* got neither"),
    (
        {"lengths": LENGTHS, "offsets": torch.tensor([0, 2, 3])},
        r"lengths\[0\] is 1, but by the offsets bag 0 holds 2 values",
    ),
    ({"lengths": LENGTHS, "offsets": torch.tensor([0, 3])}, r"got 2 lengths and offsets of 1 bags"),
    ({"lengths": torch.tensor([2, 2])}, r"lengths add up to 4, but there are 3 values"),
    ({"lengths": torch.tensor([4, -1])}, r"lengths\[1\].* is -1; a bag holds 0 values or more"),
    ({"lengths": torch.tensor([0, 9])}, r"lengths\[1\].* is 9, but there are 3 values"),
    ({"lengths": torch.tensor([1.0, 2.0])}, r"lengths must be int32 or int64, got float32"),
    ({"lengths": torch.tensor([True, True])}, r"lengths must be int32 or int64, got bool"),
    ({"lengths": [1, 2]}, r"lengths must be a torch.Tensor or a NumPy array, got list"),
    ({"lengths": torch.tensor(3)}, r"lengths must have .*, got (0|\[\])"),
    ({"lengths": torch.ones(1, 1, 3).int()}, r"lengths must have .*\[1, 1, 3\]"),
    ({"offsets": torch.tensor([0, 1, 4])}, r"offsets end at 4, but there are 3 values"),
    ({"offsets": torch.tensor([1, 1, 3])}, r"offsets must start at 0, got 1"),
    ({"offsets": torch.tensor([0, 5, 3])}, r"offsets fall from 5 to 3 at bag 1"),
    ({"offsets": torch.tensor([[0, 1, 3]])}, r"offsets must have 1 dimension, got 2: shape \[1, 3\]"),
    ({"offsets": torch.tensor([])}, r"offsets must have a leading 0, so 1 element for 0 bags; got 0"),
    ({"offsets": torch.tensor([0.0, 1.0, 3.0])}, r"offsets must be int32 or int64, got float32"),
    ({"lengths": LENGTHS, "weights": torch.ones(2)}, r"got 2 weights for 3 values"),
    ({"lengths": LENGTHS, "weights": torch.ones(4)}, r"got 4 weights for 3 values"),
    ({"lengths": LENGTHS, "weights": torch.tensor(1.0)}, r"got a scalar weight for 3 values"),
    (
        {"lengths": LENGTHS, "weights": [1.0, 1.0, 1.0]},
        r"weights must be a torch.Tensor or a NumPy array, got list",
    ),
    ({"lengths": LENGTHS.to("meta")}, r"values are on cpu, lengths on meta"),
    ({"lengths": LENGTHS, "weights": torch.ones(3, device="meta")}, r"values are on cpu, weights on meta"),
]

MAKERS: list[Callable[..., Any]] = [
    JaggedTensor,
    lambda values, **arguments: KeyedJaggedTensor(["a", "b"], values, **arguments),
]


@pytest.mark.parametrize("make", MAKERS, ids=["JaggedTensor", "KeyedJaggedTensor"])
@pytest.mark.parametrize(("arguments", "text"), WRONG_BAGS)
def test_constructor_wrong_bags_is_an_error_with_both_numbers(
    make: Callable[..., Any], arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidInputError, match=text):
        make(IDS, **arguments).validate()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"lengths": torch.tensor([1, 1])}, r"lengths add up to 2, but there are 3 values"),
        ({"offsets": torch.tensor([0, 1, 2])}, r"offsets end at 2, but there are 3 values"),
    ],
)
def test_jagged_tensor_values_left_over_are_an_error(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        JaggedTensor(IDS, **arguments)


@pytest.mark.parametrize("make", [JaggedTensor, lambda *a, **b: KeyedJaggedTensor(["k"], *a, **b)])
def test_constructor_lengths_whose_sum_wraps_are_an_error(make: Callable[..., Any]) -> None:
    lengths = torch.tensor([2**63 - 1, 2**63 - 1, 5])  # their int64 sum is 3
    assert int(lengths.sum()) == len(IDS)
    with pytest.raises(
        InvalidInputError, match=r"lengths\[0\].* is 9223372036854775807, but there are 3 values"
    ):
        make(IDS, lengths=lengths).validate()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"values": IDS.view(3, 1)}, r"values must have 1 dimension, got 2: shape \[3, 1\]"),
        ({"values": [1, 2, 3]}, r"values must be a torch.Tensor or a NumPy array, got list"),
        ({"weights": torch.ones(3, 1)}, r"weights must have 1 dimension, got 2: shape \[3, 1\]"),
        (
            {"keys": ["a", "b"], "lengths": torch.tensor([1, 1, 1])},
            r"3 bags \(lengths\) do not divide by 2 keys",
        ),
        ({"keys": [], "lengths": LENGTHS}, r"got 2 bags \(lengths\) for 0 keys"),
        ({"stride": 2}, r"a stride of 2 and 2 keys need 4 bags \(lengths\), got 2"),
        ({"stride": -1}, r"a stride of -1 and 2 keys need -2 bags \(lengths\), got 2"),
        ({"keys": ["a", 7]}, r"keys must be strings, got 7 \(int\)"),
        ({"keys": ["a", ["b"]]}, r"keys must be strings, got \['b'\] \(list\)"),
        ({"keys": "ab"}, r"keys must be a list of strings, got the string 'ab'"),
        ({"lengths": torch.ones(1, 2).int()}, r"with F = 2 keys, got \[1, 2\]"),
        ({"lengths": torch.tensor([4, -1])}, r"lengths\[1\] \(key 'b', example 0\) is -1"),
        (
            {"lengths": torch.tensor([0, 0, 4, -1]), "values": IDS},
            r"lengths\[3\] \(key 'b', example 1\) is -1",
        ),
    ],
)
def test_keyed_jagged_tensor_wrong_input_is_an_error_with_both_numbers(
    arguments: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidInputError, match=text):
        KeyedJaggedTensor(**({"keys": ["a", "b"], "values": IDS, "lengths": LENGTHS} | arguments)).validate()


USES: dict[str, Callable[[KeyedJaggedTensor], Any]] = {
    "permute": lambda kjt: kjt.permute([1, 0]),
    "split": lambda kjt: kjt.split([1, 1]),
    "to_dict": lambda kjt: kjt.to_dict(),
    "key": lambda kjt: kjt["b"],
    "concat": lambda kjt: KeyedJaggedTensor.concat([kjt, KeyedJaggedTensor(["c"], IDS, lengths=IDS[:1])]),
    "on another device": lambda kjt: kjt.to("cpu").to_dict(),
    "from leaves": lambda kjt: tree_map(lambda tensor: tensor, kjt).to_dict(),
    "copy": lambda kjt: copy.deepcopy(kjt).to_dict(),
}


@pytest.mark.parametrize("make", [KeyedJaggedTensor, KeyedJaggedTensor.from_lengths_sync])
@pytest.mark.parametrize("use", USES)
def test_batch_of_wrong_bags_can_be_made_and_is_refused_where_it_is_used(
    make: Callable[..., KeyedJaggedTensor], use: str
) -> None:
    batch = make(["a", "b"], IDS, lengths=torch.tensor([4, -1]))
    with pytest.raises(InvalidInputError, match=r"lengths\[1\] \(key 'b', example 0\) is -1"):
        USES[use](batch)


def test_bags_of_a_batch_are_read_once_for_all_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    own, checked = KeyedJaggedTensor._check_content, []
    monkeypatch.setattr(KeyedJaggedTensor, "_check_content", lambda kjt: checked.append(own(kjt)))
    batch = KeyedJaggedTensor.from_lengths_sync(["a", "b"], IDS, LENGTHS)
    assert checked == []
    for use in ("permute", "split", "to_dict", "on another device", "key"):
        USES[use](batch)
    assert batch.lookup_problem(["a"]) == batch.permute([0, 1]).lookup_problem(["b"]) == ""
    assert len(checked) == 1


# What a batch may hold, but no table looks up: arguments and the error's text.
NOT_LOOKED_UP: list[tuple[dict[str, Any], str]] = [
    ({"values": IDS.float()}, r"values .* are float32; ids are int32 or int64"),
    ({"values": IDS.short()}, r"values .* are int16; ids are int32 or int64"),
    ({"lengths": torch.tensor([1, 1])}, r"lengths .* add up to 2, but there are 3 values"),
    (
        {"lengths": None, "offsets": torch.tensor([0, 1, 2])},
        r"lengths .* add up to 2, but there are 3 values",
    ),
    (
        {"keys": ["a", "b", "a"], "lengths": torch.tensor([1, 1, 1])},
        r"key 'a' .* occurs at positions 0 and 2.*feature_names",
    ),
]


@pytest.mark.parametrize(("arguments", "text"), NOT_LOOKED_UP)
def test_lookup_of_what_is_no_ids_or_ambiguous_is_an_error(arguments: dict[str, Any], text: str) -> None:
    batch = KeyedJaggedTensor(**({"keys": ["a", "b"], "values": IDS, "lengths": LENGTHS} | arguments))
    tables = {"num_embeddings": 9, "embedding_dim": 2, "name": "t", "feature_names": ["a", "b"]}
    bags = EmbeddingBagCollection([EmbeddingBagConfig(**tables)])
    rows = EmbeddingCollection([EmbeddingConfig(**tables)])
    for look_up in (bags, rows, sharded(bags), sharded(rows)):
        with pytest.raises(InvalidInputError, match=text):
            look_up(batch)


def sharded(module: Any) -> Callable[[KeyedJaggedTensor], Any]:
    """How a sharded collection reads a batch."""
    tables = [
        TableSpec(own.name, own.num_embeddings, own.embedding_dim, tuple(own.feature_names))
        for own in module.tables
    ]
    return BatchReader(Collection.of(tables), columns={}).read


def test_lookup_of_another_key_than_the_repeated_one_is_right() -> None:
    batch = KeyedJaggedTensor(["a", "b", "a"], IDS, lengths=torch.tensor([1, 1, 1]))
    table = EmbeddingBagConfig(num_embeddings=9, embedding_dim=2, name="t", feature_names=["b"])
    bags = EmbeddingBagCollection([table])
    expected = bags(KeyedJaggedTensor(["b"], IDS[1:2], lengths=LENGTHS[:1]))
    assert torch.equal(bags(batch).values(), expected.values())


WRONG_STRIDES: list[tuple[dict[str, Any], str]] = [
    (
        {"stride_per_key_per_rank": [[1], [2]]},
        r"batch sizes of the keys \('a' 1, 'b' 2\) add up to 3, but there are 2 bags",
    ),
    ({"stride_per_key_per_rank": [[2]]}, r"stride_per_key_per_rank has 1 lists for 2 keys"),
    ({"stride_per_key_per_rank": [[3], [-1]]}, r"stride_per_key_per_rank of key 'b' is \[-1\]"),
    ({"stride_per_key_per_rank": [1, 1]}, r"must be a list of numbers for each key, such as .* got \[1, 1\]"),
    ({"stride_per_key": [2, 1]}, r"\('a' 2, 'b' 1\) add up to 3, but there are 2 bags"),
    (
        {"stride_per_key_per_rank": [[1], [1]], "stride_per_key": [2, 0]},
        r"stride_per_key is \[2, 0\], but .* adds up to \[1, 1\]",
    ),
    ({"stride_per_key_per_rank": [[2], [0]], "stride": 1}, r"a stride of 1, but .* \[2, 0\]"),
    ({"inverse_indices": [[1], [1]]}, r"inverse_indices must be \(keys, tensor"),
    (
        {"inverse_indices": (["a", "b"], torch.zeros(1, 2).long())},
        r"inverse_indices have 2 keys and shape \[1, 2\]",
    ),
    (
        {"inverse_indices": (["a"], torch.zeros(1, 2))},
        r"inverse_indices must be int32 or int64, got float32",
    ),
    (
        {"stride_per_key_per_rank": [[2], [0]], "inverse_indices": (["a"], torch.tensor([[0, 1, 2]]))},
        r"inverse_indices of key 'a' are 2 for example 2, but the key has 2 examples",
    ),
    (
        {"inverse_indices": (["a"], torch.zeros(1, 2, device="meta").long())},
        r"values are on cpu, inverse_indices on meta",
    ),
]


@pytest.mark.parametrize(
    "make", [KeyedJaggedTensor, KeyedJaggedTensor.from_lengths_sync], ids=["constructor", "from_lengths_sync"]
)
@pytest.mark.parametrize(("arguments", "text"), WRONG_STRIDES)
def test_wrong_batch_sizes_of_keys_are_an_error_with_both_numbers(
    make: Callable[..., Any], arguments: dict[str, Any], text: str
) -> None:
    if make is not KeyedJaggedTensor and "stride_per_key" in arguments:
        pytest.skip("it has no such argument")
    with pytest.raises(InvalidInputError, match=text):
        make(keys=["a", "b"], values=IDS, lengths=LENGTHS, **arguments).validate()


def test_constructor_off_the_cpu_does_not_read_contents() -> None:
    # Reading a meta tensor raises, so this passes only if nothing is read.
    kjt = KeyedJaggedTensor(["a", "b"], IDS.to("meta"), lengths=LENGTHS.to("meta"))
    assert kjt.stride() == 1
    with pytest.raises(RuntimeError, match="meta"):
        kjt.validate()


@pytest.mark.parametrize(
    ("segments", "text"),
    [
        ([1], r"add up to the 2 keys, got \[1\], which add up to 1"),
        ([1, 2], r"add up to the 2 keys, got \[1, 2\], which add up to 3"),
        ([3, -1], r"must be 0 or more and add up to the 2 keys, got \[3, -1\]"),
    ],
)
def test_split_wrong_segments_is_an_error_with_both_numbers(segments: list[int], text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        KeyedJaggedTensor(["a", "b"], IDS, lengths=LENGTHS).split(segments)


@pytest.mark.parametrize(
    ("indices", "text"),
    [
        ([0, 2], r"indices\[1\] is 2, but there are 2 keys"),
        ([-1], r"indices\[0\] is -1, but there are 2 keys"),
    ],
)
def test_permute_wrong_indices_is_an_error_with_both_numbers(indices: list[int], text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        KeyedJaggedTensor(["a", "b"], IDS, lengths=LENGTHS).permute(indices)


def one(key: str, num_bags: int = 1, *, weighted: bool = False) -> KeyedJaggedTensor:
    ids = torch.arange(num_bags)
    return KeyedJaggedTensor(
        [key], ids, ids.float() if weighted else None, lengths=torch.ones(num_bags, dtype=torch.int64)
    )


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((torch.ones(3), LENGTHS), r"values must have 2 dimensions or more, got 1"),
        ((torch.ones(3, 2), LENGTHS), r"got 2 lengths for 3 rows of values"),
        ((torch.ones(2, 1), LENGTHS), r"lengths\[1\] is 2; a row of values has 0 to 1"),
        ((torch.ones(2, 1), -LENGTHS), r"lengths\[0\] is -1; a row of values has 0 to 1"),
        ((torch.ones(2, 2), LENGTHS, torch.ones(2, 3)), r"values have \[2, 2\] entries, weights \[2, 3\]"),
    ],
)
def test_from_dense_lengths_wrong_input_is_an_error_with_both_numbers(arguments: tuple, text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        JaggedTensor.from_dense_lengths(*arguments)


REFUSED = [
    pytest.param(
        lambda: KeyedJaggedTensor.concat([]),
        InvalidInputError,
        "list of 0",
        id="concat wrong parts is an error with both numbers 1",
    ),
    pytest.param(
        lambda: KeyedJaggedTensor.concat([one("a", 2), one("b", 3)]),
        InvalidInputError,
        r"part 0 has 2 examples, part 1 has 3",
        id="concat wrong parts is an error with both numbers 2",
    ),
    pytest.param(
        lambda: KeyedJaggedTensor.concat([one("a", weighted=True), one("b")]),
        InvalidInputError,
        r"1 of 2 have weights, but part 1 has none",
        id="concat wrong parts is an error with both numbers 3",
    ),
    pytest.param(
        lambda: KeyedJaggedTensor.concat([one("a"), one("a")]),
        DuplicateNameError,
        r"key 'a' occurs at positions 0 and 1",
        id="concat wrong parts is an error with both numbers 4",
    ),
    pytest.param(
        lambda: KeyedJaggedTensor.from_jt_dict({"a": one("a", 2)["a"], "b": one("b", 3)["b"]}),
        InvalidInputError,
        r"key 'a' has 2 examples, key 'b' has 3",
        id="from jt dict wrong parts is an error with both numbers 1",
    ),
    pytest.param(
        lambda: KeyedJaggedTensor.from_jt_dict({"a": one("a")["a"], "b": one("b", weighted=True)["b"]}),
        InvalidInputError,
        r"1 of 2 have weights, but key 'a' has none",
        id="from jt dict wrong parts is an error with both numbers 2",
    ),
    pytest.param(
        lambda: JaggedTensor.from_dense([]),
        InvalidInputError,
        "got 0 tensors",
        id="from dense wrong parts is an error with both numbers 1",
    ),
    pytest.param(
        lambda: JaggedTensor.from_dense([IDS, IDS], [torch.ones(3)]),
        InvalidInputError,
        r"1 tensors of weights for 2 of values",
        id="from dense wrong parts is an error with both numbers 2",
    ),
    pytest.param(
        lambda: JaggedTensor.from_dense([IDS, IDS], [torch.ones(3), torch.ones(2)]),
        InvalidInputError,
        r"bag 1 has 3 values and 2 weights",
        id="from dense wrong parts is an error with both numbers 3",
    ),
    pytest.param(
        lambda: JaggedTensor(IDS, lengths=LENGTHS).to_padded_dense(-1),
        InvalidInputError,
        r"desired_length must be 0 or more, got -1",
        id="to padded dense negative width is an error",
    ),
]


test_wrong_call_is_an_error_that_says_what_is_wrong = refused(REFUSED)


@pytest.mark.parametrize(
    "made",
    [
        JaggedTensor(IDS, lengths=LENGTHS),
        KeyedJaggedTensor(["a"], IDS, lengths=LENGTHS),
        KeyedTensor(["a"], [1], torch.ones(2, 1)),
    ],
    ids=lambda made: type(made).__name__,
)
def test_what_is_asked_as_of_a_tensor_names_values(made: Any) -> None:
    kind = type(made).__name__
    with pytest.raises(InvalidInputError, match=rf"'{kind}' object has no attribute 'sum': .*values\(\)"):
        made.sum()
    assert not hasattr(made, "shape")
    for copied in (copy.copy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(copied.values(), made.values())
    compiled = torch.compile(
        lambda own: getattr(own, "grad", own.values()) + 1, fullgraph=True, backend="eager"
    )
    assert torch.equal(compiled(made), made.values() + 1)
