"""The examples in the docstrings."""

from __future__ import annotations

import doctest
import importlib

import pytest
import torch


@pytest.mark.parametrize("name", ["jagged_tensor", "keyed_jagged_tensor", "keyed_tensor"])
def test_docstring_examples_give_what_they_show(name: str) -> None:
    module = importlib.import_module(f"shardwright.sparse.{name}")
    result = doctest.testmod(module, extraglobs={"torch": torch})
    assert result.attempted > 0
    assert result.failed == 0
