"""``DistributedDataParallel`` around sharded tables, whoever makes it: this library, a user, Accelerate or Lightning.

Left to itself it would copy rank 0's blocks of tables over those of the other ranks. So torch tells, by a hook on the
registration of modules, when one takes a module in, and where that has sharded tables:

1. their parameters and buffers are taken off its lists;
2. it is refused what it cannot do right: a second average of gradients, optimizers that run before the average;
3. its dense parameters are watched in each step: it averages only gradients of the parameters that it was made with,
   and only in the first backward pass after a forward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from itertools import chain
from typing import Any, final
from weakref import WeakKeyDictionary, finalize, ref

import torch
from attrs import frozen
from torch import Tensor, nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from shardwright.error_reports import reporting_errors
from shardwright.errors import InvalidInputError, UnsupportedError
from shardwright.optim.optimizers import in_backward_optimizers
from shardwright.runtime.sharded.tables.sharded_table import ShardedTable
from shardwright.runtime.step.compiling import untraced

_TAKEN_IN: WeakKeyDictionary[nn.Module, ref[DistributedDataParallel]] = WeakKeyDictionary()
"""The modules with sharded tables whose dense gradients are averaged, and by whom."""


@cache
def watch_data_parallel() -> None:
    """Prepare every ``DistributedDataParallel`` that is made around sharded tables from now on."""
    register_module_module_registration_hook(_see_to)


def leave_out_tables(module: nn.Module) -> set[str]:
    """Have ``DistributedDataParallel`` leave sharded tables out of what it looks at before it takes ``module`` in.

    Returns:
        The names of the parameters and buffers of sharded tables in ``module``.
    """
    names = _sharded_names(module)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, sorted(names))
    return names


def _sharded_names(module: nn.Module) -> set[str]:
    """The names that ``DistributedDataParallel`` would have for the parameters and buffers of sharded tables."""
    own = _sharded_tensors(module)
    named = [*module.named_parameters(), *module.named_buffers()]
    # It asks each module for its own ones, too: where named_parameters() is overridden, by other names.
    named += [
        (f"{path}.{name}", tensor)
        for path, child in module.named_modules()
        for name, tensor in chain(child.named_parameters(recurse=False), child.named_buffers(recurse=False))
    ]
    return {name for name, tensor in named if id(tensor) in own}


def _sharded_tensors(module: nn.Module) -> set[int]:
    """The parameters and buffers of sharded tables, each by its ``id``."""
    tables = [child for child in module.modules() if isinstance(child, ShardedTable)]
    return {id(tensor) for table in tables for tensor in chain(table.parameters(), table.buffers())}


def _see_to(parent: nn.Module, name: str, module: nn.Module | None) -> None:
    """Prepare ``parent`` for sharded tables; torch calls this when ``module`` is put into it under a name."""
    if not isinstance(parent, DistributedDataParallel) or name != "module" or module is None:
        return
    if not any(isinstance(child, ShardedTable) for child in module.modules()):
        return
    _refuse_second_average(module)
    own = _sharded_tensors(module)
    dense = [parameter for parameter in parent._module_parameters if id(parameter) not in own]
    _check_dense(dense)
    # Both lists were made before the module was taken in, and are not looked at again before that is done.
    parent.parameters_to_ignore |= _sharded_names(module)
    parent._module_parameters = dense
    _TAKEN_IN[module] = ref(parent)
    if torch.distributed.get_world_size(parent.process_group) > 1:
        _watch(parent, module, dense)


def _refuse_second_average(module: nn.Module) -> None:
    """Check that nobody averages dense gradients of ``module`` already.

    Raises:
        UnsupportedError: somebody does.
    """
    for child in module.modules():
        averaged_by = _TAKEN_IN.get(child, lambda: None)()
        if averaged_by is not None or isinstance(child, DistributedDataParallel):
            raise UnsupportedError(
                "the gradients of this model's dense parameters are averaged over the ranks already (by "
                f"{type(averaged_by or child).__name__}); DistributedDataParallel around it would do so twice, in each "
                "other's buffers. Do not wrap it (leave it out of Accelerate's prepare()); or build it with "
                "DistributedModelParallel(..., init_data_parallel=False), which leaves the average to the wrapper."
            )


def _check_dense(dense: list[nn.Parameter]) -> None:
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


@frozen(eq=False)
class _Member:
    """A dense parameter, and where it stood when its model was wrapped."""

    owner: dict[str, nn.Parameter | None]
    name: str
    path: str
    parameter: nn.Parameter
    required_gradients: bool

    def check(self) -> None:
        """Check that it is still there, and as it was.

        Raises:
            InvalidInputError: another parameter has its place, or it begins to be trained.
        """
        if self.owner.get(self.name) is not self.parameter:
            raise InvalidInputError(
                f"parameter {self.path!r} was replaced after the model was wrapped (by load_state_dict(assign=True), "
                "or by hand): gradients of the new one would not be averaged over the ranks. Copy values into the old "
                "one (assign=False), or build the model with DistributedModelParallel(init_data_parallel=False) and "
                "call init_data_parallel() after the change"
            )
        if self.parameter.requires_grad and not self.required_gradients:
            raise InvalidInputError(
                f"parameter {self.path!r} was frozen when the model was wrapped, and requires gradients now, which "
                "would not be averaged over the ranks: unfreeze it before, as by DistributedModelParallel(..., "
                "init_data_parallel=False) and a later init_data_parallel()"
            )


def _watch(wrapper: DistributedDataParallel, module: nn.Module, dense: list[nn.Parameter]) -> None:
    own = {id(parameter) for parameter in dense}
    members = [
        _Member(child._parameters, name, f"{path}.{name}".lstrip("."), parameter, parameter.requires_grad)
        for path, child in module.named_modules()
        for name, parameter in child._parameters.items()
        if parameter is not None and id(parameter) in own
    ]
    passes = _Passes([parameter for parameter in dense if parameter.requires_grad])
    wrapper.register_forward_pre_hook(partial(_before_forward, passes, members))
    finalize(wrapper, passes.forget)


@untraced
def _before_forward(
    passes: _Passes, members: list[_Member], wrapper: DistributedDataParallel, inputs: Any
) -> None:
    if not torch.is_grad_enabled():
        return
    with reporting_errors():  # if one rank alone did that, the others will wait for it
        for member in members:
            member.check()
    passes.expect(is_averaged=wrapper.require_backward_grad_sync)


@final
class _Passes:
    """A check that ``DistributedDataParallel`` averages each backward pass: it does so once after each forward pass.

    Args:
        parameters: parameters that it averages; each gets a hook, which costs about a microsecond a step.
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

        @untraced
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
