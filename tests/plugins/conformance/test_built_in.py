"""What the built-in plugins offer keeps what the conformance kit asks of its kind, whose row names the tests."""

from __future__ import annotations

from typing import Any

import pytest
from tests.plugins.built_in import built_in

import shardwright_testing
from shardwright.hookspecs import KINDS
from shardwright.host import host
from shardwright.host.offers import Kind

ELSEWHERE = ("optimizer", "sharding_type")  # some of their tests are slow: modules of their own say which


def kit_of(kind: Kind[Any]) -> type:
    """The kit's class of tests of a kind, over the built-ins."""

    def one(self: object, request: pytest.FixtureRequest) -> Any:
        return host().registry_of(kind.contract).create(request.param)

    fixture = pytest.fixture(one, name=kind.name, params=built_in(kind.label))
    name = kind.kit.rpartition(".")[2]
    tests = type(f"Test{name}", (getattr(shardwright_testing, name),), {kind.name: fixture})
    return pytest.mark.distributed(tests) if kind.name == "comm_backend" else tests


globals().update({f"Test_{kind.name}": kit_of(kind) for kind in KINDS if kind.name not in ELSEWHERE})
