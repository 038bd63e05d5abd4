"""What Python and torch expect of values, what batches hold besides ids in distinct bags, and operators in use."""

from __future__ import annotations

import doctest
import importlib
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.programs import printed_by
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright import InvalidInputError, JaggedTensor, KeyedJaggedTensor, KeyedTensor

IDS, LENGTHS = torch.tensor([1, 2, 3]), torch.tensor([1, 2])
WEIGHTS = torch.tensor([0.5, 1.5, 2.5])

EXAMPLES = {
    "jagged": lambda: JaggedTensor(IDS, lengths=LENGTHS),
    "jagged_weighted": lambda: JaggedTensor(IDS, WEIGHTS, offsets=torch.tensor([0, 1, 3])),
    "keyed_jagged": lambda: KeyedJaggedTensor(["a", "b"], IDS, lengths=LENGTHS),
    "keyed_jagged_weighted": lambda: KeyedJaggedTensor(["a", "b"], IDS, WEIGHTS, LENGTHS).sync(),
    "keyed_jagged_empty": KeyedJaggedTensor.empty,
    "keyed": lambda: KeyedTensor(["a", "b"], [1, 2], WEIGHTS.view(1, 3)),
    "keyed_rows": lambda: KeyedTensor(["a", "b"], [1, 2], WEIGHTS.view(3, 1), key_dim=0),
}


@pytest.fixture(params=EXAMPLES)
def example(request: pytest.FixtureRequest) -> Any:
    return EXAMPLES[request.param]()


def test_pickle_round_trip_gives_the_same(example: Any) -> None:
    copied = pickle.loads(pickle.dumps(example))
    assert type(copied) is type(example)
    assert (str(copied), repr(copied)) == (str(example), repr(example))
    copied.validate()


def test_pickle_read_by_a_fresh_process_that_imports_no_fbgemm(tmp_path: Path) -> None:
    path = tmp_path / "examples.pickle"
    examples = [make() for make in EXAMPLES.values()]
    path.write_bytes(pickle.dumps(examples))
    source = (
        "import pickle, sys, pathlib\n"
        "import shardwright.sparse\n"
        "assert 'fbgemm_gpu' not in sys.modules\n"
        "for example in pickle.loads(pathlib.Path(sys.argv[1]).read_bytes()): print(repr(example))\n"
        "assert 'fbgemm_gpu' not in sys.modules\n"
    )
    assert printed_by("-c", source, path).splitlines() == [repr(example) for example in examples]


def test_pytree_round_trip_gives_the_same(example: Any) -> None:
    leaves, spec = _pytree.tree_flatten(example)
    assert all(isinstance(leaf, torch.Tensor) for leaf in leaves)
    assert str(_pytree.tree_unflatten(leaves, spec)) == str(example)
    assert _pytree.treespec_loads(_pytree.treespec_dumps(spec)) == spec


def test_pytree_structure_does_not_depend_on_what_was_derived() -> None:
    fresh, used = EXAMPLES["keyed_jagged"](), EXAMPLES["keyed_jagged"]()
    used.offsets()
    used.sync()
    assert _pytree.tree_structure(fresh) == _pytree.tree_structure(used)
    by_offsets = KeyedJaggedTensor(["a", "b"], IDS, offsets=torch.tensor([0, 1, 3]))
    assert _pytree.tree_structure(fresh) == _pytree.tree_structure(by_offsets)


def test_tree_map_may_put_in_what_is_no_tensor() -> None:
    shapes = _pytree.tree_map(lambda tensor: tuple(tensor.shape), EXAMPLES["keyed_jagged"]())
    assert (shapes.values(), shapes.lengths()) == ((3,), (2,))


@pytest.mark.parametrize("name", ["jagged_tensor", "keyed_jagged_tensor", "keyed_tensor"])
def test_docstring_examples_give_what_they_show(name: str) -> None:
    module = importlib.import_module(f"shardwright.sparse.{name}")
    result = doctest.testmod(module, extraglobs={"torch": torch})
    assert result.attempted > 0
    assert result.failed == 0


@pytest.mark.parametrize(
    "make", [JaggedTensor, lambda *own, **named: KeyedJaggedTensor(["a"], *own, **named)]
)
def test_lengths_beside_offsets_are_both_held(make: Any) -> None:
    lengths, offsets = torch.tensor([1, 2]), torch.tensor([0, 1, 3])
    batch = make(torch.arange(3), lengths=lengths, offsets=offsets)
    assert batch.lengths() is lengths
    assert batch.offsets() is offsets


def test_repeated_keys_are_held_and_the_last_one_is_found() -> None:
    batch = KeyedJaggedTensor(["a", "a"], torch.arange(3), lengths=torch.tensor([1, 2]))
    assert batch.keys() == ["a", "a"]
    assert batch["a"].values().tolist() == [1, 2]
    assert list(batch.to_dict()) == ["a"]
    assert batch.to_dict()["a"].values().tolist() == [1, 2]
    assert str(batch) == 'KeyedJaggedTensor({\n    "a": [[0]],\n    "a": [[1, 2]]\n})'


@pytest.mark.parametrize("weighted", [False, True])
def test_permute_repeats_keys(weighted: bool) -> None:
    values = torch.arange(3)
    weights = values / 2 if weighted else None
    batch = KeyedJaggedTensor(["a", "b"], values, weights, torch.tensor([1, 2])).permute([1, 0, 1])
    assert batch.keys() == ["b", "a", "b"]
    assert batch.values().tolist() == [1, 2, 0, 1, 2]
    assert batch.lengths().tolist() == [2, 1, 2]
    assert batch.length_per_key() == [2, 1, 2]
    assert batch["a"].values().tolist() == [0]
    if weighted:
        assert batch.weights().tolist() == [0.5, 1.0, 0.0, 0.5, 1.0]


def test_values_beyond_the_bags_are_held_and_belong_to_no_key() -> None:
    batch = KeyedJaggedTensor(
        ["a", "b"], torch.arange(5), torch.arange(5) / 2, offsets=torch.tensor([0, 1, 2, 3, 4])
    )
    assert batch.values().tolist() == [0, 1, 2, 3, 4]
    assert batch.length_per_key() == [2, 2]
    assert batch["b"].values().tolist() == [2, 3]
    assert batch.to_dict()["b"].weights().tolist() == [1.0, 1.5]
    assert batch.permute([1, 0]).values().tolist() == [2, 3, 0, 1]
    assert [part.values().tolist() for part in batch.split([1, 1])] == [[0, 1], [2, 3]]
    other = KeyedJaggedTensor(["z"], torch.arange(2), torch.arange(2) / 2, torch.tensor([1, 1]))
    joined = KeyedJaggedTensor.concat([batch, other])
    assert joined["z"].values().tolist() == [0, 1]
    assert joined["z"].weights().tolist() == [0.0, 0.5]


def test_known_sizes_are_taken_if_they_are_right() -> None:
    arguments: dict[str, Any] = {
        "keys": ["a", "b"],
        "values": torch.arange(3),
        "lengths": torch.tensor([1, 2]),
        "length_per_key": [1, 2],
        "lengths_offset_per_key": [0, 1, 2],
        "offset_per_key": (0, 1, 3),
        "index_per_key": {"a": 0, "b": 1},
        "jt_dict": {},
    }
    assert KeyedJaggedTensor(**arguments).offset_per_key() == [0, 1, 3]
    for name in ("length_per_key", "lengths_offset_per_key", "offset_per_key", "index_per_key"):
        wrong = {"a": 1, "b": 0} if name == "index_per_key" else [7, 8, 9]
        with pytest.raises(InvalidInputError, match=f"{name} is .*, but by keys and lengths it is"):
            KeyedJaggedTensor(**{**arguments, name: wrong})


def test_known_lengths_spare_reading_a_device() -> None:
    batch = KeyedJaggedTensor(
        ["a"],
        torch.empty(3, device="meta"),
        lengths=torch.empty(2, device="meta", dtype=torch.int64),
        length_per_key=[3],
    )
    assert batch.length_per_key() == [3]  # reading a meta tensor raises


def test_keyed_tensor_takes_known_places_if_they_are_right() -> None:
    arguments: dict[str, Any] = {
        "offset_per_key": [0, 1, 3],
        "index_per_key": {"a": 0, "b": 1},
    }
    assert KeyedTensor(["a", "b"], [1, 2], torch.ones(2, 3), **arguments).offset_per_key() == [0, 1, 3]
    with pytest.raises(InvalidInputError, match=r"offset_per_key is \[0, 2, 3\], but .* it is \[0, 1, 3\]"):
        KeyedTensor(["a", "b"], [1, 2], torch.ones(2, 3), offset_per_key=[0, 2, 3])


class Operators(TorchDispatchMode):
    """Records the names of FBGEMM's operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.fbgemm: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = func._schema.name.partition("::")
        if namespace == "fbgemm":
            self.fbgemm.append(name)
        return func(*args, **(kwargs or {}))


def test_operators_called_are_those_of_the_path(ops_path: str) -> None:
    kjt = KeyedJaggedTensor(["a", "b"], torch.tensor([1, 2, 3]), lengths=torch.tensor([1, 0, 0, 2]))
    with Operators() as operators:
        kjt.offsets()
        kjt.permute([1, 0])
        JaggedTensor(torch.tensor([1, 2]), offsets=torch.tensor([0, 2])).to_padded_dense(1)
    expected = ["asynchronous_complete_cumsum", "permute_2D_sparse_data", "jagged_to_padded_dense_forward"]
    assert operators.fbgemm == (expected if ops_path == "fbgemm" else [])
