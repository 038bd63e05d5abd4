"""Guard over the dense part: what ``DistributedDataParallel`` does not average would differ from rank to rank.

It averages only gradients of the parameters that it was made with, and only in the first backward pass after a forward
pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, final
from weakref import finalize, ref

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardwright.error_reports import reporting_errors
from shardwright.errors import InvalidInputError, UnsupportedError
from shardwright.runtime.step.compiling import untraced

_MOST_HOOKS = 6
"""Parameters whose gradients are watched, the first and last among them: a hook is some calls of Python a step."""


def watch_dense_part(
    wrapper: DistributedDataParallel, module: nn.Module, dense: Sequence[nn.Parameter]
) -> None:
    """Watch the dense parameters of a module from now on.

    Args:
        wrapper: wrapper that averages their gradients.
        module: module that it takes in.
        dense: parameters that it averages.
    """
    own = {id(parameter) for parameter in dense}
    members = [
        _Member(child._parameters, name, f"{path}.{name}".lstrip("."), parameter, parameter.requires_grad)
        for path, child in module.named_modules()
        for name, parameter in child._parameters.items()
        if parameter is not None and id(parameter) in own
    ]
    trained = [parameter for parameter in dense if parameter.requires_grad]
    places = torch.linspace(0, len(trained) - 1, min(len(trained), _MOST_HOOKS)).round().int().tolist()
    passes = _Passes([trained[place] for place in places])
    wrapper.register_forward_pre_hook(partial(_before_forward, passes, members))
    finalize(wrapper, passes.forget)


@untraced
def _before_forward(
    passes: _Passes, members: Sequence[_Member], wrapper: DistributedDataParallel, inputs: Any
) -> None:
    if not torch.is_grad_enabled():
        return
    for own in members:
        is_there = own.owner.get(own.name) is own.parameter
        if not is_there or (own.parameter.requires_grad and not own.required_gradients):
            with reporting_errors():  # if one rank alone did that, the others will wait for it
                own.refuse()
    passes.expect(is_averaged=wrapper.require_backward_grad_sync)


@frozen(eq=False)
class _Member:
    """A dense parameter, and where it stood when its model was wrapped."""

    owner: dict[str, nn.Parameter | None]
    name: str
    path: str
    parameter: nn.Parameter
    required_gradients: bool

    def refuse(self) -> NoReturn:
        """Refuse what was changed.

        Raises:
            InvalidInputError: always: another parameter has its place, or it begins to be trained.
        """
        if self.owner.get(self.name) is not self.parameter:
            raise InvalidInputError(
                f"parameter {self.path!r} was replaced after the model was wrapped (by load_state_dict(assign=True), "
                "or by hand): gradients of the new one would not be averaged over the ranks. Copy values into the old "
                "one (assign=False), or build the model with DistributedModelParallel(init_data_parallel=False) and "
                "call init_data_parallel() after the change"
            )
        raise InvalidInputError(
            f"parameter {self.path!r} was frozen when the model was wrapped, and requires gradients now, which "
            "would not be averaged over the ranks: unfreeze it before, as by DistributedModelParallel(..., "
            "init_data_parallel=False) and a later init_data_parallel()"
        )


@final
class _Passes:
    """A check that ``DistributedDataParallel`` averages each backward pass: it does so once after each forward pass.

    Args:
        parameters: parameters that it averages; each gets a hook.
    """

    # What hooks of tensors hold is not seen by the garbage collector: no module, and no parameter.

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self._everything = range(len(parameters))
        self._expected: set[int] | None = set()
        self._pass = -1
        self._handles = [
            parameter.register_hook(self._check_of(index, ref(parameter)))
            for index, parameter in enumerate(parameters)
        ]

    def expect(self, *, is_averaged: bool) -> None:
        """A forward pass is made; a backward pass of it is averaged, or is not to be."""
        self._expected = set(self._everything) if is_averaged else None

    def forget(self) -> None:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()

    def _check_of(self, index: int, reference: ref[nn.Parameter]) -> Callable[[Tensor], None]:
        current_pass = torch._C._current_graph_task_id

        def check(gradient: Tensor) -> None:
            if (now := current_pass()) != self._pass:
                self._pass = now
                _refuse_partial_pass(reference())
            if self._expected is None:
                return
            if index not in self._expected:
                raise UnsupportedError(_SECOND_PASS)
            self._expected.remove(index)

        return check


_SECOND_PASS = (
    "a backward pass came to dense parameters once more since the last forward pass of the wrapped model: their "
    "gradients are averaged over the ranks only the first time, and would differ from rank to rank. Make each "
    "backward pass before the next forward pass, or one for all: (loss_1 + loss_2).backward(). And call the wrapped "
    "model itself, not its .module."
)


def _refuse_partial_pass(parameter: nn.Parameter | None) -> None:
    """Check that the gradient under way goes to ``.grad``, where it is averaged over the ranks.

    Raises:
        UnsupportedError: it goes to the caller of ``torch.autograd.grad``.
    """
    assert parameter is not None  # it has just got a gradient
    try:
        torch._C._will_engine_execute_node(torch.autograd.graph.get_gradient_edge(parameter).node)
    except RuntimeError as error:  # torch says that this is autograd.grad by an error alone
        raise UnsupportedError(
            "torch.autograd.grad was asked for gradients of dense parameters: it gives those of this rank's batch, not "
            "averaged over the ranks, and updates no sharded table. Call loss.backward(), and read .grad."
        ) from error
