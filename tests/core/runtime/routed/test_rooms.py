"""Results and gradients are made in the communicator's memory where they are sent as they are."""

from __future__ import annotations

import torch
from tests.core.runtime.plans import Cut, Cuts, host_with_loops
from tests.pretended import pretended_env

from shardwright.host import use_host


def rooms_of(tables, monkeypatch):
    """The sizes of the rooms that a step asks for, and the sharded collection."""
    env, communicator = pretended_env(2)
    asked = []

    def room(num_elements, device):
        asked.append(num_elements)
        return torch.empty(num_elements)

    monkeypatch.setattr(communicator, "room", room)
    case = Cuts(tables, 2)
    with use_host(host_with_loops()):
        sharded = case.shard(env, case.module())
    sharded(case.batch(6)).values().sum().backward()
    return asked, sharded


def test_gradients_are_packed_and_results_made_where_they_are_sent_from(monkeypatch):
    tables = [Cut(8, 4, ("a",), ranks=(0,)), Cut(8, 4, ("b",), ranks=(1,))]
    asked, sharded = rooms_of(
        [tables[1], tables[0]], monkeypatch
    )  # so that gradients do not stand as they are sent
    assert asked == [6 * 8]
    (lookup,) = sharded.engine.lookups
    lookup.room(5)
    assert asked == [6 * 8, 5]


def test_groups_whose_results_are_put_together_are_not_made_there(monkeypatch):
    tables = [Cut(8, 4, ("a",), ranks=(0,)), Cut(8, 4, ("b",), ranks=(1,), kernel="loop_by_sample")]
    asked, sharded = rooms_of(tables, monkeypatch)
    assert asked == []
    for lookup in sharded.engine.lookups:
        lookup.room(5)
    assert asked == []
