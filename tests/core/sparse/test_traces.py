"""Graphs of code that makes sparse types: traces of `torch.fx`, and TorchScript, which reads annotations."""

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


def test_trace_takes_batches_without_stand_ins_as_they_are() -> None:
    def add(x: Tensor) -> Tensor:
        return x + batch("a").values()

    assert torch.fx.symbolic_trace(add)(torch.ones(3)).tolist() == [6, 8, 2]


def test_batches_are_made_without_torchs_warning_of_traces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.fx._symbolic_trace.is_fx_tracing_warning", lambda: pytest.fail("it warned"))
    assert batch("a").permute([0]).keys() == ["a"]


def of_jagged(bags: JaggedTensor) -> tuple[list[Tensor], Tensor, Tensor, Tensor, Tensor, torch.device]:
    padded = bags.to_padded_dense(), bags.to_padded_dense(1, 2.0)
    return bags.to_dense(), padded[0], padded[1], bags.lengths(), bags.offsets(), bags.device()


def of_keyed(batch: KeyedJaggedTensor) -> tuple[list[str], list[int], list[int], list[int], int, bool]:
    is_variable = batch.variable_stride_per_key()
    sizes = batch.length_per_key(), batch.offset_per_key(), batch.stride_per_key()
    return batch.keys(), sizes[0], sizes[1], sizes[2], batch.stride(), is_variable


def of_pooled(pooled: KeyedTensor) -> tuple[list[str], list[int], list[int], int, dict[str, Tensor]]:
    return pooled.keys(), pooled.length_per_key(), pooled.offset_per_key(), pooled.key_dim(), pooled.to_dict()


def part(batch: KeyedJaggedTensor) -> list[KeyedJaggedTensor]:
    return batch.split([1, 0, 1])


def permute(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return batch.permute([1, 0, 1]).to(torch.device("cpu")).sync()


def bags_of(batch: KeyedJaggedTensor) -> tuple[dict[str, JaggedTensor], Tensor]:
    return batch.to_dict(), batch["b"].weights()


def join(batches: list[KeyedJaggedTensor]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.concat(batches)


def like(batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.empty_like(batch)


def of_dict(bags: dict[str, JaggedTensor]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor.from_jt_dict(bags)


def of_tensors(values: Tensor, weights: Tensor | None, lengths: Tensor) -> list[KeyedJaggedTensor]:
    by_offsets = KeyedJaggedTensor.from_offsets_sync(["a"], values, torch.tensor([0, 2, 3]), weights)
    by_lengths = KeyedJaggedTensor.from_lengths_sync(["a", "b"], values, lengths, weights)
    return [by_offsets, by_lengths, KeyedJaggedTensor.empty(weights is not None)]


def of_lists(bags: list[Tensor]) -> list[JaggedTensor]:
    return [JaggedTensor.from_dense(bags, bags), JaggedTensor.empty(True, None, torch.int64)]


def regrouped(parts: list[KeyedTensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    groups = [["b", "a"], ["a"]]
    return KeyedTensor.regroup(parts, groups), KeyedTensor.regroup_as_dict(parts, groups, ["x", "y"])


def of_columns(tensors: list[Tensor]) -> KeyedTensor:
    return KeyedTensor.from_tensor_list(["a", "b"], tensors)


TWO = KeyedJaggedTensor(
    ["a", "b"], torch.arange(6), torch.arange(6.0), lengths=torch.tensor([2, 0, 1, 3], dtype=torch.int32)
)
ROWS = JaggedTensor(torch.arange(6.0).view(3, 2), lengths=torch.tensor([0, 2, 1]))
SCRIPTS: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
    (of_jagged, (batch("a")["a"],)),
    (of_jagged, (ROWS,)),
    (of_jagged, (JaggedTensor(torch.zeros(0), lengths=torch.zeros(2, dtype=torch.int64)),)),
    (of_keyed, (TWO,)),
    (of_pooled, (KeyedTensor(["a", "b"], [1, 2], DENSE),)),
    (part, (TWO,)),
    (permute, (TWO,)),
    (permute, (KeyedJaggedTensor(["a", "b"], torch.arange(2), offsets=torch.tensor([0, 1, 2])),)),
    (bags_of, (TWO,)),
    (join, ([TWO, KeyedJaggedTensor(["c"], VALUES, VALUES.float(), lengths=LENGTHS)],)),
    (join, ([batch("a"), batch("b")],)),
    (like, (TWO,)),
    (of_dict, (TWO.to_dict(),)),
    (of_tensors, (VALUES, None, LENGTHS)),
    (of_tensors, (VALUES, VALUES.float(), LENGTHS)),
    (of_lists, ([VALUES, VALUES[:1]],)),
    (regrouped, ([pooled("a"), pooled("b")],)),
    (of_columns, ([DENSE, DENSE[:, :1]],)),
]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize(("function", "arguments"), SCRIPTS)
def test_script_gives_what_the_code_gives(function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    found, expected = map(
        _pytree.tree_flatten, (torch.jit.script(function)(*arguments), function(*arguments))
    )
    assert found[1] == expected[1]  # types, with their keys
    for one, other in zip(found[0], expected[0], strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0) if isinstance(one, Tensor) else None
        assert isinstance(one, Tensor) or one == other


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated", "ignore:The TorchScript type system")
def test_script_of_a_trace_needs_no_annotation_of_a_sparse_type() -> None:
    class Counts(nn.Module):
        def forward(self, values: Tensor, lengths: Tensor) -> Tensor:
            return KeyedJaggedTensor.from_lengths_sync(["a", "b"], values, lengths)["b"].values()

    script = torch.jit.script(torch.fx.symbolic_trace(Counts()))
    assert script(VALUES, LENGTHS).tolist() == [7, 1]


def from_rows(values: Tensor, lengths: Tensor) -> JaggedTensor:
    return JaggedTensor.from_dense_lengths(values, lengths)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_script_without_a_form_says_which_there_are() -> None:
    with pytest.raises(
        UnsupportedError, match=r"no JaggedTensor\.from_dense_lengths.* JaggedTensor\.from_dense, "
    ):
        torch.jit.script(from_rows)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_script_takes_no_batch_size_per_key() -> None:
    uneven = KeyedJaggedTensor(
        ["a", "b"], VALUES, lengths=torch.ones(3).int(), stride_per_key_per_rank=[[1], [2]]
    )
    with pytest.raises(RuntimeError, match="_variable"):
        torch.jit.script(like)(uneven)
