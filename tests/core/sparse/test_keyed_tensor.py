from __future__ import annotations

import pytest
import torch
from tests.errors import refused

from shardwright import DuplicateNameError, InvalidInputError, KeyedTensor, UnknownNameError


def example() -> KeyedTensor:
    return KeyedTensor(["a", "b", "c"], [1, 0, 2], torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]))


def test_keyed_tensor_gives_what_was_put_in() -> None:
    kt = example()
    assert (kt.keys(), kt.length_per_key(), kt.offset_per_key(), kt.key_dim()) == (
        ["a", "b", "c"],
        [1, 0, 2],
        [0, 1, 1, 3],
        1,
    )
    assert kt["c"].tolist() == [[2.0, 3.0], [5.0, 6.0]]
    assert tuple(kt["b"].shape) == (2, 0)
    assert {key: value.tolist() for key, value in kt.to_dict().items()} == {
        key: kt[key].tolist() for key in ("a", "b", "c")
    }
    assert kt.device() == torch.device("cpu")
    assert kt.size_in_bytes() == 6 * 4


@pytest.mark.parametrize("key_dim", [0, 1, 2])
def test_from_tensor_list_joins_along_any_dimension(key_dim: int) -> None:
    shapes = [[2, 2, 2], [2, 2, 2]]
    shapes[1][key_dim] = 3
    tensors = [torch.randn(shape) for shape in shapes]
    kt = KeyedTensor.from_tensor_list(["a", "b"], tensors, key_dim, key_dim)
    assert kt.length_per_key() == [2, 3]
    assert torch.equal(kt["a"], tensors[0])
    assert torch.equal(kt["b"], tensors[1])
    assert torch.equal(KeyedTensor.regroup([kt], [["b", "a"]])[0], torch.cat(tensors[::-1], dim=key_dim))


def test_regroup_as_dict_names_the_groups() -> None:
    result = KeyedTensor.regroup_as_dict([example()], [["c"], ["a", "c"]], ["x", "y"])
    assert list(result) == ["x", "y"]
    assert torch.equal(result["x"], example()["c"])
    assert torch.equal(result["y"], example().values())


@pytest.mark.parametrize("key_dim", [0, 1])
def test_with_values_has_the_keys_over_other_values(key_dim: int) -> None:
    values = torch.arange(6.0).view(2, 3).movedim(1, key_dim)
    kt = KeyedTensor(["a", "b"], [1, 2], values, key_dim)
    other = kt.with_values(values.half() + 1)
    assert (other.keys(), other.key_dim()) == (["a", "b"], key_dim)
    assert torch.equal(other["b"], kt["b"].half() + 1)
    assert torch.equal(kt.values(), values)
    for wrong in (values[:, :2] if key_dim else values[:2], torch.zeros(()), torch.zeros(3)[: 3 * key_dim]):
        with pytest.raises(InvalidInputError, match="add up to 3"):
            kt.with_values(wrong)


def test_str_shows_rows_by_key() -> None:
    kt = KeyedTensor(["a", "b"], [1, 2], torch.tensor([[1.0, 2.0, 3.0]]))
    assert str(kt) == 'KeyedTensor({\n    "a": [[1.0]],\n    "b": [[2.0, 3.0]]\n})'


def test_repr_names_sizes() -> None:
    assert repr(example()) == (
        "KeyedTensor(keys=['a', 'b', 'c'], shape=[2, 3], key_dim=1, dtype=float32, device='cpu')"
    )


def test_regroup_key_in_two_is_an_error_only_if_asked_for() -> None:
    other = KeyedTensor(["a", "d"], [1, 1], torch.ones(2, 2))
    assert KeyedTensor.regroup([example(), other], [["d"]])[0].tolist() == [[1.0], [1.0]]
    with pytest.raises(InvalidInputError, match=r"key 'a' is in keyed tensors 0 and 1"):
        KeyedTensor.regroup([example(), other], [["a"]])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((["a", "b"], [1], torch.ones(2, 1)), r"1 lengths for 2 keys"),
        ((["a", "b"], [1, 2], torch.ones(2, 4)), r"add up to 3, but dimension 1 of the values has 4"),
        ((["a", "b"], [5, -1], torch.ones(2, 4)), r"key 'b' has length -1"),
        ((["a"], [1], torch.ones(1)), r"key_dim is 1, but the values have 1 dimensions"),
        ((["a"], [1], torch.ones(1, 1), -1), r"key_dim is -1, but the values have 2 dimensions"),
        ((["a"], [1], [[1.0]]), r"values must be a torch.Tensor, got list"),
        (([1], [1], torch.ones(1, 1)), r"keys must be strings, got 1 \(int\)"),
        (("a", [1], torch.ones(1, 1)), r"keys must be a list of strings, got the string 'a'"),
    ],
)
def test_constructor_wrong_input_is_an_error_with_both_numbers(arguments: tuple, text: str) -> None:
    with pytest.raises(InvalidInputError, match=text):
        KeyedTensor(*arguments)


@pytest.mark.parametrize(
    ("keys", "shapes", "dims", "text"),
    [
        (["a", "b"], [(2, 1)], (1,), r"1 tensors for 2 keys"),
        ([], [], (1,), r"got 0 tensors"),
        (["a", "b"], [(2, 1), (3, 1)], (1,), r"key 'a' has shape \[2\], key 'b' \[3\]"),
        (["a", "b"], [(2, 1), (2, 1, 1)], (1,), r"key 'a' has shape \[2\], key 'b' \[2, 1\]"),
        (["a"], [(2,)], (1,), r"key_dim is 1, but the values have 1 dimensions"),
        (["a"], [(2, 1)], (1, 0), r"cat_dim is 0, but must be key_dim, which is 1"),
    ],
)
def test_from_tensor_list_wrong_input_is_an_error_with_both_numbers(
    keys: list[str], shapes: list[tuple[int, ...]], dims: tuple[int, ...], text: str
) -> None:
    with pytest.raises(InvalidInputError, match=text):
        KeyedTensor.from_tensor_list(keys, [torch.ones(shape) for shape in shapes], *dims)


REFUSED = [
    pytest.param(
        lambda: KeyedTensor(["product"], [1], torch.ones(1, 1))["prodct"],
        UnknownNameError,
        r"no key 'prodct'\. It has 1: product\. Did you mean 'product'",
        id="getitem unknown key names the nearest",
    ),
    pytest.param(
        lambda: KeyedTensor([f"f{i}" for i in range(100)], [1] * 100, torch.ones(1, 100))["zzz"],
        UnknownNameError,
        r"It has 100: f0, .*f19, \.\.\. \(80 more\)",
        id="unknown key among many lists some",
    ),
    pytest.param(
        lambda: KeyedTensor.regroup([example()], [["a", "z"]]),
        UnknownNameError,
        r"regroup: no key 'z'\. It has 3: a, b, c",
        id="regroup unknown key is an error",
    ),
    pytest.param(
        lambda: KeyedTensor.regroup([], [["a"]]),
        InvalidInputError,
        "list of 0",
        id="regroup of nothing is an error",
    ),
    pytest.param(
        lambda: KeyedTensor.regroup(
            [example(), KeyedTensor(["d"], [2], torch.ones(2, 1), key_dim=0)], [["d"]]
        ),
        InvalidInputError,
        r"keyed tensor 0 has key_dim 1, keyed tensor 1 has 0",
        id="regroup different key dims is an error",
    ),
    pytest.param(
        lambda: KeyedTensor.regroup_as_dict([example()], [["a"]], ["x", "y"]),
        InvalidInputError,
        r"2 names \(keys\) for 1 groups",
        id="regroup as dict names must match groups 1",
    ),
    pytest.param(
        lambda: KeyedTensor.regroup_as_dict([example()], [["a"], ["b"]], ["x", "x"]),
        DuplicateNameError,
        r"'x' occurs at positions 0 and 1",
        id="regroup as dict names must match groups 2",
    ),
    pytest.param(
        lambda: KeyedTensor(["a", "b", "a"], [1, 1, 1], torch.ones(1, 3)),
        DuplicateNameError,
        r"key 'a' occurs at positions 0 and 2",
        id="constructor duplicate key names both positions",
    ),
]


test_wrong_call_is_an_error_that_says_what_is_wrong = refused(REFUSED)
