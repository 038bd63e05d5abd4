"""Errors of shardwright are exceptions like others: subclasses of users may take what they like."""

from __future__ import annotations

import copy
import pickle

import pytest

from shardwright.errors import InvalidInputError
from shardwright.ways import Ways, take_ways


class OwnError(InvalidInputError):
    def __init__(self, text: str, *, place: int = 0) -> None:
        super().__init__(text)
        self.place = place


@pytest.mark.parametrize("chosen", [None, OwnError])
def test_subclasses_take_arguments_by_name_and_are_copied(chosen: type[OwnError] | None) -> None:
    take_ways(Ways(input_error=chosen))
    try:
        assert type(InvalidInputError("text")) is (chosen or InvalidInputError)
        error = OwnError("text", place=3)
        for found in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):
            assert type(found) is OwnError
            assert (str(found), found.place) == ("text", 3)
    finally:
        take_ways(Ways())
