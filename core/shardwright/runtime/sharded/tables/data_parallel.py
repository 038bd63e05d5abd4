"""``DistributedDataParallel`` around sharded tables, whoever makes it: this library, a user, Accelerate or Lightning.

Left to itself it would copy rank 0's blocks of tables over those of the other ranks. So torch tells, by a hook on the
registration of modules, when one takes a module in. Parameters and buffers of sharded tables in it are taken off its
lists then, and plugins hear of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import chain
from typing import Any

from attrs import field, frozen
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from shardwright.errors import InvalidInputError
from shardwright.runtime.sharded.tables.sharded_table import ShardedTable
from shardwright.runtime.step.step_events import step_listeners


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
    own = _sharded_tensors(module)
    dense = [parameter for parameter in parent._module_parameters if id(parameter) not in own]
    # Both lists were made before the module was taken in, and are not looked at again before that is done.
    parent.parameters_to_ignore |= _sharded_names(module)
    parent._module_parameters = dense
    for listener in step_listeners():
        listener.has_dense_part(parent, module, dense)


@frozen
class DefaultDataParallelWrapper:
    """Options of the ``DistributedDataParallel`` that averages gradients of a model's dense part.

    Args:
        bucket_cap_mb: size of its buckets of gradients, MiB; by default torch's 25, the first bucket 1.
        static_graph: every step uses the same parameters, in the same order.
        find_unused_parameters: a step may use only some of the parameters, other ones on each rank.
        ddp_kwargs: further keyword arguments of ``DistributedDataParallel``; they go before the others.

    Raises:
        InvalidInputError: ``ddp_kwargs`` has what the model itself says: module, device or process group.

    Example:
        >>> import shardwright as sw
        >>> sw.DefaultDataParallelWrapper(find_unused_parameters=True, ddp_kwargs={"bucket_cap_mb": 1}).options()
        {'static_graph': False, 'find_unused_parameters': True, 'bucket_cap_mb': 1}
    """

    bucket_cap_mb: float | None = None
    static_graph: bool = False
    find_unused_parameters: bool = False
    ddp_kwargs: Mapping[str, Any] = field(factory=dict)

    @ddp_kwargs.validator
    def _are_free(self, attribute: Any, value: Any) -> None:
        taken = sorted(
            {"module", "device_ids", "output_device", "process_group", "device_mesh", "init_sync"}
            & set(value)
        )
        if taken:
            raise InvalidInputError(
                f"ddp_kwargs has {', '.join(map(repr, taken))}, which follow from the model, its env and device: leave "
                "them out"
            )

    def options(self) -> dict[str, Any]:
        """Keyword arguments of ``DistributedDataParallel``."""
        own = {"static_graph": self.static_graph, "find_unused_parameters": self.find_unused_parameters}
        # Given as a number, it would be the first bucket's size, too.
        buckets = {} if self.bucket_cap_mb is None else {"bucket_cap_mb": self.bucket_cap_mb}
        return {**own, **buckets, **self.ddp_kwargs}
