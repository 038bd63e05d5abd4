"""What a batch was wrong about reaches those who listen, in the process that made it."""

from __future__ import annotations

import pytest
import torch

from shardwright import InvalidInputError, KeyedJaggedTensor
from shardwright.error_reports import listen, reporting_errors


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
