"""What Python and torch expect of values: pickling, copying, pytrees, imports that cost nothing."""

from __future__ import annotations

import copy
import doctest
import importlib
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree

from shardwright.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor

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


def test_deepcopy_gives_the_same_with_memory_of_its_own(example: Any) -> None:
    before = str(example)
    copied = copy.deepcopy(example)
    assert str(copied) == before
    copied.values().zero_()
    assert str(example) == before


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
    done = subprocess.run(
        [sys.executable, "-c", source, str(path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [repr(example) for example in examples]


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


def test_tree_map_reaches_every_tensor_in_a_nested_batch() -> None:
    batch = {"sparse": [EXAMPLES["keyed_jagged_weighted"]()], "dense": EXAMPLES["keyed"]()}
    doubled = _pytree.tree_map(lambda tensor: tensor * 2, batch)
    assert doubled["sparse"][0].values().tolist() == [2, 4, 6]
    assert doubled["sparse"][0].weights().tolist() == [1.0, 3.0, 5.0]
    assert doubled["sparse"][0].lengths().tolist() == [2, 4]
    assert doubled["dense"]["b"].tolist() == [[3.0, 5.0]]


def test_tree_map_may_put_in_what_is_no_tensor() -> None:
    shapes = _pytree.tree_map(lambda tensor: tuple(tensor.shape), EXAMPLES["keyed_jagged"]())
    assert (shapes.values(), shapes.lengths()) == ((3,), (2,))


def test_pytree_key_paths_name_the_tensors() -> None:
    paths, _ = _pytree.tree_flatten_with_path({"batch": EXAMPLES["keyed_jagged_weighted"]()})
    assert [_pytree.keystr(path) for path, _ in paths] == [
        "['batch'].values",
        "['batch'].lengths",
        "['batch'].weights",
    ]


@pytest.mark.parametrize("name", ["jagged_tensor", "keyed_jagged_tensor", "keyed_tensor"])
def test_docstring_examples_give_what_they_show(name: str) -> None:
    module = importlib.import_module(f"shardwright.sparse.{name}")
    result = doctest.testmod(module, extraglobs={"torch": torch})
    assert result.attempted > 0
    assert result.failed == 0
