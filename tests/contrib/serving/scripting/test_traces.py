"""Traces of `torch.fx`, where making or joining sparse types is one node of the graph; and TorchScript of them."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree

from shardwright import JaggedTensor, KeyedJaggedTensor, KeyedTensor, UnsupportedError

VALUES, LENGTHS = torch.tensor([5, 7, 1]), torch.tensor([1, 2])
DENSE = torch.arange(6.0).view(2, 3)


def batch(key: str) -> KeyedJaggedTensor:
    return KeyedJaggedTensor([key], VALUES, lengths=LENGTHS)


def pooled(key: str) -> KeyedTensor:
    return KeyedTensor([key], [3], DENSE)


CODE: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
    "JaggedTensor": (lambda values, lengths: JaggedTensor(values, lengths=lengths), (VALUES, LENGTHS)),
    "JaggedTensor.from_dense": (lambda parts: JaggedTensor.from_dense(parts), ([VALUES, VALUES[:1]],)),
    "JaggedTensor.from_dense_lengths": (
        lambda dense, lengths: JaggedTensor.from_dense_lengths(dense, lengths),
        (DENSE, LENGTHS),
    ),
    "JaggedTensor.empty_like": (lambda jagged: JaggedTensor.empty_like(jagged["a"]), (batch("a"),)),
    "KeyedJaggedTensor": (
        lambda values, lengths: KeyedJaggedTensor(["a"], values, lengths=lengths).permute([0]),
        (VALUES, LENGTHS),
    ),
    "KeyedJaggedTensor.from_lengths_sync": (
        lambda values, lengths: KeyedJaggedTensor.from_lengths_sync(["a", "b"], values, lengths),
        (VALUES, LENGTHS),
    ),
    "KeyedJaggedTensor.from_offsets_sync": (
        lambda values, offsets: KeyedJaggedTensor.from_offsets_sync(["a"], values, offsets),
        (VALUES, torch.tensor([0, 1, 3])),
    ),
    "KeyedJaggedTensor.from_jt_dict": (
        lambda one: KeyedJaggedTensor.from_jt_dict({"b": one["a"]}),
        (batch("a"),),
    ),
    "KeyedJaggedTensor.concat": (
        lambda parts: KeyedJaggedTensor.concat(parts),
        ([batch("a"), batch("b")],),
    ),
    "KeyedJaggedTensor.empty_like": (lambda kjt: KeyedJaggedTensor.empty_like(kjt), (batch("a"),)),
    "KeyedTensor": (lambda values: KeyedTensor(["a"], [3], values), (DENSE,)),
    "KeyedTensor.from_tensor_list": (lambda one: KeyedTensor.from_tensor_list(["a"], [one]), (DENSE,)),
    "KeyedTensor.regroup": (
        lambda parts: KeyedTensor.regroup(parts, [["b"], ["a"]]),
        ([pooled("a"), pooled("b")],),
    ),
    "KeyedTensor.regroup_as_dict": (
        lambda parts: KeyedTensor.regroup_as_dict(parts, [["b", "a"]], ["c"]),
        ([pooled("a"), pooled("b")],),
    ),
}


class Calls(nn.Module):
    def __init__(self, function: Callable[..., Any], num_arguments: int) -> None:
        super().__init__()
        self.function, self.num_arguments = function, num_arguments

    def forward(self, first: Any, second: Any = None) -> Any:
        return self.function(*(first, second)[: self.num_arguments])


@pytest.mark.parametrize("name", CODE)
def test_trace_gives_what_the_code_gives(name: str) -> None:
    function, arguments = CODE[name]
    traced = torch.fx.symbolic_trace(Calls(function, len(arguments)))
    expected, got = function(*arguments), traced(*arguments)
    assert type(got) is type(expected)
    for one, other in zip(_pytree.tree_leaves(got), _pytree.tree_leaves(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def parts_of(kjt: KeyedJaggedTensor) -> list[KeyedJaggedTensor]:
    first, none, last = kjt.split([1, 0, 1])
    joined = KeyedJaggedTensor.concat([last, first])
    return [first, none, joined, joined.permute([1, 0, 1]), KeyedJaggedTensor.empty_like(joined)]


def made_of(kjt: KeyedJaggedTensor) -> list[KeyedJaggedTensor]:
    keys, values, weights = kjt.keys(), kjt.values(), kjt.weights_or_none()
    by_lengths = KeyedJaggedTensor.from_lengths_sync(keys, values, kjt.lengths(), weights)
    by_offsets = KeyedJaggedTensor.from_offsets_sync(keys, values, kjt.offsets(), weights)
    return [by_lengths, by_offsets, KeyedJaggedTensor.empty(is_weighted=True)]


def bags_of(kjt: KeyedJaggedTensor) -> list[Tensor]:
    return kjt["b"].to_dense()


def facts_of(kjt: KeyedJaggedTensor) -> list[list[int]]:
    return [kjt.length_per_key(), kjt.offset_per_key(), [kjt.stride()]]


def scripted(code: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, that TorchScript is deprecated
        return torch.jit.script(code)


def two_keys(*, weighted: bool) -> KeyedJaggedTensor:
    values = torch.arange(5)
    return KeyedJaggedTensor(
        ["a", "b"], values, values / 2 if weighted else None, torch.tensor([2, 0, 1, 0, 0, 2])
    )


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("code", [parts_of, made_of])
def test_torchscript_makes_and_parts_batches_as_python_does(code: Any, weighted: bool) -> None:
    kjt = two_keys(weighted=weighted)
    for found, wanted in zip(scripted(code)(kjt), code(kjt), strict=True):
        assert type(found) is KeyedJaggedTensor
        assert (str(found), found.stride()) == (str(wanted), wanted.stride())
        assert found.values().dtype is wanted.values().dtype
        assert (found.weights_or_none() is None) == (wanted.weights_or_none() is None)


def test_torchscript_reads_bags_and_sizes_as_python_does() -> None:
    kjt = two_keys(weighted=False)
    found = scripted(bags_of)(kjt)
    assert [bag.tolist() for bag in found] == [bag.tolist() for bag in bags_of(kjt)] == [[], [], [3, 4]]
    assert scripted(facts_of)(kjt) == facts_of(kjt)


def with_column(kjt: KeyedJaggedTensor, name: str, column: Tensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(kjt.keys(), kjt.values(), lengths=kjt.lengths(), columns={name: column})


def test_torchscript_takes_and_makes_no_batch_that_contradicts_itself() -> None:
    kjt = two_keys(weighted=False)
    with pytest.raises(torch.jit.Error, match="as many lengths as there are samples"):
        scripted(KeyedJaggedTensor.from_lengths_sync)(["a"], VALUES, LENGTHS, None, 3)
    with pytest.raises(torch.jit.Error, match="different numbers of samples"):
        scripted(KeyedJaggedTensor.concat)([kjt, batch("c")])
    with pytest.raises(torch.jit.Error, match="some batches have weights"):
        scripted(KeyedJaggedTensor.concat)([kjt, two_keys(weighted=True)])
    for name, column in (("count", torch.arange(5)), ("time", torch.arange(5.0))):
        one, other = (with_column(kjt, name, column), with_column(kjt, "time", torch.arange(5)))
        with pytest.raises(torch.jit.Error, match=r"some batches have|a column has several dtypes: time"):
            scripted(KeyedJaggedTensor.concat)([one, other])
    with pytest.raises(torch.jit.Error, match="do not add up to the number of keys"):
        scripted(parts_of)(batch("c"))
    own_sizes = KeyedJaggedTensor(["b"], VALUES, lengths=LENGTHS, stride_per_key_per_rank=[[2]])
    with pytest.raises(RuntimeError, match="_variable"):
        scripted(bags_of)(own_sizes)


def of_jagged(bags: JaggedTensor) -> tuple[list[Tensor], Tensor, Tensor, Tensor, Tensor, torch.device]:
    padded = bags.to_padded_dense(), bags.to_padded_dense(1, 2.0)
    return bags.to_dense(), padded[0], padded[1], bags.lengths(), bags.offsets(), bags.device()


def of_keyed(kjt: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, list[int], bool, dict[str, JaggedTensor]]:
    moved = kjt.to(torch.device("cpu")).sync()
    return moved, kjt.stride_per_key(), kjt.variable_stride_per_key(), kjt.to_dict()


def of_keyed_tensor(
    keyed: KeyedTensor,
) -> tuple[KeyedTensor, list[int], int, dict[str, Tensor], torch.device]:
    return keyed, keyed.offset_per_key(), keyed.key_dim(), keyed.to_dict(), keyed.device()


def of_dict(bags: dict[str, JaggedTensor]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_jt_dict(bags)


def of_bags(bags: list[Tensor]) -> list[JaggedTensor]:
    return [JaggedTensor.from_dense(bags), JaggedTensor.from_dense(bags, bags)]


def regrouped(parts: list[KeyedTensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    groups = [["b", "a"], ["a"]]
    return KeyedTensor.regroup(parts, groups), KeyedTensor.regroup_as_dict(parts, groups, ["x", "y"])


def of_columns(tensors: list[Tensor]) -> KeyedTensor:
    return KeyedTensor.from_tensor_list(["a", "b"], tensors)


NONE = torch.zeros(2, dtype=torch.int64)
OTHERS: list[tuple[Callable[..., Any], Any]] = [
    (of_jagged, batch("a")["a"]),
    (of_jagged, JaggedTensor(torch.arange(6.0).view(3, 2), offsets=torch.tensor([0, 0, 2, 3]))),
    (of_jagged, JaggedTensor(torch.zeros(0), lengths=NONE)),
    (of_keyed, two_keys(weighted=True)),
    (of_keyed_tensor, KeyedTensor(["a", "b"], [1, 2], DENSE)),
    (of_dict, two_keys(weighted=True).to_dict()),
    (of_dict, two_keys(weighted=False).to_dict()),
    (of_bags, [VALUES, VALUES[:1]]),
    (regrouped, [pooled("a"), pooled("b")]),
    (of_columns, [DENSE, DENSE[:, :1]]),
]


@pytest.mark.parametrize(("code", "given"), OTHERS)
def test_torchscript_gives_what_python_gives(code: Callable[..., Any], given: Any) -> None:
    found, wanted = map(_pytree.tree_flatten, (scripted(code)(given), code(given)))
    assert found[1] == wanted[1]  # types, with their keys
    for one, other in zip(found[0], wanted[0], strict=True):
        assert type(one) is type(other)
        if isinstance(one, Tensor):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        else:
            assert one == other


def test_torchscript_says_which_functions_it_has() -> None:
    with pytest.raises(
        UnsupportedError, match=r"no JaggedTensor\.from_dense_lengths.* JaggedTensor\.from_dense, "
    ):
        scripted(JaggedTensor.from_dense_lengths)
