"""What the engine starts before it waits, seen from the communicator."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from tests.plugins.pipeline.pipelines import Watched, bags

from shardwright_testing.simulated import run_simulated


def events_of_a_step(
    world_size: int = 4, local_world_size: int = 2, *, turned: bool = False
) -> list[list[tuple[str, str]]]:
    """A forward and a backward pass of tables with three dataflows; ``turned``: the last table is the first."""
    case = bags(world_size)
    if turned:
        case = evolve(case, tables=case.tables[::-1])
    module = case.module()

    def step(env):
        sharded = case.shard(env, module)
        watched = Watched(env.communicator)
        values = sharded(case.batch(3, seed=env.rank)).values()
        watched.events.append(("backward", ""))
        values.backward(torch.ones_like(values))
        return watched.events

    return run_simulated(step, world_size, local_world_size=local_world_size)


@pytest.mark.parametrize("turned", [False, True])
def test_results_of_all_ways_home_are_under_way_before_any_is_waited_for(turned):
    ways = [("start", "results"), ("start", "results inside the host")]
    for events in events_of_a_step(turned=turned):
        forward = events[events.index(("wait", "ids")) + 1 : events.index(("backward", ""))]
        assert sorted(forward[:2]) == ways
        last_start = forward.index(("start", "results across hosts"))
        assert [event for event in forward[:last_start] if event[0] == "wait"] == [
            ("wait", "results inside the host")
        ]
        assert ("wait", "results") in forward[last_start:]


def test_gradients_of_all_ways_and_of_copies_are_under_way_before_any_is_waited_for():
    for events in events_of_a_step():
        backward = events[events.index(("backward", "")) + 1 :]
        assert backward[:3] == [
            ("start", "gradients"),
            ("start", "gradients across hosts"),
            ("start", "dense gradients"),  # of copies
        ]
        assert backward[3][0] == "wait"
