"""``DistributedDataParallel`` around sharded tables, whoever makes it: this library, a user, Accelerate or Lightning.

Left to itself it would copy rank 0's blocks of tables over those of the other ranks. So torch tells, by a hook on the
registration of modules, when one takes a module in, and where that has sharded tables:

1. their parameters and buffers are taken off its lists;
2. it is refused what it cannot do right: a second average of gradients, optimizers that run before the average;
3. plugins hear of it, such as guards over what it does not average.
"""

from __future__ import annotations

from functools import cache
from itertools import chain
from weakref import WeakKeyDictionary, ref

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from shardwright.errors import UnsupportedError
from shardwright.optim.optimizers import in_backward_optimizers
from shardwright.runtime.sharded.tables.sharded_table import ShardedTable
from shardwright.runtime.step.step_events import step_listeners

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
    for listener in step_listeners():
        listener.has_dense_part(parent, module, dense)


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
