"""The one place that knows whether FBGEMM's operators can be used."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from shardwright import JaggedTensor, _fbgemm


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """FBGEMM as if nobody had asked for it yet."""
    _fbgemm._failure.cache_clear()
    monkeypatch.delitem(sys.modules, "fbgemm_gpu", raising=False)
    yield monkeypatch
    monkeypatch.undo()
    _fbgemm._failure.cache_clear()


def test_fbgemm_not_installed_says_so(forgotten: pytest.MonkeyPatch) -> None:
    forgotten.setitem(sys.modules, "fbgemm_gpu", None)
    assert _fbgemm.available() is False
    assert (_fbgemm.reason() or "").startswith("ModuleNotFoundError: ")
    assert _fbgemm.serves("asynchronous_complete_cumsum", "cpu") is False


@pytest.mark.parametrize("error", ["OSError", "RuntimeError", "AttributeError", "ImportError"])
def test_fbgemm_that_does_not_fit_torch_says_why(
    forgotten: pytest.MonkeyPatch, tmp_path: Path, error: str
) -> None:
    (tmp_path / "fbgemm_gpu.py").write_text(f"raise {error}('undefined symbol: _ZN3c10')\n")
    forgotten.syspath_prepend(tmp_path)
    assert _fbgemm.available() is False
    assert _fbgemm.reason() == f"{error}: undefined symbol: _ZN3c10"
    assert JaggedTensor(torch.tensor([7]), lengths=torch.tensor([0, 1])).offsets().tolist() == [0, 0, 1]


def test_fbgemm_reason_tells_what_the_error_came_from(forgotten: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "fbgemm_gpu.py").write_text(
        "raise OSError('no library') from OSError('undefined symbol: _Z')\n"
    )
    forgotten.syspath_prepend(tmp_path)
    assert _fbgemm.reason() == "OSError: no library from OSError: undefined symbol: _Z"


def test_fbgemm_available_has_no_reason_and_serves_the_cpu() -> None:
    if not _fbgemm.available():
        pytest.skip(f"FBGEMM is not available: {_fbgemm.reason()}")
    assert _fbgemm.reason() is None
    assert _fbgemm.serves("asynchronous_complete_cumsum", "cpu")
    assert not _fbgemm.serves("an_operator_that_is_not_there", "cpu")
