"""Errors of shardwright are exceptions like others: subclasses of users may take what they like."""

from __future__ import annotations

import copy
import pickle

from shardwright.errors import InvalidInputError


class OwnError(InvalidInputError):
    def __init__(self, text: str, *, place: int = 0) -> None:
        super().__init__(text)
        self.place = place


def test_subclasses_take_arguments_by_name_and_are_copied() -> None:
    error = OwnError("text", place=3)
    for found in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(found) is OwnError
        assert (str(found), found.place) == ("text", 3)
