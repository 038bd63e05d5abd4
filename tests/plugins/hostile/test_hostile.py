"""Whatever stands in a document or on a command line ends in a result or an error in words, within time and memory.

The commands run in a process of their own, whose address space is limited.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.plugins.hostile import named
from tests.plugins.hostile.run import KINDS
from tests.programs import printed_by

DRAWN = [kind for kind in KINDS if kind != "named"]
ROOT = Path(__file__).parents[3]


def fuzz(count: int, seed: int, *kinds: str) -> tuple[dict[str, list[int]], str]:
    """The numbers of the wrong cases of each kind, and all that the script prints."""
    words = ["-m", "tests.plugins.hostile.run", str(count), str(seed), *kinds]
    text = printed_by(*words, cwd=ROOT)
    return json.loads(text.splitlines()[-1]), text


@pytest.mark.slow
def test_hostile_named_cases_each_end_in_the_words_for_it() -> None:
    found, text = fuzz(len(named.CASES), 0, "named")
    assert [list(named.CASES)[index] for index in found["named"]] == [], text


def test_hostile_drawn_cases_end_in_a_result_or_an_error() -> None:
    found, text = fuzz(6, 1, *DRAWN)  # many more in the slow test
    assert found == {kind: [] for kind in DRAWN}, text


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", DRAWN)
def test_hostile_many_drawn_cases_end_in_a_result_or_an_error(kind: str) -> None:
    found, text = fuzz(1000, 2, kind)
    assert found == {kind: []}, text
