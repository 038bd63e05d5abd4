"""The common part of all sharded collections: engine, tables, optimizer, state, anatomy."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from attrs import evolve, frozen
from torch import nn

from shardwright.errors import DistributedError, UnsupportedError
from shardwright.modules.table_collection import TableCollection
from shardwright.optim._keyed_state import full
from shardwright.planning.plan.sharding import ParameterSharding
from shardwright.planning.tables.spec import TableSpec
from shardwright.runtime.ranks.environment import ShardingEnv, device_of_rank
from shardwright.runtime.ranks.meeting import Meeting
from shardwright.runtime.routed.tables import executor_of
from shardwright.runtime.sharded.collections import anatomy
from shardwright.runtime.sharded.collections.sharded_module import (
    PLAN_ONCE,
    ModuleSharder,
    check_plan_covers,
    digests_of,
    spec_of,
)
from shardwright.runtime.sharded.tables.data_parallel import watch_data_parallel
from shardwright.runtime.sharded.tables.fused_optimizer import FusedOptimizer
from shardwright.runtime.sharded.tables.initialization import check_first_values, initialize
from shardwright.runtime.sharded.tables.same_weights import agree_on_weights
from shardwright.runtime.sharded.tables.sharded_parameter import watch_steps
from shardwright.runtime.sharded.tables.sharded_table import ShardedTable, local_blocks
from shardwright.runtime.sharded.tables.table_state import TableState
from shardwright.runtime.step.awaitable import LazyAwaitable
from shardwright.runtime.step.batches.inputs import InputChecks
from shardwright.runtime.step.batches.rank_problems import Status, who_ended
from shardwright.runtime.step.compiling import untraced, waited_for
from shardwright.runtime.step.engine import CollectionEngine, EngineStep
from shardwright.runtime.step.kernel_groups import LookupBuilder, build_lookup
from shardwright.sparse import KeyedJaggedTensor


@frozen(eq=False)
class ShardingInputs:
    """Everything that a sharded collection is made from.

    Args:
        unsharded: the unsharded collection, on ``meta``.
        specs: specifications of the tables, with optimizers.
        params: each table's part of the plan, by table name.
        env: the ranks.
        device: device of this rank's blocks.
        checks: level of checks of each batch.
        sharder: sharder that made it, which says what planners may choose.
    """

    unsharded: TableCollection
    specs: Sequence[TableSpec]
    params: Mapping[str, ParameterSharding]
    env: ShardingEnv
    device: torch.device
    checks: InputChecks = InputChecks.STANDARD
    sharder: ModuleSharder | None = None


class ExchangesAhead(Protocol):
    """Exchanges of ids that a pipeline began before the forward passes that they are for."""

    def take(self, features: KeyedJaggedTensor) -> EngineStep | None:
        """Take the exchange of ``features`` and wait for its ids; ``None`` if none was begun."""

    def has_looked_up(self) -> None:
        """Note that the collection looked up the features it was last given."""


class ShardedCollection(nn.Module, ABC):
    """A collection over many ranks.

    Gradients are averaged over ranks. State dicts have the keys, shapes and dtypes of the unsharded module. Over
    several ranks ``state_dict()`` has sharded tensors; :meth:`full_state_dict` gathers them.

    Args:
        inputs: configurations, plan and ranks of the collection.
        tables_name: the attribute that holds the tables, part of the state-dict keys.

    Attributes:
        inputs: tables, plan and ranks.
        engine: the engine that runs its tables.
        sharded_tables: this rank's blocks of each table, by the table's name.
        fused_optimizer: the optimizer that runs in the backward pass, as a ``KeyedOptimizer``.
        env: the ranks it is sharded over.
        device: device of this rank's blocks.
        inputs_ahead: the exchanges of ids that were begun before the forward passes to come; a pipeline's, while it
            makes them.
        output_dtype: dtype of the outputs.
    """

    def __init__(self, inputs: ShardingInputs, *, tables_name: str) -> None:
        super().__init__()
        # First: what one rank alone would raise leaves the others waiting.
        inputs.env.agree(
            "the plan", digests_of(inputs.specs, inputs.params, inputs.env.local_world_size), PLAN_ONCE
        )
        check_plan_covers(inputs.specs, inputs.params, inputs.specs[0].module)
        self.env, self.device, self._configs = inputs.env, inputs.device, list(inputs.unsharded.tables)
        self._tables_name, self.output_dtype = tables_name, inputs.unsharded.output_dtype
        engine = engine_of(inputs)
        self._meeting = Meeting(inputs.env, engine.name)
        self._take_engine(inputs, engine)
        self.fused_optimizer = FusedOptimizer(self._by_parameter(), engine, self._meeting)
        # A function of the module that it is called with: one that held it would keep it from being freed at once.
        self.register_load_state_dict_pre_hook(
            lambda module, *_: module._meeting.to_load("load_state_dict()")
        )
        watch_data_parallel()
        watch_steps()
        self.inputs_ahead: ExchangesAhead | None = None

    def _take_engine(self, inputs: ShardingInputs, engine: CollectionEngine) -> None:
        """Rebuild tables and parameter lists for a new engine."""
        self.inputs, self.engine = inputs, engine
        local = local_blocks(engine)
        self.sharded_tables: dict[str, ShardedTable] = {}
        for spec in inputs.specs:
            own = local.get(spec.name, [])
            state = TableState(spec, inputs.params[spec.name], own, self._meeting, inputs.device)
            self.sharded_tables[spec.name] = ShardedTable(state, engine.lookups, inputs.env, engine.events)
            self.sharded_tables[spec.name].train(self.training)
        self.add_module(self._tables_name, nn.ModuleDict(self.sharded_tables))
        self._to_watch = [
            (table.state.table.describe(), parameter, not table.state.table.is_frozen)
            for table in self.sharded_tables.values()
            if table.is_fused or table.state.table.is_frozen
            for parameter in table.parameters()
        ]
        self._input_dists = anatomy.dists(engine, "InputDist", "input")
        self._lookups = anatomy.lookups(engine)
        self._output_dists = anatomy.dists(engine, "OutputDist", "output")

    def _by_parameter(self) -> dict[str, ShardedTable]:
        """The tables by the names of their parameters."""
        return {f"{self._tables_name}.{name}.weight": table for name, table in self.sharded_tables.items()}

    def take_over(self, inputs: ShardingInputs, engine: CollectionEngine) -> None:
        """Go on with the blocks of another engine; the optimizer object and its learning rates stay.

        Args:
            inputs: tables, new plan and ranks.
            engine: made for that, as the one after this module's own.
        """
        self._take_engine(inputs, engine)
        self.fused_optimizer.rebind(self._by_parameter(), engine)

    def tables_to_plan(self, path: str, compute_device: str) -> list[TableSpec]:
        """The specifications of its tables, to plan them again, with the optimizers that they were sharded with.

        Args:
            path: path of the collection in the model.
            compute_device: type of the devices to plan for.
        """
        sharder = self.inputs.sharder
        return [
            evolve(
                spec, module=path, allowed=None if sharder is None else sharder.allowed(spec, compute_device)
            )
            for spec in self.inputs.specs
        ]

    def forward(self, features: KeyedJaggedTensor) -> LazyAwaitable[Any]:
        """Look up the ids of this rank's batch; every rank makes this call in the same step.

        Args:
            features: this rank's batch, on this rank's device; ranks may have different batch sizes.

        Returns:
            What the unsharded collection returns, waited for on first use.

        Raises:
            InvalidInputError: a rank's batch is wrong; the same text on every rank, the model unchanged.
        """
        if torch.compiler.is_compiling():
            return waited_for(self, features)
        return self._look_up(features)

    @untraced
    def _look_up(self, features: KeyedJaggedTensor) -> LazyAwaitable[Any]:
        return self.output_dist(self.compute(self.input_dist(features)))

    @abstractmethod
    def output_dist(self, step: EngineStep) -> LazyAwaitable[Any]:
        """The results of a step, waited for on first use."""

    def input_dist(self, features: KeyedJaggedTensor) -> EngineStep:
        """Send the ids to the ranks that own their rows (headers and payload), if that was not done ahead.

        Raises:
            InvalidInputError: a rank's batch is wrong; the same text on every rank.
            DistributedError: a rank has no batch for this step; the same text on every rank that has.
        """
        if self.inputs_ahead is not None:
            self._prepare()
            ahead = self.inputs_ahead.take(features)
            if ahead is not None:
                return ahead
        step = self.begin_input_dist(features, prepare=self._prepare)
        if not step.send():
            ended = who_ended(step.statuses, self.env.communicator.global_ranks)
            raise DistributedError(f"{ended}: this step is not made")
        return step

    def begin_input_dist(
        self,
        features: KeyedJaggedTensor | None,
        *,
        status: Status = Status.FINE,
        prepare: Callable[[], None] | None = None,
    ) -> EngineStep:
        """Start the headers of a batch, before its forward pass; ``send()`` of what is returned comes next.

        Args:
            features: the batch; ``None`` where there is none, and ``status`` says why.
            status: status word that the other ranks get if the batch is fine.
            prepare: function called first; the header tells the other ranks of an error that it raises.
        """
        return self.engine.begin(features, status=status, prepare=prepare)

    def compute(self, step: EngineStep) -> EngineStep:
        """Look up all local blocks and start to send the results home."""
        step.lookup()
        if self.inputs_ahead is not None:
            self.inputs_ahead.has_looked_up()
        return step

    def _prepare(self) -> None:
        """Hand changed learning rates to the kernels, and tell listeners what is trained."""
        self.fused_optimizer.apply_learning_rates()
        if torch.is_grad_enabled():
            self.engine.events.begins(self._to_watch)

    def refuse_accumulation(self) -> None:
        """Check that gradients of several backward passes add up.

        Raises:
            UnsupportedError: a table is updated in each backward pass; the same on every rank.
        """
        for table in self.sharded_tables.values():
            if table.is_fused and not table.in_step:
                raise UnsupportedError(
                    f"no_sync() accumulates gradients, but table {table.state.table.describe()} is updated in each "
                    "backward pass: build the model with DistributedModelParallel(..., update='in_step')"
                )

    def before_gathering(self, call: Callable[[], None]) -> None:
        """Have something called when the ranks have met to gather tables, for a state dict."""
        self._meeting.before_gathering.append(call)

    def unshard(self) -> nn.Module:
        """An unsharded module with the same weights, in host memory; a collective, every rank makes this call.

        Raises:
            UnsupportedError: a table's ids are keys, which no unsharded module finds rows for.
        """
        for table in self.sharded_tables.values():
            if table.state.sharding.layout.row_map.takes_any_id:
                raise UnsupportedError(
                    f"table {table.state.table.describe()}: its ids are keys, and an unsharded module looks up rows"
                )
        module = copy.deepcopy(self.inputs.unsharded)
        module.load_state_dict(self.full_state_dict(), assign=True)
        return module

    def make_one_model(self) -> None:
        """Do, on every rank, what is called before tables are gathered: average replicas that have grown apart."""
        for call in self._meeting.before_gathering:
            call()

    def full_state_dict(self) -> dict[str, Any]:
        """The state dict with whole tables, copies in host memory; a collective, every rank makes this call.

        Raises:
            DistributedError: a rank does not make it within the time-out.
        """
        whole: dict[str, Any] = full(self.state_dict())
        return whole

    def embedding_names(self) -> list[str]:
        """The names of the outputs, in order."""
        return [output.name for output in self.engine.collection.outputs]

    def __reduce_ex__(self, protocol: Any) -> Any:
        # Copies and pickles would have to bring the other ranks' blocks and the process group along.
        raise UnsupportedError(
            f"a {type(self).__name__} has its tables in shards and cannot be copied or pickled: save its "
            "full_state_dict(), and load it into a model that is sharded again"
        )

    def take_weights(self, module: TableCollection) -> None:
        """Take the unsharded module's rows over, or draw them, the same for any plan, if it is on ``meta``.

        A table of keys has no rows yet.
        """
        if module.device.type == "meta":
            self.initialize(self.env.communicator.broadcast_object(torch.initial_seed()))
            return
        for name, table in self.sharded_tables.items():
            if not table.row_state:
                table.state.scatter_rows(module.table_weight(name).detach(), table.weight_of)

    def initialize(self, seed: int) -> None:
        """Give all tables of floats new initial weights, the same for any plan; other rows stay zeros.

        Rows of keys get theirs when they are born.

        Args:
            seed: the same on every rank.
        """
        for config in self._configs:
            table = self.sharded_tables[config.name]
            if table.row_state or not table.state.is_float:
                continue
            for local in table.state.local:
                path = table.state.table.path
                initialize(table.weight_of(local), config, local.block, path=path, seed=seed)


def engine_of(
    inputs: ShardingInputs,
    before: CollectionEngine | None = None,
    build_lookup: LookupBuilder = build_lookup,
) -> CollectionEngine:
    """Make the engine that runs the tables of a collection.

    Args:
        inputs: tables, plan and ranks.
        before: the engine that runs them under another plan until now.
        build_lookup: makes the lookup of a group of local blocks.
    """
    return CollectionEngine(
        inputs.specs,
        inputs.params,
        executor_of=executor_of,
        env=inputs.env,
        device=inputs.device,
        is_weighted=inputs.unsharded.is_weighted(),
        checks=inputs.checks,
        before=before,
        build_lookup=build_lookup,
    )


class CollectionSharder(ModuleSharder):
    """The sharder of collections of tables, by the class of their sharded form."""

    sharded_type: ClassVar[type[ShardedCollection]]

    def tables(self, module: nn.Module, path: str = "") -> list[TableSpec]:
        """The specifications of the collection's tables, with their optimizers.

        An optimizer applied to a table's parameter in the backward pass goes before the sharder's. A table whose
        parameter requires no gradient is frozen.
        """
        assert isinstance(module, TableCollection)  # find_sharder
        return [spec_of(self, module, config, path) for config in module.tables]

    def shard(  # noqa: D102 - described in the base class
        self,
        module: nn.Module,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | str | None = None,
        module_fqn: str | None = None,
    ) -> ShardedCollection:
        assert isinstance(module, TableCollection)  # find_sharder
        with env.together(f"sharding {type(module).__name__}"):
            specs, place = self.tables(module, module_fqn or ""), device_of_rank(env, device)
            unsharded = module.of_tables(module.tables, "meta")
            inputs = ShardingInputs(unsharded, specs, params, env, place, self.input_checks, self)
            sharded = self.sharded_type(inputs)  # type: ignore[call-arg]
            check_first_values(module, params)
            weights = {
                table.name: module.table_weight(table.name).detach()
                for table in module.tables
                if not params[table.name].layout.row_map.takes_any_id  # rows that no key has yet are nobody's
            }
            agree_on_weights(weights, env, place, sync=self.sync_module_states)
            sharded.take_weights(module)
            return sharded
