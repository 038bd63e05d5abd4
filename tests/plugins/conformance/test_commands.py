"""Every registered command keeps what the conformance kit asks."""

from __future__ import annotations

import pytest

from shardwright.contracts import Command
from shardwright.host import host
from shardwright_testing import CommandTests


class TestCommands(CommandTests):
    @pytest.fixture(params=sorted(host().commands))
    def command(self, request: pytest.FixtureRequest) -> Command:
        return host().commands.create(request.param)
