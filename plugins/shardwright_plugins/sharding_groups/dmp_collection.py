"""``DMPCollection``: tables sharded inside groups of ranks, and replicated over the groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast
from weakref import WeakMethod

import torch
from torch import nn

from shardwright.arguments import PositiveInt, check, checked_only, whole
from shardwright.contracts.comm_backend import CommBackend
from shardwright.errors import InvalidInputError, PlanError
from shardwright.planning.plan.plan import ShardingPlan
from shardwright.planning.tables.spec import Update
from shardwright.planning.text import count_text
from shardwright.runtime.sharded.collections.sharded_collection import ShardedCollection
from shardwright.runtime.sharded.collections.sharders import ModuleSharder
from shardwright.runtime.sharded.models.model_parallel import DistributedModelParallel
from shardwright.runtime.sharded.tables.data_parallel import DefaultDataParallelWrapper
from shardwright.runtime.step.compiling import untraced
from shardwright_plugins.sharding_groups.averaging import Averaging
from shardwright_plugins.sharding_groups.environment import ShardingEnv2D


class DMPCollection(DistributedModelParallel):
    """A model whose tables are sharded over groups of ranks, every group with a replica, which are averaged.

    A step's exchanges of ids, results and gradients stay inside a sharding group, and average gradients over its ranks.
    From time to time weights, and the optimizer state that kernels keep, are averaged over the groups: by :meth:`sync`,
    or every ``sync_every`` steps. The dense part is replicated over all ranks, its gradients averaged in each step.

    Averaged after each step, tables trained by plain SGD are those of one step on the mean gradient of all ranks: the
    update is linear in the gradient. Of other optimizers they are the mean of what each group makes of its own
    gradient, and so is the state.

    Args:
        module: the model; changed in place.
        device: this rank's device; the environment's by default.
        plan: sharding plan over the ranks of a sharding group, the same for all groups; made collectively by default.
        world_size: ranks of all groups; to be compared with ``global_pg``, if given.
        sharding_group_size: ranks of a sharding group; ``env`` has one already.
        global_pg: the process group of all ranks; the world by default.
        node_group_size: ranks of a sharding group that count as one host; by default as many as are on one.
        sharders: one for each class of collections in the model; the registered ones by default.
        init_data_parallel: see :class:`DistributedModelParallel`.
        use_inter_host_allreduce: sharding groups are neighbouring ranks, and averaging goes between hosts; else
            replicas are neighbours, and the exchanges of a step may go between hosts.
        sync_every: average before the forward pass that follows so many forward passes with gradients, which is after
            the optimizer's step in any loop or pipeline; ``None``: only :meth:`sync` averages.
        comm_backend: see :class:`DistributedModelParallel`; carries averagings, too.
        env: the groups, where they were made before; instead of ``world_size``, ``sharding_group_size``, ``global_pg``,
            ``node_group_size``, ``use_inter_host_allreduce`` and ``comm_backend``.
        data_parallel_wrapper: see :class:`DistributedModelParallel`.
        update: see :class:`DistributedModelParallel`.
        sync_module_states: see :class:`DistributedModelParallel`; between groups weights are copied in any case.

    Attributes:
        sync_every: see above.

    Raises:
        InvalidInputError: ranks do not divide into such groups; ``sync_every`` is less than 1.
        PlanError: the plan is for another number of ranks than a sharding group has, or for other groups.
        DistributedError: ranks ask for different groups, or for different ``sync_every``.
        UnsupportedError: a table's rows cannot be averaged.

    Example:
        >>> model = DMPCollection(  # doctest: +SKIP
        ...     model, plan=plan, sharding_group_size=8, sync_every=16, use_inter_host_allreduce=True
        ... )
    """

    @checked_only("device", "env")
    def __init__(
        self,
        module: nn.Module,
        device: torch.device | str | None = None,
        plan: ShardingPlan | None = None,
        world_size: int | None = None,
        sharding_group_size: int | None = None,
        global_pg: Any = None,
        *,
        node_group_size: int | None = None,
        sharders: Sequence[ModuleSharder] | None = None,
        init_data_parallel: bool = True,
        use_inter_host_allreduce: bool = False,
        sync_every: int | None = None,
        comm_backend: str | CommBackend | None = None,
        env: ShardingEnv2D | None = None,
        data_parallel_wrapper: DefaultDataParallelWrapper | None = None,
        update: Update | None = None,
        sync_module_states: bool = False,
    ) -> None:
        if env is None:
            if sharding_group_size is None:
                raise InvalidInputError(
                    "sharding_group_size is needed: over how many ranks the tables are sharded; the ranks are as many "
                    "groups with a replica as that goes into them"
                )
            env = ShardingEnv2D.make_groups(
                sharding_group_size,
                global_pg,
                node_group_size=node_group_size,
                use_inter_host_allreduce=use_inter_host_allreduce,
                comm_backend=comm_backend,
            )
        elif any(
            asked is not None for asked in (sharding_group_size, global_pg, node_group_size, comm_backend)
        ):
            raise InvalidInputError(
                "env has its groups already: leave sharding_group_size, global_pg, node_group_size and comm_backend "
                "out, or env"
            )
        with env.everyone.together("sharding the model"):
            sync_every = whole(sync_every)
            check("sync_every", sync_every, PositiveInt | None)
            _check_world(world_size, env)
            # Otherwise some ranks would wait for others that go on.
            env.everyone.agree("averaging", {"sync_every": sync_every}, "Give every rank the same sync_every")
            super().__init__(
                module,
                env,
                device,
                plan,
                sharders,
                init_data_parallel=False,
                data_parallel_wrapper=data_parallel_wrapper,
                update=update,
                sync_module_states=sync_module_states,
            )
            self.sync_every, self._num_since = sync_every, 0
            collections = [own for own in self.sharded_modules.values() if isinstance(own, ShardedCollection)]
            self._averaging = Averaging(env, collections)
            self._averaging.copy_from_first()
        own = WeakMethod(self._sync_if_changed)  # collections must not hold their model
        for collection in collections:
            collection.before_gathering(lambda: call() if (call := own()) else None)
        self.register_forward_pre_hook(lambda model, inputs: model._count_forward())
        if init_data_parallel:
            self.init_data_parallel()

    def check_plan(self, plan: ShardingPlan) -> None:
        """Check that a plan is for one of the sharding groups, as far as its document says.

        Raises:
            PlanError: it is for another number of ranks, or of groups.
        """
        env, topology = cast(ShardingEnv2D, self.env), plan.document.get("topology", {})
        size, planned = env.world_size, topology.get("world_size", env.world_size)
        groups = topology.get("replicas", {}).get("num_groups")
        has_others = groups is not None and (planned, groups) != (size, env.num_sharding_groups)
        if planned != size or has_others:
            others = f" in each of {groups} sharding groups" if groups else ""
            raise PlanError(
                f"the plan is for {count_text(planned, 'rank')}{others}, the model for "
                f"{env.num_sharding_groups} sharding groups of {count_text(size, 'rank')}: plan with "
                f"Topology(world_size={env.everyone.world_size}, ...).sharding_group({size})"
            )

    @untraced
    def sync(self, include_optimizer_state: bool = True) -> None:
        """Average the tables over the sharding groups; every rank makes this call, after the optimizer's step.

        Whether ``sync_every`` is given or not: the next averaging of its own comes so many steps after this one.

        Args:
            include_optimizer_state: average the optimizer state of kernels that run an optimizer, too. That of
                optimizers of your own, of tables whose kernel shows gradients, is not.

        Raises:
            DistributedError: a rank that holds the same shards does not make this call within the time-out, which is
                named; or averages something else, or its group made other calls before.
        """
        self._averaging.average(include_optimizer_state=include_optimizer_state)
        self._num_since = 0

    @untraced
    def _count_forward(self) -> None:
        """Average if that is due, and count the forward pass that begins."""
        if self.sync_every is not None and self._num_since >= self.sync_every:
            self.sync()
        self._num_since += torch.is_grad_enabled()

    def _sync_if_changed(self) -> None:
        """Average if a step was made since the last averaging, so that a state dict is one model; on every rank."""
        if self._num_since:
            self.sync()


def _check_world(world_size: int | None, env: ShardingEnv2D) -> None:
    if world_size is not None and world_size != env.everyone.world_size:
        raise InvalidInputError(
            f"world_size is {world_size}; the process group has {env.everyone.world_size} ranks: leave it out, or give "
            "the process group of all ranks as global_pg"
        )
