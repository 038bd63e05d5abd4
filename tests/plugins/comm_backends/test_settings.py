"""What environment variables say beside which plugins are loaded."""

from __future__ import annotations

import pytest

from shardwright.errors import InvalidInputError
from shardwright_plugins.comm_backends.settings import SHARED_MEMORY_VARIABLE, may_share_memory


@pytest.mark.parametrize(
    ("told", "may"),
    [(None, True), ("", True), ("on", True), ("off", False)],
    ids=["nothing", "", "on", "off"],
)
def test_memory_is_shared_unless_the_variable_says_off(
    monkeypatch: pytest.MonkeyPatch, told: str | None, may: bool
) -> None:
    monkeypatch.delenv(SHARED_MEMORY_VARIABLE, raising=False)
    if told is not None:
        monkeypatch.setenv(SHARED_MEMORY_VARIABLE, told)
    assert may_share_memory() is may


def test_variable_that_says_neither_on_nor_off_is_refused() -> None:
    with pytest.raises(
        InvalidInputError, match="SHARDWRIGHT_SHARED_MEMORY is 'of'; it must be 'on' or 'off'"
    ):
        may_share_memory({SHARED_MEMORY_VARIABLE: "of"})
