"""What a batch was wrong about reaches those who listen, in the process that made it and in no other."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch

from shardwright.error_listeners import ErrorListener, listen, reporting_errors
from shardwright.errors import InvalidInputError
from shardwright.sparse import KeyedJaggedTensor


class Heard(ErrorListener):
    def __init__(self) -> None:
        self.texts: list[str] = []

    def hear(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture
def heard() -> Heard:
    listener = Heard()
    listen(listener)
    return listener


def wrong_batch() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["a"], torch.arange(3), lengths=torch.tensor([4]))


def test_wrong_batch_is_heard_and_raised(heard: Heard) -> None:
    with pytest.raises(InvalidInputError) as error:
        wrong_batch()
    assert heard.texts == [f"InvalidInputError: {error.value}"]


def test_wrong_batch_in_a_forked_process_is_not_heard(heard: Heard) -> None:
    with mock.patch.object(os, "getpid", return_value=os.getpid() + 1), pytest.raises(InvalidInputError):
        wrong_batch()
    assert heard.texts == []


def test_other_errors_are_nobodys_business(heard: Heard) -> None:
    with pytest.raises(KeyError), reporting_errors():
        raise KeyError("a")
    assert heard.texts == []
