"""Guards over loops: how they are turned off, and the events that any plugin can listen to.

What they refuse is tested where loops are: `tests/distributed/test_loops.py`, `tests/plugins/training`; what they cost,
in `tests/distributed/test_guards.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from tests.plugins.parts.brought import bringing
from tests.plugins.training.test_updates_in_step import alone, backward, micro_passes

from shardwright import UnsupportedError
from shardwright.contracts import StepListener, TrainedCollection
from shardwright.host import PluginHost, use_host


@contextmanager
def installed(**kwargs: Any) -> Iterator[None]:
    with use_host(PluginHost(**kwargs)):
        yield


@pytest.mark.parametrize("is_on", [True, False])
def test_guards_are_off_by_one_setting(is_on: bool) -> None:
    with installed(environment={} if is_on else {"SHARDWRIGHT_PLUGINS": "-builtin_guards"}):
        case, model = alone("in_backward")
    micro_passes(case, model)
    if not is_on:
        model.fused_optimizer.step()
        return
    with pytest.raises(UnsupportedError, match="2 passes were made"):
        model.fused_optimizer.step()


class Recorder(StepListener):
    """A plugin's own listener."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, TrainedCollection]] = []

    def updates(self, collection: TrainedCollection, forward: Any) -> None:
        self.heard.append(("updates", collection))

    def steps(self, collection: TrainedCollection) -> None:
        self.heard.append((f"steps, kept: {collection.has_gradients()}", collection))

    def drops(self, collection: TrainedCollection) -> None:
        self.heard.append(("drops", collection))


def test_listener_of_any_plugin_hears_the_events_of_steps() -> None:
    recorder = Recorder()
    with installed(plugins={"recording": bringing("step:recording", lambda: recorder)}):
        case, model = alone("in_step")
    model.fused_optimizer.zero_grad()
    backward(case, model, 0, 0)
    model.fused_optimizer.step()
    model.fused_optimizer.zero_grad()
    assert [event for event, _ in recorder.heard] == [
        "drops",
        "updates",
        "steps, kept: True",
        "drops",
    ]
    assert {collection for _, collection in recorder.heard} == {recorder.heard[0][1]}
