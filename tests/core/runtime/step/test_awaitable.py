"""Awaitables wait once, on first use and no sooner."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from shardwright import InvalidInputError, JaggedTensor, KeyedJaggedTensor, KeyedTensor, LazyAwaitable


class Counted(LazyAwaitable):
    """A result, and how often it was waited for."""

    def __init__(self, result):
        super().__init__()
        self.result_given, self.num_waits = result, 0

    def _wait_impl(self):
        self.num_waits += 1
        if isinstance(self.result_given, Exception):
            raise self.result_given
        return self.result_given


class ExampleAwaitable(LazyAwaitable[torch.Tensor]):
    """The one of TorchRec's introduction."""

    def __init__(self, size: list[int]) -> None:
        super().__init__()
        self._size = size

    def _wait_impl(self) -> torch.Tensor:
        return torch.ones(self._size)


def keyed():
    return KeyedTensor(["a", "b"], [1, 2], torch.arange(6.0).view(2, 3))


def other():
    return KeyedTensor(["c"], [1], torch.ones(2, 1))


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (lambda it: it + 1, [1.0, 2.0, 3.0]),
        (lambda it: 2 - it, [2.0, 1.0, 0.0]),
        (lambda it: it * it, [0.0, 1.0, 4.0]),
        (lambda it: -it, [0.0, -1.0, -2.0]),
        (lambda it: it > 1, [False, False, True]),
        (lambda it: it @ torch.ones(3), 3.0),
    ],
)
def test_operators_wait_once_and_act_on_the_result(use, expected):
    awaitable = Counted(torch.arange(3.0))
    assert use(awaitable).tolist() == expected
    assert awaitable.num_waits == 1


def test_length_is_the_results():
    assert len(Counted(torch.zeros(4, 2))) == 4


@pytest.mark.parametrize("use", [len, lambda it: it + 1, lambda it: 1 - it, lambda it: it < 1, abs])
def test_operators_that_a_result_does_not_have_end_as_they_do_with_the_result(use):
    with pytest.raises(TypeError, match="KeyedTensor") as of_result:
        use(keyed())
    with pytest.raises(TypeError) as of_awaitable:
        use(Counted(keyed()))
    assert str(of_awaitable.value) == str(of_result.value)


def test_example_of_the_introduction_waits_and_acts_as_its_tensor():
    awaitable = ExampleAwaitable([3, 2])
    assert torch.equal(awaitable.wait(), torch.ones(3, 2))
    assert ExampleAwaitable([3, 2]).shape == (3, 2)
    assert torch.equal(torch.add(ExampleAwaitable([3, 2]), 1), torch.full((3, 2), 2.0))


@pytest.mark.parametrize(
    ("use", "expected"),
    [
        (lambda it: it.keys(), ["a", "b"]),
        (lambda it: it["a"].tolist(), [[0.0], [3.0]]),
        (lambda it: it.wait().keys(), ["a", "b"]),
        (lambda it: list(it.to_dict()), ["a", "b"]),
        (lambda it: it.values().shape, (2, 3)),
    ],
)
def test_lazy_first_use_waits_and_later_ones_do_not_again(use, expected):
    awaitable = Counted(keyed())
    assert awaitable.num_waits == 0
    assert use(awaitable) == expected
    assert use(awaitable) == expected
    assert awaitable.num_waits == 1


@pytest.mark.parametrize(
    "use",
    [
        lambda it: torch.cat([it, it]),
        lambda it: torch.stack((torch.ones(2), it)),
        lambda it: torch.add(torch.ones(2), other=it),
        lambda it: torch.ones(2) + it,
        lambda it: torch.nn.functional.relu(it),
        lambda it: torch.where(torch.tensor([True, False]), it, torch.ones(2)),
    ],
)
def test_lazy_torch_function_waits_for_awaitables_wherever_they_stand(use):
    tensor = torch.tensor([1.0, -2.0])
    awaitable = Counted(tensor)
    assert torch.equal(use(awaitable), use(tensor))
    assert awaitable.num_waits == 1


@pytest.mark.parametrize(
    ("use", "result"),
    [
        (lambda it: KeyedTensor.regroup([it, other()], [["b", "c"]])[0], keyed()),
        (lambda it: KeyedTensor.regroup(groups=[["b"], ["a", "c"]], keyed_tensors=(other(), it))[1], keyed()),
        (lambda it: KeyedTensor.regroup_as_dict([it], [["b", "a"]], ["x"])["x"], keyed()),
        (
            lambda it: KeyedJaggedTensor.from_jt_dict(it).values(),
            {"a": JaggedTensor(torch.tensor([7, 8]), lengths=torch.tensor([2]))},
        ),
    ],
)
def test_functions_of_batches_and_results_wait_for_their_arguments(use, result):
    awaitable = Counted(result)
    assert torch.equal(use(awaitable), use(result))
    assert awaitable.num_waits == 1


def test_lazy_result_of_the_wrong_kind_is_told_as_the_result_is():
    with pytest.raises(InvalidInputError, match=r"keyed_tensors\[0\] must be a KeyedTensor, got a Tensor"):
        KeyedTensor.regroup([Counted(torch.zeros(2))], [["a"]])


def test_lazy_error_is_raised_by_each_use_and_waited_for_once():
    awaitable = Counted(ValueError("rank 1 is gone"))
    for use in (lambda it: it.wait(), lambda it: it.keys(), lambda it: it["a"], torch.sum):
        with pytest.raises(ValueError, match="rank 1 is gone"):
            use(awaitable)
    assert awaitable.num_waits == 1


def test_lazy_attribute_the_result_has_not_is_the_results_error():
    with pytest.raises(AttributeError, match="'KeyedTensor' object has no attribute 'shapes'"):
        _ = Counted(keyed()).shapes


def test_lazy_probing_for_private_names_does_not_wait():
    awaitable = Counted(keyed())
    assert not hasattr(awaitable, "_values")
    assert not hasattr(awaitable, "__array__")
    assert "Counted" in repr(awaitable)
    copies = [copy.copy(awaitable), copy.deepcopy(awaitable)]
    assert awaitable.num_waits == 0
    assert [item.num_waits for item in copies] == [0, 0]
    assert copies[1].keys() == ["a", "b"]
    assert awaitable.num_waits == 0


def test_lazy_pickling_does_not_wait():
    awaitable = ExampleAwaitable([2])
    restored = pickle.loads(pickle.dumps(awaitable))
    assert "_result" not in vars(awaitable)
    assert torch.equal(restored.wait(), torch.ones(2))
