"""The planner of models: from a module, its sharders and the ranks to a plan. It imports torch when it is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from shardwright.arguments import checked
from shardwright.errors import PlanningError, UnsupportedError
from shardwright.host.extensions import ask_at, words_at
from shardwright.host.plugin_host import host
from shardwright.planning.machines.host_memory import host_memory_bytes
from shardwright.planning.machines.topology import Topology
from shardwright.planning.plan.plan import ShardingPlan
from shardwright.planning.planner import TablePlanner
from shardwright.planning.text import count_text
from shardwright.planning.watch import Watch

if TYPE_CHECKING:
    from shardwright.contracts.comm_backend import CommBackend
    from shardwright.planning.tables.spec import TableSpec


class EmbeddingShardingPlanner(TablePlanner):
    """The planner of a model's tables: it enumerates options, estimates them, searches for plans and rates them.

    Args:
        topology: ranks and devices to shard over; ``collective_plan`` derives it from the process group if not given.
        batch_size: samples per rank and step; 512 as in TorchRec if not given, and listed as assumed.
        constraints: table name, path or pattern (``"user_*"``) -> constraints of the table. Exact names win, then
            patterns in the order given.
        estimator: the performance estimator, by name or as an object; the preferred one if not given. Naming it changes
            nothing but what times are.
        storage_estimator: the storage estimator, likewise.
        option_space: options of tables whose constraints name no sharding types or kernels: an
            :class:`~shardwright.planning.tables.option_space.OptionSpace`; by default all that is offered.
        proposer: a proposer or several, by name or as objects, in the order they run; the preferred ones if
            not given. As of estimators and partitioners, a name may be followed by arguments,
            ``"name:key=value,key=value"``, which stand in the plan document and hold for what reads it.
        partitioner: the partitioner, by name or as an object; the preferred one if not given.
        storage_reservation: device memory kept free for everything that is not planned (dense layers, activations): a
            fraction of it, from 0 to 1, or a ``StorageReservation``; 0.15 as in TorchRec if not given, and for serving
            also the model's dense tensors and a batch of ids.
        objective: time that plans are rated by: ``"largest_rank_time"`` (as in TorchRec), ``"step_time"``, the sum
            over the phases of each one's slowest rank, or ``"serving"``, the latency of a batch on the slowest rank
            where tables are only looked up: no gradients travel, and no optimizer has state.
        seconds: limit of the search, s; at the limit the best plan so far is returned, with its gap. By default the
            search ends by itself, after a budget of work that takes about ten seconds of one core at most and gives
            the same plan on any machine.
        refinements: steps around the search, the innermost first: functions, or names with arguments as of proposers.
            Plugins offer them as extensions at the point ``refinement``: to stay near a plan, for example.
        listener: function called with a :class:`~shardwright.planning.watch.Progress` whenever the best plan or the
            bound improve.
        progress: show a line on standard error when planning takes longer than a second; by default if that is a
            terminal. Ctrl-C then ends the search with the best plan so far, a second one ends the program.
        debug: log and print the report of each plan. Planning is silent otherwise.

    Example:
        >>> import shardwright as sw
        >>> planner = sw.EmbeddingShardingPlanner(
        ...     topology=sw.Topology(world_size=2, compute_device="cpu"),
        ...     constraints={"user_id": sw.ParameterConstraints(ranks=1)},
        ... )
        >>> plan = planner.plan_tables([sw.TableSpec("user_id", num_embeddings=1000, embedding_dim=64)])
        >>> print(plan)  # doctest: +NORMALIZE_WHITESPACE
        module: ...
          table   | sharding type | compute kernel | ranks
        ...
          user_id | ... | 1
        ...
    """

    @checked
    def plan(self, module: Any, sharders: Sequence[Any] | None = None) -> ShardingPlan:
        """Plan all tables of ``module`` that ``sharders`` can shard, or that are sharded already.

        A plan of tables that are sharded already is for ``model.reshard(plan)``; a refinement may keep it near the
        present one. They keep what they were sharded with: optimizers, codecs, the limits of their sharder.

        Where this machine has an accelerator of the topology's kind, the plan has only kernels that work here. A plan
        for other machines assumes that the kernels' libraries are installed there.

        Args:
            module: the model, on any device (``meta`` will do).
            sharders: module sharders; the registered ones by default.

        Raises:
            PlanningError: no plan fits; the text has the numbers and what would help.
        """
        from shardwright.runtime.ranks.devices import has_accelerator

        topology = self._known_topology()
        here = any(map(has_accelerator, topology.device_types))
        return self._plan_model(topology, module, sharders, self._new_watch(), on_this_machine=here)

    def collective_plan(
        self,
        module: Any,
        sharders: Sequence[Any] | None = None,
        process_group: Any = None,
        *,
        env: Any = None,
        comm_backend: str | CommBackend | None = None,
    ) -> ShardingPlan:
        """Plan on rank 0 and give every rank the same plan, or the same error.

        Every rank of the process group makes this call; in it, every rank

        1. compares its plugins with the others';
        2. on accelerators, where rank 0 has no topology, measures bandwidths by copies and by exchanges with the
           others;
        3. waits while rank 0 plans, as long as that takes, whatever the process group's time-out;
        4. reads the document that rank 0 has written, read back and broadcast.

        Args:
            module: the model, on any device; its tables may be sharded already, as for :meth:`plan`.
            sharders: module sharders; the registered ones by default.
            process_group: the ranks; the world by default.
            env: the ranks, instead of a process group: a ``ShardingEnv``, such as ``ShardingEnv.local()``, or
                that of one of several sharding groups, for which the plan is then made.
            comm_backend: comm backend of the broadcasts, by name or as an object; see ``DistributedModelParallel``.

        Raises:
            PlanningError: no plan fits; on every rank.

        Example:
            >>> import shardwright as sw
            >>> table = sw.EmbeddingBagConfig(
            ...     num_embeddings=1000, embedding_dim=8, name="user_id", feature_names=["user"]
            ... )
            >>> bags = sw.EmbeddingBagCollection([table], device="meta")
            >>> plan = sw.EmbeddingShardingPlanner().collective_plan(
            ...     bags, [sw.EmbeddingBagCollectionSharder()], env=sw.ShardingEnv.local(device_type="cpu")
            ... )
            >>> plan.plan[""]["user_id"].ranks
            [0]
        """
        from shardwright.runtime.ranks.environment import environment_of

        ranks = environment_of(env, process_group, comm_backend)
        measured = _measured(ranks.everyone, is_wanted=self._topology is None)
        watch = self._new_watch()
        # Ctrl-C on any rank is left to rank 0, which ends the search early.
        with ranks.everyone.together("planning"), watch.interruptible():
            text = ranks.everyone.on_first_rank(
                "planning", lambda: self._plan_for(ranks, measured, module, sharders, watch).to_json()
            )
            return ShardingPlan.from_json(text)

    @checked
    def _plan_for(
        self, env: Any, measured: Mapping[str, Any], module: Any, sharders: Sequence[Any] | None, watch: Watch
    ) -> ShardingPlan:
        topology = self._topology or _topology_of(env, measured)
        _check_ranks(topology, env)
        return self._plan_model(topology, module, sharders, watch, on_this_machine=True)

    def _plan_model(
        self,
        topology: Topology,
        module: Any,
        sharders: Sequence[Any] | None,
        watch: Watch,
        *,
        on_this_machine: bool,
    ) -> ShardingPlan:
        from shardwright.runtime.sharded.collections.sharders import default_sharders
        from shardwright.runtime.sharded.models.dense_bytes import dense_bytes

        if isinstance(getattr(module, "plan", None), ShardingPlan):  # as DistributedModelParallel
            module = module.module
        sharders = default_sharders() if sharders is None else sharders
        tables, dense = _tables_of(module, sharders, topology), dense_bytes(module, sharders)
        return self._plan(tables, topology, on_this_machine=on_this_machine, dense=dense, watch=watch)


def _tables_of(module: Any, sharders: Sequence[Any], topology: Topology) -> tuple[TableSpec, ...]:
    """The model's tables, sharded already or not, with what their sharders allow on the ranks' devices.

    Raises:
        UnsupportedError: a sharder allows something else on each of several types of devices.
    """
    from shardwright.runtime.sharded.collections.sharded_collection import ShardedCollection
    from shardwright.runtime.sharded.collections.sharders import collect_tables

    by_device = {
        device: [
            *collect_tables(module, sharders, compute_device=device),
            *(
                table
                for path, child in module.named_modules()
                if isinstance(child, ShardedCollection)
                for table in child.tables_to_plan(path, device)
            ),
        ]
        for device in topology.device_types
    }
    tables = by_device[topology.device_types[0]]
    for device, others in by_device.items():
        for table, other in zip(tables, others, strict=True):
            if table.allowed != other.allowed:
                raise UnsupportedError(
                    f"table {table.describe()}: its sharder allows other sharding types or kernels on {device!r} than "
                    f"on {topology.device_types[0]!r}; on ranks of both it must allow the same"
                )
    return tuple(tables)


def _measured(env: Any, *, is_wanted: bool) -> dict[str, Any]:
    """Measure what ranks on accelerators have, by the names of ``Topology``'s arguments; every rank makes this call.

    1. Rank 0 broadcasts whether it wants to know.
    2. All ranks call the extensions at the point ``topology``.
    3. What they found is gathered: the least of each counts.

    Between ranks on CPUs nothing is measured: a busy machine's bandwidths would give another plan in each run.

    Args:
        env: all ranks.
        is_wanted: rank 0 wants to know; the same on every rank, or not.

    Returns:
        The least of each; empty where nothing is measured.
    """
    from shardwright.runtime.ranks.devices import has_accelerator

    if not has_accelerator(env.device_type):
        return {}
    with env.together("measuring the machine"):
        if not env.communicator.broadcast_object(is_wanted):
            return {}
        offered, found = host().extensions, _memory_of(env)
        for word in words_at("topology", offered):
            found |= ask_at("topology", word, offered, Mapping[str, float], env)
        told = env.communicator.all_gather_objects(found)
        return {name: min(one[name] for one in told if name in one) for name in found}


def _memory_of(env: Any) -> dict[str, Any]:
    """A rank's share of this machine's memory, by the names of ``Topology``'s arguments."""
    from shardwright.runtime.ranks.devices import memory_bytes

    shared = host_memory_bytes()
    found = {
        "hbm_cap": memory_bytes(env.device_type),
        "ddr_cap": shared and shared // env.local_world_size,
    }
    return {name: value for name, value in found.items() if value is not None}


def _topology_of(env: Any, measured: Mapping[str, Any] = MappingProxyType({})) -> Topology:
    """The topology of a ``ShardingEnv``; of one sharding group, where there are several."""
    everyone: Any = env.everyone
    found = {**_memory_of(everyone), **measured}
    planned: Topology = env.planning_topology(
        Topology(
            world_size=everyone.world_size,
            compute_device=everyone.device_type,
            local_world_size=everyone.local_world_size,
            detected=("world_size", "compute_device", "local_world_size", *found),
            **found,
        )
    )
    return planned


def _check_ranks(topology: Topology, env: Any) -> None:
    """Check that a topology has the ranks of a ``ShardingEnv``, those of all sharding groups together.

    Raises:
        PlanningError: it has not.
    """
    groups = 1 if topology.replicas is None else topology.replicas.num_groups
    if topology.world_size * groups != env.everyone.world_size:
        told = f" in each of {groups} sharding groups" if topology.replicas else ""
        raise PlanningError(
            f"the planner's topology has {count_text(topology.world_size, 'rank')}{told}, the process group "
            f"{env.everyone.world_size}"
        )
    if topology.replicas is None and env.everyone.world_size != env.world_size:
        raise PlanningError(
            f"the planner's topology has {count_text(topology.world_size, 'rank')}, a sharding group {env.world_size}: "
            f"give Topology(...).sharding_group({env.world_size})"
        )
