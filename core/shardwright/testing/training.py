"""Sharded equals unsharded: a case, what each rank does with it, and the comparison with one process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from attrs import evolve, field, frozen
from torch import Tensor, nn

from shardwright.contracts import ShardingType
from shardwright.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from shardwright.optim.fused import spec_to_torch
from shardwright.planning.constraints import ParameterConstraints
from shardwright.planning.layouts import Block, Layout, Routed
from shardwright.planning.plan import ParameterSharding
from shardwright.planning.tables import EmbeddingBagConfig, EmbeddingConfig, TableSpec
from shardwright.planning.topology import Topology
from shardwright.plugins import host
from shardwright.runtime.environment import ShardingEnv
from shardwright.runtime.sharders import (
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    ModuleSharder,
)
from shardwright.sparse import KeyedJaggedTensor
from shardwright.testing import keyed_rows as keys
from shardwright.testing.diagnosis import explain_output
from shardwright.testing.keyed_rows import with_keys
from shardwright.testing.simulated import SimulatedCommunicator, run_simulated

NUM_STEPS = 5
MOST_RANKS = 4
"""Of the cases that are drawn."""

BATCHES = ("even", "uneven", "empty bags", "empty batch on one rank", "a rank with no ids")
"""The kinds of batches that a case may train on, one after the other."""


@frozen
class Table:
    """A table of a case and how it is sharded; ``rows``/``dim``/``features`` as in the configuration."""

    rows: int
    dim: int
    features: tuple[str, ...]
    pooling: str
    sharding_type: str
    kernel: str
    variant: int = 0
    offset: int = 0
    data_type: str = "FP32"


def _tables(values: Iterable[Table]) -> tuple[Table, ...]:
    return tuple(values)


def _sizes(values: Iterable[int]) -> tuple[int, ...]:
    return tuple(values)


@frozen
class Case:
    """Tables, an optimizer, and each rank's batch size.

    With `batches`, step `i` has the kind `batches[i]`, and `batch_sizes` are those of an uneven one. If a case
    `has_keys`, what is sharded are tables whose ids are keys, with room for all of them on each of `MOST_RANKS`, and
    row `r` of the unsharded module is what has key `r`. `constraints` is what is asked beside sharding type and kernel.
    """

    tables: tuple[Table, ...] = field(converter=_tables)
    batch_sizes: tuple[int, ...] = field(converter=_sizes)
    optimizer: str = "sgd"
    is_weighted: bool = False
    max_length: int = 4
    local_world_size: int | None = None
    id_dtype: torch.dtype = torch.int64
    batches: tuple[str, ...] = ()
    has_keys: bool = False
    constraints: ParameterConstraints = field(factory=ParameterConstraints)

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return len(self.batch_sizes)

    @property
    def fused_params(self) -> dict[str, Any]:
        """What the sharder is told of the optimizer."""
        return {"optimizer": self.optimizer, "learning_rate": 0.1}

    @property
    def features(self) -> list[str]:
        """Every feature, and one that no table asks for."""
        names = {feature for table in self.tables for feature in table.features}
        return [*sorted(names, reverse=True), "unused"]

    @property
    def is_pooled(self) -> bool:
        """One vector a bag, else one an id."""
        return self.tables[0].pooling != "NONE"

    def _common(self, index: int, times: int) -> dict[str, Any]:
        table = self.tables[index]
        return {
            "num_embeddings": table.rows * times,
            "embedding_dim": table.dim,
            "name": f"t{index}",
            "feature_names": list(table.features),
            "data_type": table.data_type,
        }

    def module(self) -> EmbeddingBagCollection | EmbeddingCollection:
        """The unsharded module, the same each time."""
        return self._module(times=1)

    def module_to_shard(self) -> EmbeddingBagCollection | EmbeddingCollection:
        """The module that is sharded: the same, or, of keys, one of tables with more room."""
        return self._module(times=MOST_RANKS if self.has_keys else 1)

    def _module(self, times: int) -> EmbeddingBagCollection | EmbeddingCollection:
        torch.manual_seed(0)
        if self.is_pooled:
            bags = [
                EmbeddingBagConfig(pooling=table.pooling, **self._common(i, times))
                for i, table in enumerate(self.tables)
            ]
            return EmbeddingBagCollection(bags, is_weighted=self.is_weighted, device="cpu")
        configs = [EmbeddingConfig(**self._common(index, times)) for index in range(len(self.tables))]
        return EmbeddingCollection(configs, device="cpu")

    def sharder(self) -> ModuleSharder:
        """The sharder of such modules."""
        kind = EmbeddingBagCollectionSharder if self.is_pooled else EmbeddingCollectionSharder
        return kind(fused_params=self.fused_params)

    def specs(self) -> list[TableSpec]:
        """The specifications of the tables that are sharded."""
        return self.sharder().tables(self.module_to_shard())

    def output(self, result: Any) -> Tensor:
        """A result of the module as one tensor: pooled columns, or the sequences' rows, flat, one after the other."""
        if self.is_pooled:
            return result.values()
        return torch.cat([result[name].values().reshape(-1) for name in sorted(result.keys())])

    def batch_size(self, step: int, rank: int) -> int:
        """How many samples a rank has in a step."""
        kind = self.batches[step % len(self.batches)] if self.batches else "uneven"
        if kind == "empty batch on one rank" and rank == self.world_size - 1:
            return 0
        return self.batch_sizes[rank] if kind == "uneven" else max(self.batch_sizes)

    def lengths(self, step: int, rank: int, generator: torch.Generator) -> Tensor:
        """How many ids each bag of a feature has."""
        kind = self.batches[step % len(self.batches)] if self.batches else "uneven"
        own = torch.randint(0, self.max_length + 1, (self.batch_size(step, rank),), generator=generator)
        if kind == "empty bags":
            own *= torch.randint(0, 2, own.shape, generator=generator)
        if kind == "a rank with no ids" and rank == 0:
            own.zero_()
        return own

    def batch(self, step: int, rank: int) -> KeyedJaggedTensor:
        """A rank's batch of a step, the same each time."""
        generator = torch.Generator().manual_seed(1000 * step + rank)
        values, lengths = [], []
        for feature in self.features:
            rows = self.rows_of(feature)
            own = self.lengths(step, rank, generator)
            lengths.append(own)
            values.append(torch.randint(0, rows, (int(own.sum()),), generator=generator))
        ids = torch.cat(values).to(self.id_dtype)
        weights = (
            torch.rand(ids.numel(), generator=generator, dtype=torch.float32) if self.is_weighted else None
        )
        return KeyedJaggedTensor(
            keys=self.features, values=ids, lengths=torch.cat(lengths).to(torch.int32), weights=weights
        )

    def rows_of(self, feature: str) -> int:
        """How many rows are looked up by a feature: those that all its tables have."""
        return min((table.rows for table in self.tables if feature in table.features), default=5)

    def batch_to_shard(self, step: int, rank: int) -> KeyedJaggedTensor:
        """The batch as the sharded module gets it."""
        batch = self.batch(step, rank)
        return with_keys(batch) if self.has_keys else batch

    def gradient(self, step: int, rank: int, like: Tensor) -> Tensor:
        """The gradient of the loss by an output, the same each time."""
        generator = torch.Generator().manual_seed(7_000_000 + 1000 * step + rank)
        return torch.rand(like.shape, generator=generator, dtype=like.dtype) - 0.3


@frozen
class RankResult:
    """What one rank saw."""

    outputs: list[Tensor]
    first_weights: dict[str, Tensor]
    weights: dict[str, Tensor]
    optimizer: dict[str, Any]
    collectives: list[int]
    expected_collectives: set[int]
    first_rows: dict[str, Tensor] = field(factory=dict)
    """What rows began with, if the unsharded module does not say."""


def layouts_of(
    name: str,
    table: TableSpec,
    world_size: int,
    *,
    local_world_size: int | None = None,
    constraints: ParameterConstraints | None = None,
) -> list[Layout]:
    """The layouts that a registered sharding type offers for ``table`` on simulated hosts, by default one."""
    sharding_type: ShardingType = host().sharding_types.create(name)
    topology = Topology(world_size=world_size, compute_device="cpu", local_world_size=local_world_size)
    return list(sharding_type.layouts(table, topology, constraints or ParameterConstraints(min_partition=1)))


def shardings_of(case: Case, specs: Sequence[TableSpec]) -> dict[str, ParameterSharding]:
    """A plan for the case: what may go anywhere is dealt to ranks or hosts, beginning at the table's offset."""
    plan = {}
    for table, spec in zip(case.tables, specs, strict=True):
        choices = layouts_of(
            table.sharding_type,
            spec,
            case.world_size,
            local_world_size=case.local_world_size,
            constraints=evolve(case.constraints, min_partition=1, sharding_types=[table.sharding_type]),
        )
        layout = choices[table.variant % len(choices)]
        ranks = [_rank_of(block, index, table.offset, case) for index, block in enumerate(layout.blocks)]
        plan[spec.name] = ParameterSharding(table.sharding_type, table.kernel, layout.placed(ranks))
    return plan


def _rank_of(block: Block, index: int, offset: int, case: Case) -> int:
    if block.rank is not None:
        return block.rank
    if block.host_group is None:
        return (index + offset) % case.world_size
    host_size = case.local_world_size or case.world_size
    first = (block.host_group + offset) * host_size % case.world_size
    return first + (index % host_size if block.local_rank is None else block.local_rank)


def shard_case(case: Case, env: ShardingEnv, module: nn.Module) -> Any:
    """The case's module, sharded on one rank."""
    sharder = case.sharder()
    return sharder.shard(module, shardings_of(case, sharder.tables(module)), env, "cpu")


def train_simulated(case: Case) -> list[RankResult]:
    """Train the case on simulated ranks."""
    module = case.module_to_shard()  # made once: its random numbers come from one generator for all threads
    return run_simulated(
        lambda env: train_rank(case, env, module, count_simulated(env)),
        case.world_size,
        local_world_size=case.local_world_size,
    )


def train_rank(
    case: Case, env: ShardingEnv, module: nn.Module, count: Callable[[Callable[[], Any]], int]
) -> RankResult:
    """Train the sharded module on one rank for ``NUM_STEPS`` steps."""
    sharded = shard_case(case, env, module)
    dense = [p for p in sharded.parameters() if not hasattr(p, "_in_backward_optimizers")]
    optimizer = spec_to_torch(sharder_spec(case), dense) if dense else None
    outputs: list[Tensor] = []
    collectives: list[int] = []
    first_rows = keys.born_rows(case, sharded) if case.has_keys else {}

    def step(number: int) -> None:
        values = case.output(sharded(case.batch_to_shard(number, env.rank)))
        outputs.append(values.detach().clone())
        values.backward(case.gradient(number, env.rank, values))

    for number in range(NUM_STEPS):
        for parameter in dense:
            parameter.grad = None
        collectives.append(count(functools.partial(step, number)))
        if optimizer is not None:
            optimizer.step()
        if number == 0:
            first_weights = weights_of(case, sharded)
    return RankResult(
        outputs=outputs,
        first_weights=first_weights,
        weights=weights_of(case, sharded),
        optimizer={"state": {}} if case.has_keys else sharded.fused_optimizer.state_dict(),
        first_rows=first_rows,
        collectives=collectives,
        expected_collectives=expected_collectives(case),
    )


def weights_of(case: Case, sharded: Any) -> dict[str, Tensor]:
    """The rows under the names of the unsharded module's state: of keys, what is looked up."""
    found: dict[str, Tensor] = keys.looked_up_rows(case, sharded) if case.has_keys else sharded.state_dict()
    return found


def sharder_spec(case: Case) -> Any:
    """The optimizer of the case."""
    return case.sharder().optimizer


def count_simulated(env: ShardingEnv) -> Callable[[Callable[[], Any]], int]:
    """Counts the collectives a function makes on a simulated rank."""
    communicator = env.communicator
    assert isinstance(communicator, SimulatedCommunicator)

    def count(function: Callable[[], Any]) -> int:
        before = len(communicator.labels)
        function()
        return len(communicator.labels) - before

    return count


def count_profiled(function: Callable[[], Any]) -> int:
    """Counts the collectives of torch.distributed that a function makes, from a profile."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as trace:
        function()
    return sum(event.count for event in trace.key_averages() if event.key.startswith("c10d::"))


def assert_equals_unsharded(case: Case, results: Sequence[RankResult]) -> None:
    """Compare all ranks with one process that trains on the whole batch with a mean loss over ranks."""
    module = case.module()
    if case.has_keys:
        module.load_state_dict(results[0].first_rows)
    parameters = dict(module.named_parameters())
    optimizer = spec_to_torch(sharder_spec(case), list(parameters.values()))
    tolerance: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
    if any(table.data_type != "FP32" for table in case.tables):
        tolerance = {"rtol": 3e-2, "atol": 3e-2}
    initial = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = torch.zeros(())
        for rank, result in enumerate(results):
            values = case.output(module(case.batch(step, rank)))
            where = f"output, step {step}, rank {rank}"
            _assert_output(case, where, case.batch(step, rank), result.outputs[step], values, tolerance)
            loss = loss + (values * case.gradient(step, rank, values)).sum() / case.world_size
        if loss.requires_grad:
            loss.backward()
            optimizer.step()
        if step == 0:
            _assert_first_step(case, results, initial, parameters, tolerance)
    for rank, result in enumerate(results):
        assert set(result.collectives) <= result.expected_collectives, f"rank {rank}"
        assert list(result.weights) == list(parameters)
        for name, weight in parameters.items():
            assert result.weights[name].dtype == weight.dtype
            torch.testing.assert_close(
                result.weights[name], weight.detach(), **tolerance, msg=prefixed(f"{name}, rank {rank}")
            )
        _assert_states(result.optimizer["state"], parameters, optimizer.state, tolerance)


def _assert_output(
    case: Case,
    where: str,
    batch: KeyedJaggedTensor,
    actual: Tensor,
    expected: Tensor,
    tolerance: Mapping[str, Any],
) -> None:
    """Compare a rank's output, and say in which table and bag it goes wrong."""
    tables = [(table.describe(), table.embedding_dim, table.feature_names) for table in case.specs()]

    def explain(message: str) -> str:
        found = explain_output(tables, batch, actual, expected.detach()) if case.is_pooled else ""
        return f"{where}: {found or message}"

    torch.testing.assert_close(actual, expected.detach(), **tolerance, msg=explain)


def _assert_first_step(
    case: Case,
    results: Sequence[RankResult],
    initial: Mapping[str, Tensor],
    parameters: Mapping[str, nn.Parameter],
    tolerance: Mapping[str, Any],
) -> None:
    """Compare weights after one step and, where SGD moves them in proportion to it, the gradient."""
    rate = case.fused_params["learning_rate"]
    for rank, result in enumerate(results):
        for name, weight in parameters.items():
            where = prefixed(f"{name} after one step, rank {rank}")
            torch.testing.assert_close(result.first_weights[name], weight.detach(), **tolerance, msg=where)
            if case.optimizer != "sgd" or weight.grad is None:
                continue
            # The weights' own rounding is all that the difference of two of them can be off by.
            rounding = float(initial[name].abs().max()) * torch.finfo(weight.dtype).eps / rate
            gradient = (initial[name] - result.first_weights[name]).float() / rate
            torch.testing.assert_close(
                gradient,
                weight.grad.float(),
                rtol=tolerance["rtol"],
                atol=tolerance["atol"] + rounding,
                msg=prefixed(f"gradient of {name}, rank {rank}"),
            )


def expected_collectives(case: Case) -> set[int]:
    """How many collectives a training step may make: headers, ids, results home, gradients back.

    Results of tables that sum inside the host take two each way if there are several hosts. Copies of replicated tables
    are synchronised in one collective, or two for the dense form, if there is anybody to talk to.
    """
    specs = case.specs()
    flows_of = {name: own.layout.dataflows for name, own in shardings_of(case, specs).items()}
    routed = {flow for flows in flows_of.values() for flow in flows if isinstance(flow, Routed)}
    ways = {flow.return_path(is_pooled=case.is_pooled).__name__ for flow in routed}
    crosses = "HostReturn" in ways and case.local_world_size not in (None, case.world_size)
    count = 1 + 3 * bool(ways) + 4 * crosses - 2 * (crosses and len(ways) == 1)
    has_copies = [spec for spec in specs if any(flow.is_replicated for flow in flows_of[spec.name])]
    if not has_copies or case.world_size == 1:
        return {count}
    whole = [spec for spec in has_copies if all(flow.is_replicated for flow in flows_of[spec.name])]
    copied = {feature for spec in whole for feature in spec.feature_names}
    more = {count + 1, count + 2, count + 3}
    return more if all(_has_ids(case, step, copied) for step in range(NUM_STEPS)) else {count, *more}


def _has_ids(case: Case, step: int, features: set[str]) -> bool:
    """Whether any rank looks a row of ``features`` up; copies are not synchronised where nobody does."""
    batches = [case.batch(step, rank) for rank in range(case.world_size)]
    return any(batch[feature].values().numel() for batch in batches for feature in features)


def _assert_states(
    state: Mapping[str, Any],
    parameters: Mapping[str, nn.Parameter],
    expected: Any,
    tolerance: Mapping[str, Any],
) -> None:
    for name, entries in state.items():
        for entry, value in entries.items():
            reference = torch.as_tensor(expected[parameters[name]][entry], dtype=value.dtype)
            assert value.shape == reference.shape, f"{entry} of {name}"
            torch.testing.assert_close(value, reference, **tolerance, msg=prefixed(f"{entry} of {name}"))


def prefixed(what: str) -> Callable[[str], str]:
    """For ``torch.testing``: its message, after what it is of."""
    return lambda message: f"{what}: {message}"
