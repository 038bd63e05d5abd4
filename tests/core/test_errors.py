"""Errors of shardwright are exceptions like others, and reach those who listen in the process that made them."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch

from shardwright import InvalidInputError, KeyedJaggedTensor
from shardwright.error_reports import listen, reporting_errors


class OwnError(InvalidInputError):
    def __init__(self, text: str, *, place: int = 0) -> None:
        super().__init__(text)
        self.place = place


def test_subclasses_take_arguments_by_name_and_are_copied() -> None:
    error = OwnError("text", place=3)
    for found in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(found) is OwnError
        assert (str(found), found.place) == ("text", 3)


class Heard:
    def __init__(self) -> None:
        self.texts: list[str] = []

    def hear(self, text: str, *, is_last: bool = False) -> None:
        self.texts.append(text)


@pytest.fixture
def heard() -> Heard:
    listener = Heard()
    listen(listener)
    return listener


def wrong_batch() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["a"], torch.arange(3), weights=torch.ones(2), lengths=torch.tensor([3]))


def test_wrong_batch_is_heard_and_raised(heard: Heard) -> None:
    with pytest.raises(InvalidInputError) as error:
        wrong_batch()
    assert heard.texts == [f"raised InvalidInputError: {error.value}"]


def test_other_errors_are_nobodys_business(heard: Heard) -> None:
    with pytest.raises(KeyError), reporting_errors():
        raise KeyError("a")
    assert heard.texts == []
