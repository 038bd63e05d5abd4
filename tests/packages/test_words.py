"""Pages, docstrings of public names, help texts and errors use the field's words."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

import pytest
from tests.packages import words


def test_no_text_has_a_word_that_only_its_author_understands() -> None:
    assert words.found() == []


@pytest.mark.parametrize("texts", [words.pages, words.docstrings, words.help_texts, words.errors])
def test_texts_are_found(texts: Callable[[], Iterator[tuple[str, str]]]) -> None:
    assert sum(len(text) for _, text in texts()) > 5_000


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("by its dearest shard", 1),
        ("The model is then as it was.", 1),
        ("a search of yours", 1),
        ("results take home", 1),
        ("which is told of each step", 1),
        ("Replicated tables add one or two collectives.", 0),
        ("no more than two hosts", 0),
        ("Two ways of counting rows", 0),
    ],
)
def test_words_match_the_private_dialect_alone(text: str, matches: int) -> None:
    assert sum(bool(re.search(word, text, re.IGNORECASE)) for word in words.INSTEAD) == matches
