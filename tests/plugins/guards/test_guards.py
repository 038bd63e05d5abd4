"""Guards over loops: events that any plugin can hear, warnings, and optimizers over tables that are cut over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from tests.equality import Case
from tests.plugins.parts.brought import bringing
from tests.plugins.training.test_equality import tables_of
from tests.plugins.training.test_updates_in_step import (
    SIZES,
    STEPS,
    TOLERANCE,
    OneProcess,
    alone,
    backward,
    micro_passes,
    shard,
)
from torch import optim
from torch.nn import Parameter

import shardwright as sw
from shardwright import ShardingEnv, UnsupportedError
from shardwright.contracts import StepListener, TrainedCollection
from shardwright.host import PluginHost, use_host
from shardwright_plugins.guards._restarts import warn_of_restarts
from shardwright_testing.simulated import run_simulated


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


Make = Callable[[Sequence[Parameter]], optim.Optimizer]


class Lamb(optim.Optimizer):
    """Steps as long as the weights are, as LAMB makes them (https://arxiv.org/abs/1904.00962), without moments."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        self.num_steps = 0
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.num_steps += 1
        for group in self.param_groups:
            for own in group["params"]:
                if own.grad is not None:
                    ratio = own.data.norm() / own.grad.norm().clamp(min=1e-12)
                    own.add_(own.grad * ratio, alpha=-group["lr"])


BY_ELEMENT: dict[str, Make] = {
    "sgd": lambda own: optim.SGD(own, 0.1, momentum=0.9, weight_decay=0.01),
    "sgd, foreach": lambda own: optim.SGD(own, 0.1, foreach=True),
    "adam": lambda own: optim.Adam(own, 0.1, amsgrad=True),
    "adamw, fused": lambda own: optim.AdamW(own, 0.1, fused=True),
    "adagrad": lambda own: optim.Adagrad(own, 0.1),
    "adadelta": lambda own: optim.Adadelta(own),
    "rmsprop": lambda own: optim.RMSprop(own, 0.1, centered=True),
    "nadam": lambda own: optim.NAdam(own, 0.1),
    "radam": lambda own: optim.RAdam(own, 0.1),
    "rprop": lambda own: optim.Rprop(own, 0.1),
    "asgd": lambda own: optim.ASGD(own, 0.1),
}
OVER_ALL: dict[str, Make] = {
    "lamb": Lamb,
    "adafactor": lambda own: optim.Adafactor(own, 0.1),
    "muon": lambda own: optim.Muon(own, 0.1),
}
WARMING_UP: dict[str, Make] = {  # a difference of their steps is below what weights round to
    "lamb": lambda own: Lamb(own, 1e-7),
    "adafactor": lambda own: optim.Adafactor(own, 1e-7),
    "muon": lambda own: optim.Muon(own, 1e-7),
}


def train(sharding_type: str, make: Make) -> tuple[OneProcess, list[Any]]:
    """Train tables with an optimizer in one process, and on simulated ranks: each one's weights, or its error."""
    case = Case(tables_of(sharding_type, "dense"), SIZES, "sgd")
    module = case.module_to_shard()

    def run(env: ShardingEnv) -> Any:
        model = shard(case, env, module)
        optimizer = make(list(model.parameters()))
        try:
            for number in range(STEPS):
                optimizer.zero_grad()
                backward(case, model, number, env.rank)
                optimizer.step()
        except UnsupportedError as error:
            return str(error)
        return model.full_state_dict()

    one = OneProcess(case)
    one.optimizer = make(list(one.module.parameters()))
    for number in range(STEPS):
        one.gradients(number)
        one.optimizer.step()
    return one, run_simulated(run, case.world_size)


@pytest.mark.parametrize("sharding_type", ["row_wise", "column_wise"])
@pytest.mark.parametrize("name", BY_ELEMENT)
def test_optimizer_that_works_on_each_element_trains_parts_as_one_process(
    name: str, sharding_type: str
) -> None:
    one, results = train(sharding_type, BY_ELEMENT[name])
    for weights in results:
        torch.testing.assert_close(weights, dict(one.module.state_dict()), **TOLERANCE)


@pytest.mark.parametrize(("sharding_type", "cut"), [("row_wise", "rows"), ("column_wise", "columns")])
@pytest.mark.parametrize("makes", [OVER_ALL, WARMING_UP], ids=["", "warming up"])
@pytest.mark.parametrize("name", OVER_ALL)
def test_optimizer_that_takes_norms_is_refused_by_name_for_parts_on_all_ranks(
    name: str, makes: dict[str, Make], sharding_type: str, cut: str
) -> None:
    _, texts = train(sharding_type, makes[name])
    assert len(set(texts)) == 1
    assert texts[0].lower().startswith(f"{name} is given table 't0' (")
    assert f"cut by {cut}" in texts[0]


TABLE = sw.EmbeddingBagConfig(100, 8, "item", feature_names=["item"])


def build(env: sw.ShardingEnv) -> None:
    sw.DistributedModelParallel(sw.EmbeddingBagCollection([TABLE], device="meta"), env=env)


@pytest.mark.parametrize(
    ("restarts", "shares", "num_warnings"),
    [("3", "True", 1), ("3", "False", 0), ("0", "True", 0), (None, None, 0)],
)
def test_restarts_through_a_store_that_attempts_share_are_warned_of_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    restarts: str | None,
    shares: str | None,
    num_warnings: int,
) -> None:
    for name, value in (("TORCHELASTIC_MAX_RESTARTS", restarts), ("TORCHELASTIC_USE_AGENT_STORE", shares)):
        if value is None:
            monkeypatch.delenv(name, raising=False)
        else:
            monkeypatch.setenv(name, value)
    warn_of_restarts.cache_clear()
    for _ in range(2):
        run_simulated(build, 2)
    assert [record.args for record in caplog.records] == [(restarts,)] * num_warnings
