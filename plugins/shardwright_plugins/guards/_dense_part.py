"""Guard over the dense part: what ``DistributedDataParallel`` does not average would differ from rank to rank.

It averages only gradients of the parameters that it was made with, and only in the first backward pass after a forward
pass. What drifts all the same is found by value.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn, final
from weakref import WeakKeyDictionary, finalize, ref

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardwright.error_reports import reporting_errors
from shardwright.errors import InvalidInputError, UnsupportedError
from shardwright.optim.optimizers import in_backward_optimizers
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.step.compiling import untraced
from shardwright_plugins.guards._replicas import LoadedReplicas, Replicas

_MOST_HOOKS = 6
"""Parameters whose gradients are watched, the first and last among them: a hook is some calls of Python a step."""


class Wrappers:
    """The modules with sharded tables whose dense gradients are averaged, and by whom."""

    def __init__(self) -> None:
        self._by_module: WeakKeyDictionary[nn.Module, ref[DistributedDataParallel]] = WeakKeyDictionary()

    def take_in(
        self, wrapper: DistributedDataParallel, module: nn.Module, dense: Sequence[nn.Parameter]
    ) -> None:
        """Note a wrapper that is being made around a module.

        Raises:
            UnsupportedError: another averages the same gradients; there are none; or parameters are updated before.
        """
        for child in module.modules():
            averaged_by = self._by_module.get(child, lambda: None)()
            if averaged_by is not None or isinstance(child, DistributedDataParallel):
                raise UnsupportedError(
                    "the gradients of this model's dense parameters are averaged over the ranks already (by "
                    f"{type(averaged_by or child).__name__}); DistributedDataParallel around it would do so twice, in "
                    "each other's buffers. Do not wrap it (leave it out of Accelerate's prepare()); or build it with "
                    "DistributedModelParallel(..., init_data_parallel=False), which leaves the average to the wrapper."
                )
        _check_dense(dense)
        self._by_module[module] = ref(wrapper)

    def averages(self, model: nn.Module) -> bool:
        """Tell if a model, or a module in it or around it, is averaged by some wrapper."""
        inside = {id(child) for child in model.modules()}
        return any(
            wrapper() is not None
            and (id(module) in inside or any(child is model for child in module.modules()))
            for module, wrapper in list(self._by_module.items())
        )


def _check_dense(dense: Sequence[nn.Parameter]) -> None:
    """Check that there are dense parameters to average, and that none is updated before that.

    Raises:
        UnsupportedError: there are none, or one is.
    """
    if not any(parameter.requires_grad for parameter in dense):
        raise UnsupportedError(
            "DistributedDataParallel has nothing to do around this model: all parameters that require gradients are "
            "of sharded tables, which are in step on all ranks by themselves. Do not wrap it."
        )
    early = [parameter for parameter in dense if in_backward_optimizers(parameter)]
    if early:
        raise UnsupportedError(
            f"{len(early)} dense parameters, the first of shape {list(early[0].shape)}, have optimizers in their "
            "backward pass, which would step before gradients are averaged over the ranks: apply these to "
            "parameters of tables only, and give the dense ones to an ordinary optimizer"
        )


def watch_dense_part(
    wrapper: DistributedDataParallel,
    module: nn.Module,
    dense: Sequence[nn.Parameter],
    env: ShardingEnv,
) -> None:
    """Watch the dense parameters of a module from now on.

    Args:
        wrapper: wrapper that averages their gradients.
        module: module that it takes in.
        dense: parameters that it averages.
        env: the ranks.
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
    replicas = Replicas(
        env,
        lambda: [(own.path, own.parameter) for own in members if own.parameter.requires_grad],
        partial(_check_average, ref(wrapper)),
    )
    wrapper.register_forward_pre_hook(partial(_before_forward, passes, members, replicas))
    module.register_load_state_dict_pre_hook(LoadedReplicas(env, lambda _: [own.path for own in members]))
    finalize(wrapper, passes.forget)


def _check_average(reference: ref[DistributedDataParallel]) -> None:
    """Check that torch has averaged the gradients of the last backward pass.

    Raises:
        RuntimeError: a parameter got none, so that the average of its bucket is waited for; in torch's words.
    """
    if (wrapper := reference()) is not None:
        wrapper.reducer._rebuild_buckets()  # the first thing that torch does in a forward pass


@untraced
def _before_forward(
    passes: _Passes,
    members: Sequence[_Member],
    replicas: Replicas,
    wrapper: DistributedDataParallel,
    inputs: Any,
) -> None:
    if not torch.is_grad_enabled():
        return
    # It waits for the gradients of all others, unless it looks for those that get none.
    may_freeze = wrapper.find_unused_parameters or not wrapper.require_backward_grad_sync
    for own in members:
        is_there = own.owner.get(own.name) is own.parameter
        if not is_there or (
            own.parameter.requires_grad is not own.required_gradients
            and not (own.required_gradients and may_freeze)
        ):
            with reporting_errors():  # if one rank alone did that, the others will wait for it
                own.refuse()
    replicas.begin_pass()
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
            InvalidInputError: always: another parameter has its place, or it begins or ends to be trained.
        """
        if self.owner.get(self.name) is not self.parameter:
            raise InvalidInputError(
                f"parameter {self.path!r} was replaced after the model was wrapped (by load_state_dict(assign=True), "
                "or by hand): gradients of the new one would not be averaged over the ranks. Copy values into the old "
                "one (assign=False), or build the model with DistributedModelParallel(init_data_parallel=False) and "
                "call init_data_parallel() after the change"
            )
        if self.required_gradients:
            raise InvalidInputError(
                f"parameter {self.path!r} was frozen (requires_grad_(False)) after the model was wrapped, and "
                "DistributedDataParallel would wait for its gradient: set the learning rate of its group to 0 instead; "
                "or wrap the model with find_unused_parameters=True "
                "(data_parallel_wrapper=DefaultDataParallelWrapper(find_unused_parameters=True))"
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
