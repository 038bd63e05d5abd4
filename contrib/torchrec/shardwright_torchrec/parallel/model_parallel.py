"""`DistributedModelParallel` of TorchRec's scripts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

import shardwright as sw
from shardwright_plugins.sharding_groups import DMPCollection
from shardwright_torchrec.modules.managed_collisions.joined import join_maps
from shardwright_torchrec.parallel.kernel_names import own_plan
from shardwright_torchrec.parallel.sharded_state import blocks_of, is_whole, sharded_tables
from shardwright_torchrec.parallel.sharders import get_default_sharders
from shardwright_torchrec.planner.planners import EmbeddingShardingPlanner

__all__ = [
    "DMPCollection",
    "DistributedModelParallel",
    "get_unwrapped_module",
]


def get_unwrapped_module(module: nn.Module) -> nn.Module:
    """A model without the wrappers around it."""
    while isinstance(module, sw.DistributedModelParallel | nn.parallel.DistributedDataParallel):
        module = module.module
    return module


class _WholeStates(sw.CombinedOptimizer):
    """The optimizers of the tables; their state dict has whole tensors, as tools beside torch take them."""

    def state_dict(self) -> dict[str, Any]:
        """The whole states; every rank makes this call."""
        return sw.CombinedOptimizer(self.optimizers).full_state_dict()


class DistributedModelParallel(sw.DistributedModelParallel):
    """A model whose embedding collections are sharded; state dicts are local, as TorchRec's are.

    Args:
        module: the model; changed in place.
        env: the ranks; the world's process group by default.
        device: this rank's device.
        plan: sharding plan of the model; made collectively by default.
        sharders: one for each class of collections; TorchRec's two by default.
        init_data_parallel: wrap what is not sharded now; else `init_data_parallel()` does.
        init_parameters: not needed: what is on `meta` is initialised in any case.
        data_parallel_wrapper: a `DefaultDataParallelWrapper`, options of the wrapper of what is not sharded.
        model_tracker_configs: not supported.

    Raises:
        UnsupportedError: another wrapper, or a tracker, is given.
    """

    def __init__(
        self,
        module: nn.Module,
        env: sw.ShardingEnv | None = None,
        device: torch.device | str | None = None,
        plan: sw.ShardingPlan | None = None,
        sharders: Sequence[sw.ModuleSharder] | None = None,
        init_data_parallel: bool = True,
        init_parameters: bool = True,
        data_parallel_wrapper: sw.DefaultDataParallelWrapper | None = None,
        model_tracker_configs: Any = None,
    ) -> None:
        if data_parallel_wrapper is not None and not isinstance(
            data_parallel_wrapper, sw.DefaultDataParallelWrapper
        ):
            raise sw.UnsupportedError(
                f"data_parallel_wrapper={type(data_parallel_wrapper).__name__}: build with init_data_parallel=False, "
                "and wrap the model yourself: shardwright.DistributedModelParallel may be inside a wrapper"
            )
        if model_tracker_configs is not None:
            raise sw.UnsupportedError(
                "model_tracker_configs is not supported: compare state_dict()s of two steps"
            )
        sharders = get_default_sharders() if sharders is None else sharders
        if plan is None:
            plan = EmbeddingShardingPlanner(debug=False).collective_plan(module, sharders, env=env)
        super().__init__(
            module,
            env,
            device,
            plan,
            sharders,
            init_data_parallel,
            data_parallel_wrapper=data_parallel_wrapper,
        )
        self.fused_optimizer = _WholeStates(self.fused_optimizer.optimizers)
        join_maps(self.module, self.env.process_group)

    @property
    def _plan(self) -> sw.ShardingPlan:
        """The plan, by the name at which TorchRec keeps it: scripts print it from there (`--print_sharding_plan`)."""
        return self.plan

    def reshard(self, plan: sw.ShardingPlan, *optimizers: Any, **limits: Any) -> Any:
        """See `shardwright.DistributedModelParallel.reshard`; the plan may say TorchRec's names of compute kernels."""
        return super().reshard(own_plan(plan), *optimizers, **limits)

    def bare_named_parameters(
        self, prefix: str = "", recurse: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Names and parameters of what is not sharded."""
        planned = [self.module.get_submodule(path) for path in self.plan.plan]
        tables = {id(parameter) for module in planned for parameter in module.parameters()}
        for name, parameter in self.named_parameters(prefix, recurse):
            if id(parameter) not in tables:
                yield name, parameter

    def sparse_grad_parameter_names(
        self, destination: list[str] | None = None, prefix: str = ""
    ) -> list[str]:
        """Names of parameters with sparse gradients: none; tables' gradients are applied by kernels, or dense."""
        return [] if destination is None else destination

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state dict with this rank's shards of tables; no collective, so one rank may call it alone.

        Tables are `torch.distributed._shard.sharded_tensor.ShardedTensor`s, replicated ones and those of a model on
        one process alone plain tensors; storage is shared. `unshard()` and `sw.save_checkpoint` give whole tables.
        """
        state = super().state_dict(*args, **kwargs)
        prefix, is_distributed = kwargs.get("prefix", ""), self.env.process_group is not None
        for table in sharded_tables(self.module, self.plan, blocks_of(self.module)):
            if prefix + table.key in state:
                state[prefix + table.key] = table.state(is_distributed=is_distributed)
        return state

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False, prefix: str = ""
    ) -> Any:
        """Take over a state dict: this rank's shards, as `state_dict()` gives them, or whole tables.

        Args:
            state_dict: the state dict.
            strict: all of the model's keys must be there, and no others.
            assign: as of `torch.nn.Module.load_state_dict`.
            prefix: what the keys of this model begin with, as `state_dict(prefix=...)` gives them; others are left out.

        Raises:
            InvalidInputError: shards are not those of this model, or a shape differs.
        """
        if prefix:
            state_dict = {
                key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)
            }
        blocks = blocks_of(self.module)
        if is_whole(state_dict, blocks):
            return super().load_state_dict(state_dict, strict, assign)
        taken = dict(state_dict)
        for table in sharded_tables(self.module, self.plan, blocks):
            if table.key in taken:
                table.take(taken[table.key])
                taken[table.key] = table.blocks
        return super().load_state_dict(taken, strict, assign)
