"""``ShardedEmbeddingBagCollection``: an ``EmbeddingBagCollection`` over many ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from shardwright.errors import UnsupportedError
from shardwright.modules.embedding_configs import dtype_of
from shardwright.modules.embedding_modules import EmbeddingBagCollection
from shardwright.optim.fused import optimizer_spec_of
from shardwright.planning.layouts import Exchange
from shardwright.planning.plan import ParameterSharding
from shardwright.planning.tables import EmbeddingBagConfig, TableSpec
from shardwright.runtime import anatomy
from shardwright.runtime.awaitable import LazyAwaitable, LazyCall
from shardwright.runtime.environment import ShardingEnv
from shardwright.runtime.exchange import ExchangeStep, PooledExchange
from shardwright.runtime.fused_optimizer import FusedOptimizer
from shardwright.runtime.initialization import initialize
from shardwright.runtime.lookup import Lookup
from shardwright.runtime.sharded_module import ModuleSharder, check_plan_covers, register_sharder
from shardwright.runtime.table_state import LocalBlock, TableState
from shardwright.sparse import KeyedJaggedTensor, KeyedTensor


class ShardedEmbeddingBagCollection(nn.Module):
    """The sharded form of an :class:`EmbeddingBagCollection`: the same input and output, tables on many ranks.

    Its output is a :class:`LazyAwaitable` of a :class:`KeyedTensor` ``[B, C]``, waited for on first use. Gradients are
    averaged over ranks. State dicts have the keys, shapes and dtypes of the unsharded module; ``state_dict()`` gathers
    and must be called on every rank.

    Args:
        tables: the configurations.
        specs: the specifications, with optimizers.
        params: how each table is sharded, by name.
        env: the ranks.
        device: where this rank's blocks are.
        is_weighted: ids carry weights.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        specs: Sequence[TableSpec],
        params: Mapping[str, ParameterSharding],
        *,
        env: ShardingEnv,
        device: torch.device,
        is_weighted: bool,
    ) -> None:
        super().__init__()
        check_plan_covers(specs, params, specs[0].module)
        _check_dataflows(specs, params)
        self._env, self._device = env, device
        self._configs, self._is_weighted = list(tables), is_weighted
        self._exchange = PooledExchange(specs, params, env=env, device=device, is_weighted=is_weighted)
        plan = self._exchange.plan
        self._output_names = [output.name for output in plan.outputs]
        self._output_dims = [output.stop - output.start for output in plan.outputs]
        local = _local_blocks(self._exchange)
        self.embedding_bags = nn.ModuleDict()
        for spec in specs:
            state = TableState(spec, params[spec.name], local.get(spec.name, []), env.communicator, device)
            self.embedding_bags[spec.name] = ShardedTable(state, self._exchange)
        self._input_dists = nn.ModuleList([anatomy.input_dist(self._exchange)])
        self._lookups = anatomy.lookups(self._exchange)
        self._output_dists = nn.ModuleList([anatomy.output_dist(self._exchange)])
        self._fused_optimizer = FusedOptimizer(
            {f"embedding_bags.{name}.weight": table for name, table in self._tables().items()},
            self._exchange.lookups,
        )

    def _tables(self) -> dict[str, ShardedTable]:
        return {name: table for name, table in self.embedding_bags.items() if isinstance(table, ShardedTable)}

    def forward(self, features: KeyedJaggedTensor) -> LazyAwaitable[KeyedTensor]:
        """Pool the bags of this rank's batch; every rank makes this call in the same step.

        Args:
            features: this rank's batch, on this rank's device; ranks may have different batch sizes.

        Returns:
            The pooled output ``[B, C]`` float32, waited for on first use.

        Raises:
            InvalidInputError: a rank's batch is wrong; the same text on every rank, the model unchanged.
        """
        return self.output_dist(self.compute(self.input_dist(features)))

    def input_dist(self, features: KeyedJaggedTensor) -> ExchangeStep:
        """Send the ids to the ranks that own their rows (collectives 1 and 2)."""
        self._fused_optimizer.apply_learning_rates()
        return self._exchange.start(features)

    def compute(self, step: ExchangeStep) -> ExchangeStep:
        """Look up all local blocks and start sending the results (collective 3)."""
        step.lookup()
        return step

    def output_dist(self, step: ExchangeStep) -> LazyAwaitable[KeyedTensor]:
        """The results in order, waited for on first use."""
        return LazyCall(lambda: KeyedTensor(self._output_names, self._output_dims, step.finish()))

    @property
    def fused_optimizer(self) -> FusedOptimizer:
        """The optimizer that runs in the backward pass, as a ``KeyedOptimizer``."""
        return self._fused_optimizer

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The tables' configurations."""
        return list(self._configs)

    def embedding_names(self) -> list[str]:
        """The names of the output's columns, in order."""
        return list(self._output_names)

    def is_weighted(self) -> bool:
        """Whether ids carry weights."""
        return self._is_weighted

    @property
    def device(self) -> torch.device:
        """Where this rank's blocks are."""
        return self._device

    def initialize(self, seed: int) -> None:
        """Give all tables new initial weights, the same for any plan; ``seed`` must be the same on every rank."""
        for config in self._configs:
            table = self._tables()[config.name]
            for local in table.state.local:
                path = table.state.table.path
                initialize(table.weight_of(local), config, local.block, path=path, seed=seed)


class ShardedTable(nn.Module):
    """This rank's blocks of one table, under the unsharded table's place in the module.

    ``weight`` is the local block ``[rows, columns]``; further ones, if a rank has several, are ``weight_1``, ...
    Parameters that a kernel updates by itself carry ``_in_backward_optimizers``.
    """

    def __init__(self, state: TableState, exchange: PooledExchange) -> None:
        super().__init__()
        self.state = state
        self._lookups = exchange.lookups
        for number, local in enumerate(state.local):
            lookup = self._lookups[local.lookup]
            parameters = lookup.parameters()
            parameter = parameters[local.index] if parameters else nn.Parameter(lookup.weight(local.index))
            if not parameters:
                parameter._in_backward_optimizers = [lookup]  # type: ignore[attr-defined]  # as torch marks them
            self.register_parameter(f"weight_{number}" if number else "weight", parameter)

    def weight_of(self, local: LocalBlock) -> Tensor:
        """The weights of a local block, shared storage."""
        return self.lookup_of(local).weight(local.index)

    def lookup_of(self, local: LocalBlock) -> Lookup:
        """What looks a local block up."""
        return self._lookups[local.lookup]

    def extra_repr(self) -> str:
        """Sharding type, kernel and the blocks here."""
        sharding, table = self.state.sharding, self.state.table
        blocks = ", ".join(
            f"{block.block.num_rows} x {block.block.num_columns}" for block in self.state.local
        )
        return (
            f"{table.num_embeddings} x {table.embedding_dim}, {sharding.sharding_type}, {sharding.compute_kernel}, "
            f"here: {blocks or 'nothing'}"
        )

    def _apply(self, fn: Any, recurse: bool = True) -> ShardedTable:
        # Blocks stay where the plan put them; to(), cuda() and half() of a model must not tear them from the kernels.
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        table = self.state.table
        dtype = dtype_of(table.data_type)
        destination[prefix + "weight"] = self.state.gather(
            self.weight_of, columns=table.embedding_dim, dtype=dtype
        )

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        key = prefix + "weight"
        unexpected_keys += [name for name in state_dict if name.startswith(prefix) and name != key]
        if key not in state_dict:
            missing_keys.append(key)
            return
        whole = state_dict[key]
        expected = (self.state.table.num_embeddings, self.state.table.embedding_dim)
        if tuple(whole.shape) != expected:
            error_msgs.append(
                f"table {self.state.table.describe()}: {key!r} has shape {list(whole.shape)}, not {list(expected)}"
            )
            return
        self.state.scatter(whole, self.weight_of)


def _check_dataflows(specs: Sequence[TableSpec], params: Mapping[str, ParameterSharding]) -> None:
    for spec in specs:
        dataflow = params[spec.name].layout.dataflow
        if not isinstance(dataflow, Exchange):
            raise UnsupportedError(
                f"table {spec.path!r} ({params[spec.name].sharding_type}) asks for the dataflow "
                f"{dataflow.name!r}; pooled collections run {Exchange.name!r} so far"
            )


def _local_blocks(exchange: PooledExchange) -> dict[str, list[LocalBlock]]:
    local: dict[str, list[LocalBlock]] = {}
    for lookup, group in enumerate(exchange.groups):
        for index, spec in enumerate(group.blocks):
            local.setdefault(spec.table.name, []).append(LocalBlock(spec.block, index, lookup))
    return local


@register_sharder
class EmbeddingBagCollectionSharder(ModuleSharder):
    """Shards :class:`EmbeddingBagCollection`."""

    module_type: ClassVar[type[nn.Module]] = EmbeddingBagCollection

    def tables(self, module: nn.Module, path: str = "") -> list[TableSpec]:
        """The specifications of the collection's tables, with their optimizers."""
        assert isinstance(module, EmbeddingBagCollection)  # find_sharder
        return [
            TableSpec.from_config(
                config,
                module=path,
                is_weighted=module.is_weighted(),
                optimizer=optimizer_spec_of(module.table_weight(config.name), config.name) or self.optimizer,
            )
            for config in module.embedding_bag_configs()
        ]

    def shard(
        self,
        module: nn.Module,
        params: Mapping[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | str | None = None,
        module_fqn: str | None = None,
    ) -> ShardedEmbeddingBagCollection:
        """See :meth:`ModuleSharder.shard`."""
        assert isinstance(module, EmbeddingBagCollection)  # find_sharder
        configs = module.embedding_bag_configs()
        sharded = ShardedEmbeddingBagCollection(
            configs,
            self.tables(module, module_fqn or ""),
            params,
            env=env,
            device=torch.device(device if device is not None else env.device_type),
            is_weighted=module.is_weighted(),
        )
        if module.device.type == "meta":
            sharded.initialize(env.communicator.broadcast_object(torch.initial_seed()))
        else:
            for name, table in sharded._tables().items():
                table.state.scatter(module.table_weight(name).detach(), table.weight_of)
        return sharded
