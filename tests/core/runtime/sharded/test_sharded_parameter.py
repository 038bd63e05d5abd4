"""The parameters of sharded tables are to optimizers, copies and files what other parameters are."""

from __future__ import annotations

import copy
import io
from importlib import import_module

import pytest
import torch
from torch import nn

from shardwright import ShardingEnv, UnsupportedError
from shardwright.contracts import TrainedCollection
from shardwright.runtime.sharded.tables.shard_gradients import Part
from shardwright.runtime.sharded.tables.sharded_parameter import ShardedParameter, watch_steps
from shardwright.runtime.step.step_events import StepEvents


def sharded() -> ShardedParameter:
    watch_steps()  # as who shards a module does
    parameter = nn.Parameter(torch.arange(6.0).view(3, 2))
    events = StepEvents(TrainedCollection("", adds_up=True, updated_in_step=(), has_gradients=bool))
    return ShardedParameter.of(parameter, Part("'t'", ShardingEnv.local(device_type="cpu"), events))


def test_optimizer_takes_its_fast_form_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    optimizers = import_module("torch.optim.optimizer")  # which torch.optim hides
    monkeypatch.setattr(optimizers, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])
    chosen = optimizers._default_to_fused_or_foreach
    assert chosen([sharded(), nn.Parameter(torch.ones(2))], differentiable=False) == (False, True)


@pytest.mark.parametrize("form", [{"foreach": True}, {"fused": True}])
def test_fast_forms_of_optimizers_train_it(form: dict[str, bool]) -> None:
    results = []
    for parameter in (sharded(), nn.Parameter(torch.arange(6.0).view(3, 2))):
        parameter.square().sum().backward()
        torch.optim.Adam([parameter], lr=0.1, **form).step()
        results.append(parameter.detach())
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_copy_can_be_clipped_as_any_tensor() -> None:
    original = sharded()
    original.square().sum().backward()
    with pytest.raises(UnsupportedError, match=r"sum\(\).* of the gradient of table 't'"):
        original.grad.sum(0)
    copied = copy.deepcopy(original)
    copied.square().sum().backward()
    torch.testing.assert_close(copied.grad.sum(0), 2 * copied.detach().sum(0))
    assert float(nn.utils.clip_grad_norm_([copied], 1.0)) == pytest.approx(2 * 55**0.5)


def test_saved_one_is_read_by_who_does_not_have_this_library() -> None:
    file = io.BytesIO()
    torch.save(nn.ParameterDict({"t": sharded()}).state_dict(), file)
    file.seek(0)
    read = torch.load(file, weights_only=True)["t"]
    assert type(read) in (torch.Tensor, nn.Parameter)
    torch.testing.assert_close(read, sharded().detach())
