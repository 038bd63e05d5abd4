"""When a rank meets the others before it begins a batch: as rarely as can be, and where a backward pass may lack."""

from __future__ import annotations

from itertools import count

import pytest

from shardwright import ShardingEnv
from shardwright.runtime.step.backward.open_steps import OpenSteps
from shardwright_testing.simulated import run_simulated


class Loop:
    """One rank's calls; it counts the meetings."""

    def __init__(self, env: ShardingEnv) -> None:
        env.lockstep.join("bags", 1)
        self.steps, self.places = OpenSteps(env, 0), []
        env.communicator.meet = lambda place, what: self.places.append(place)

    def forward(self) -> bool:
        """A batch; returns whether the ranks met at its beginning."""
        before = len(self.places)
        self.steps.begin()
        self.steps.forward()
        return len(self.places) > before

    def train(self, *, forwards: int = 1) -> list[bool]:
        met = [self.forward() for _ in range(forwards)]
        for _ in range(forwards):
            self.steps.backward()
        return met


@pytest.fixture
def loop() -> Loop:
    return run_simulated(Loop, 2)[0]


def test_loop_of_forward_and_backward_passes_never_meets(loop: Loop) -> None:
    assert not any(any(loop.train()) for _ in range(20))


def test_two_forward_passes_before_their_backward_passes_meet_twice(loop: Loop) -> None:
    assert [loop.train(forwards=2) for _ in range(6)] == [*[[False, True]] * 2, *[[False, False]] * 4]


def test_steps_of_one_and_of_two_forward_passes_in_turn_meet_twice(loop: Loop) -> None:
    met = [any(loop.train(forwards=1 + number % 2)) for number in range(12)]
    assert met == [False, True, False, True, *[False] * 8]


def test_forward_passes_without_backward_passes_meet_ever_more_rarely(loop: Loop) -> None:
    assert [number for number in range(1000) if loop.forward()] == [2**power - 1 for power in range(1, 10)]


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_backward_pass_left_out_after_an_evaluation_is_noticed_from_the_second_step_on(
    loop: Loop, num_steps: int
) -> None:
    for _ in range(100):
        loop.forward()
    for _ in range(num_steps):
        assert not any(loop.train())
    loop.forward()
    assert loop.forward()  # without the backward pass of the one before


def test_meetings_have_places_of_their_own(loop: Loop) -> None:
    for _ in count(1):
        loop.forward()
        if len(loop.places) == 5:
            break
    assert len(set(loop.places)) == 5


def test_one_rank_alone_meets_nobody() -> None:
    (alone,) = run_simulated(Loop, 1)
    assert not any(alone.forward() for _ in range(10))
