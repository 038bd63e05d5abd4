"""The script that measures shardwright by TorchRec's unit tests."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("serving")  # processes of their own find it, as if it were installed
SCRIPT = Path(__file__).parents[3] / "contrib" / "torchrec" / "torchrec_tests.py"

TESTS = """
import unittest
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.sparse.jagged_tensor import NotHere, _own

class Child(NotHere):
    pass

class OfBatches(unittest.TestCase):
    def test_passes(self): self.assertEqual(KeyedJaggedTensor.empty().keys(), [])
    def test_name(self): NotHere()
    def test_signature(self): KeyedJaggedTensor.empty(of=1)
    def test_behaviour(self): self.assertEqual(KeyedJaggedTensor.empty().keys(), ["a"])
    def test_attribute(self): KeyedJaggedTensor.empty()._values
    def test_import(self): _own
"""


@pytest.fixture(scope="module")
def ruler() -> ModuleType:
    spec = importlib.util.spec_from_file_location("torchrec_tests", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["torchrec_tests"] = module
    spec.loader.exec_module(module)
    return module


def test_each_test_falls_into_its_class(ruler: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "test_batches.py"
    file.write_text(TESTS)
    found = ruler.outcomes("shardwright", sys.executable, file, tmp_path, 100)
    internal = ruler.internal_tests(TESTS)
    assert internal == {"OfBatches.test_attribute", "OfBatches.test_import"}
    assert {
        name.partition("_")[2]: ruler.kind(error) for name, error in found.items() if name not in internal
    } == {
        "passes": ruler.PASSES,
        "name": ruler.ABSENT,
        "signature": ruler.SIGNATURE,
        "behaviour": ruler.BEHAVIOUR,
    }


@pytest.mark.slow
def test_file_that_takes_too_long_is_told(
    ruler: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "test_slow.py"
    file.write_text("import time; time.sleep(100)")
    with pytest.raises(ruler.NoOutcomesError, match=r"took more than 0\.5 s"):
        ruler.outcomes("torchrec", sys.executable, file, tmp_path, 0.5)


def test_population_is_told_with_what_is_counted_out(
    ruler: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("missing", "late", "batches"):
        (tmp_path / f"test_{name}.py").write_text(TESTS)
    names = ("passes", "behaviour", "attribute", "name")
    ran: list[tuple[str, str]] = []

    def outcomes(side: str, _: str, file: Path, *__: Any) -> dict[str, Any]:
        ran.append((side, file.stem))
        if (side, file.stem) in (("torchrec", "test_missing"), ("shardwright", "test_late")):
            raise ruler.NoOutcomesError("took more than 1 s")
        found: dict[str, Any] = {f"OfBatches.test_{name}": None for name in names}
        failing = "name" if side == "torchrec" else "behaviour"
        return found | {f"OfBatches.test_{failing}": ["ValueError", "no"]}

    monkeypatch.setattr(ruler, "outcomes", outcomes)
    monkeypatch.setattr(ruler.subprocess, "check_output", lambda *_, **__: str(tmp_path))
    measured = ruler.measure(tmp_path, sys.executable, 1, tmp_path / "kept")
    assert (measured.files, measured.tests) == (3, 8)
    assert measured.not_there == {"test_missing.py": "took more than 1 s"}
    assert measured.not_here == {"test_late.py": "took more than 1 s"}
    of = {test: state for test, (state, _) in measured.found.items()}
    assert of == {
        "test_batches.py::OfBatches.test_passes": ruler.PASSES,
        "test_batches.py::OfBatches.test_behaviour": ruler.BEHAVIOUR,
        "test_batches.py::OfBatches.test_attribute": ruler.INTERNAL,
        "test_late.py::OfBatches.test_passes": ruler.BEHAVIOUR,
        "test_late.py::OfBatches.test_behaviour": ruler.BEHAVIOUR,
        "test_late.py::OfBatches.test_attribute": ruler.INTERNAL,
    }
    ruler.report(measured)
    assert "25.0% of the tests that count pass" in capsys.readouterr().out
    assert len(ran) == 5
    assert ruler.measure(tmp_path, sys.executable, 1, tmp_path / "kept") == measured
    assert len(ran) == 5  # taken from what was kept


STARTS = """
import torch.multiprocessing as mp, unittest
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, NotHere

def of_rank(rank: int) -> None:
    assert KeyedJaggedTensor.empty().keys() == []

class OfRanks(unittest.TestCase):
    def test_it(self): mp.spawn(of_rank)
"""


@pytest.mark.slow
def test_processes_of_a_test_import_its_module(ruler: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "test_ranks.py"
    file.write_text(STARTS)
    assert ruler.outcomes("shardwright", sys.executable, file, tmp_path, 200) == {"OfRanks.test_it": None}
