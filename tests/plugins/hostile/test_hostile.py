"""Whatever stands in a document or on a command line ends in a result or an error in words, within time and memory.

The commands run in a process of their own, whose address space is limited.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.plugins.hostile import named
from tests.plugins.hostile.run import KINDS

DRAWN = [kind for kind in KINDS if kind != "named"]
ROOT = Path(__file__).parents[3]


def fuzz(*words: str) -> tuple[list[dict[str, Any]], str]:
    """The counts that the script prints after each kind, and all that it prints."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.plugins.hostile.run", "--kind", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert found, done.stdout[-2000:] + done.stderr[-4000:]
    return found, done.stdout + done.stderr[-4000:]


@pytest.mark.slow
def test_hostile_named_cases_each_end_in_the_words_for_it() -> None:
    (found,), text = fuzz("named")
    assert [list(named.CASES)[index] for index in found["wrong"]] == [], text
    assert found["cases"] == len(named.CASES)


def test_hostile_drawn_cases_end_in_a_result_or_an_error() -> None:
    found, text = fuzz(*DRAWN, "--count", "6", "--seed", "1")  # many more in the slow test
    assert [(each["kind"], each["cases"], each["wrong"]) for each in found] == [
        (kind, 6, []) for kind in DRAWN
    ], text


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", DRAWN)
def test_hostile_many_drawn_cases_end_in_a_result_or_an_error(kind: str) -> None:
    (found,), text = fuzz(kind, "--count", "1000", "--seed", "2")
    assert found["wrong"] == [], text
