"""Sharded equals unsharded: a case, what each rank does with it, and the comparison with one process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from attrs import evolve, field, frozen
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from shardwright.contracts.comm_backend import EXCHANGE_EVENT
from shardwright.optim.fused import spec_to_torch
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.sparse import KeyedJaggedTensor
from shardwright_testing.equality import keyed_rows as keys
from shardwright_testing.equality.cases import Case, shard_case
from shardwright_testing.equality.diagnosis import explain_output
from shardwright_testing.simulated import SimulatedCommunicator, run_simulated

NUM_STEPS = 5


@frozen
class RankResult:
    """Observations of one rank."""

    outputs: list[Tensor]
    first_weights: dict[str, Tensor]
    weights: dict[str, Tensor]
    optimizer: dict[str, Any]
    collectives: list[int]
    first_rows: dict[str, Tensor] = field(factory=dict)
    """Initial rows, if the unsharded module does not give them."""
    copies: list[Tensor] = field(factory=list)
    """This rank's own copies of what every rank has, and their optimizer state."""


def train_simulated(case: Case, device_type: str = "cpu") -> list[RankResult]:
    """Train the case on simulated ranks.

    Args:
        case: case.
        device_type: type of the device that the ranks share; results are on the CPU.
    """
    module = case.module_to_shard()  # made once: its random numbers come from one generator for all threads
    return run_simulated(
        lambda env: train_rank(case, env, module, count_simulated(env)),
        case.world_size,
        local_world_size=case.local_world_size,
        device_type=device_type,
    )


def train_rank(
    case: Case, env: ShardingEnv, module: nn.Module, count: Callable[[Callable[[], Any]], int]
) -> RankResult:
    """Train the sharded module on one rank for ``NUM_STEPS`` steps, on the environment's device."""
    device = torch.device(env.device_type)
    sharded = shard_case(case, env, module)
    dense = [p for p in sharded.parameters() if not hasattr(p, "_in_backward_optimizers")]
    optimizer = spec_to_torch(sharder_spec(case), dense) if dense else None
    outputs: list[Tensor] = []
    collectives: list[int] = []
    first_rows = keys.born_rows(case, sharded) if case.has_keys else {}

    def step(number: int) -> None:
        batch = _on(device, case.batch_to_shard(number, env.rank))
        values = case.output(sharded(batch))
        outputs.append(values.detach().cpu().clone())
        for buffer in (batch.values(), batch.lengths(), batch.weights_or_none()):
            if buffer is not None:
                buffer.zero_()  # as a loader does that fills the buffers of a batch again
        gradient = case.gradient(number, env.rank, values).to(device)
        handed_over = gradient.clone()
        values.backward(gradient)
        assert torch.equal(gradient, handed_over), "the gradient of an output was changed, which is torch's"

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
        optimizer={"state": {}} if case.has_keys else _on_cpu(sharded.fused_optimizer.full_state_dict()),
        first_rows=first_rows,
        copies=[] if case.has_keys else copies_of(sharded),
        collectives=collectives,
    )


def weights_of(case: Case, sharded: Any) -> dict[str, Tensor]:
    """The rows under the names of the unsharded module's state: of keys, what is looked up."""
    found: dict[str, Tensor] = (
        keys.looked_up_rows(case, sharded) if case.has_keys else sharded.full_state_dict()
    )
    return _on_cpu(found)


def _on(device: torch.device, batch: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """The batch on a device; itself on the CPU."""
    return batch if device.type == "cpu" else batch.to(device)


def _on_cpu(values: Any) -> Any:
    """The values with all their tensors on the CPU."""
    return tree_map(lambda value: value.cpu() if isinstance(value, Tensor) else value, values)


def copies_of(sharded: Any) -> list[Tensor]:
    """Weights and optimizer state of this rank's own copies; a state dict has those of one rank only."""
    copies = [
        (table.lookup_of(local), local.index)
        for table in sharded.sharded_tables.values()
        for local in table.state.local
        if table.state.sharding.layout.dataflow_of(local.block).is_replicated
    ]
    return [
        value.detach().cpu().clone()
        for lookup, block in copies
        for value in (lookup.weight(block), *lookup.optimizer_state(block).values())
    ]


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
    """Counts the collectives that a function makes, from a profile."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as trace:
        function()
    return sum(
        event.count for event in trace.key_averages() if event.key.startswith(("c10d::", EXCHANGE_EVENT))
    )


class _Unsharded:
    """One process that trains on the batches of all ranks, with the mean of their losses.

    Halves are updated as kernels update them: in float32, rounded once a step. So the gradients, and what optimizers
    make of them, come from a module of the same weights in float32.
    """

    def __init__(self, case: Case, first_rows: Mapping[str, Tensor]) -> None:
        self._case, self.module = case, case.module()
        if first_rows:
            self.module.load_state_dict(first_rows)
        self._exact = self.module
        if any(table.data_type != "FP32" for table in case.tables):
            self._exact = evolve(case, tables=[evolve(own, data_type="FP32") for own in case.tables]).module()
            self._exact.load_state_dict(self.module.state_dict())
        self.weights = dict(self.module.named_parameters())
        self._parameters = dict(self._exact.named_parameters())
        self._optimizer = spec_to_torch(sharder_spec(case), list(self._parameters.values()))

    def train(self, step: int) -> None:
        """Make a step."""
        case = self._case
        self._optimizer.zero_grad()
        for rank in range(case.world_size):
            values = case.output(self._exact(case.batch(step, rank)))
            loss = (values * case.gradient(step, rank, values)).sum() / case.world_size
            if loss.requires_grad:
                loss.backward()
        self._optimizer.step()
        with torch.no_grad():
            for name, exact in self._parameters.items():
                exact.copy_(self.weights[name].copy_(exact))  # on to the next step with what was rounded

    def gradient(self, name: str) -> Tensor | None:
        """The gradient of the last step."""
        return self._parameters[name].grad

    def state(self, name: str) -> Mapping[str, Any]:
        """The optimizer's state of a table."""
        state: Mapping[str, Any] = self._optimizer.state[self._parameters[name]]
        return state


def assert_equals_unsharded(
    case: Case, results: Sequence[RankResult], *, collectives: Sequence[int] | None = None
) -> None:
    """Compare all ranks with one process that trains on the whole batch with a mean loss over ranks.

    Args:
        case: case that was trained.
        results: observations of each rank.
        collectives: the number that each step is to make; not looked at by default.
    """
    unsharded = _Unsharded(case, results[0].first_rows)
    tolerance: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
    if any(table.data_type != "FP32" for table in case.tables):
        tolerance = {"rtol": 3e-2, "atol": 3e-2}
    initial = {name: weight.detach().clone() for name, weight in unsharded.weights.items()}
    for step in range(NUM_STEPS):
        for rank, result in enumerate(results):
            batch = case.batch(step, rank)
            values = case.output(unsharded.module(batch))
            _assert_output(
                case, f"output, step {step}, rank {rank}", batch, result.outputs[step], values, tolerance
            )
        unsharded.train(step)
        if step == 0:
            _assert_first_step(case, results, initial, unsharded, tolerance)
    _assert_copies_equal(results)
    for rank, result in enumerate(results):
        assert collectives is None or result.collectives == list(collectives), (
            f"rank {rank} made {result.collectives} collectives in its steps, not {collectives}"
        )
        assert list(result.weights) == list(unsharded.weights)
        for name, weight in unsharded.weights.items():
            assert result.weights[name].dtype == weight.dtype
            torch.testing.assert_close(
                result.weights[name], weight.detach(), **tolerance, msg=prefixed(f"{name}, rank {rank}")
            )
        _assert_states(result.optimizer["state"], unsharded, tolerance)


def _assert_copies_equal(results: Sequence[RankResult]) -> None:
    """Bit for bit, or ranks would drift apart, a rounding at a time."""
    for rank, result in enumerate(results):
        for own, first in zip(result.copies, results[0].copies, strict=True):
            assert torch.equal(own, first), (
                f"a copy {list(own.shape)} on rank {rank} is not that of rank 0, bit for bit: they differ by up to "
                f"{(own.double() - first.double()).abs().max():.2g}"
            )


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
    unsharded: _Unsharded,
    tolerance: Mapping[str, Any],
) -> None:
    """Compare weights after one step and, where SGD moves them in proportion to it, the gradient."""
    rate = case.fused_params["learning_rate"]
    for rank, result in enumerate(results):
        for name, weight in unsharded.weights.items():
            where = prefixed(f"{name} after one step, rank {rank}")
            torch.testing.assert_close(result.first_weights[name], weight.detach(), **tolerance, msg=where)
            expected = unsharded.gradient(name)
            if case.optimizer != "sgd" or case.parameters or expected is None:
                continue
            # The weights' own rounding is all that the difference of two of them can be off by.
            rounding = float(initial[name].abs().max()) * torch.finfo(weight.dtype).eps / rate
            gradient = (initial[name] - result.first_weights[name]).float() / rate
            torch.testing.assert_close(
                gradient,
                expected,
                rtol=tolerance["rtol"],
                atol=tolerance["atol"] + rounding,
                msg=prefixed(f"gradient of {name}, rank {rank}"),
            )


def _assert_states(
    state: Mapping[str, Mapping[str, Any]], unsharded: _Unsharded, tolerance: Mapping[str, Any]
) -> None:
    for name, entries in state.items():
        for entry, value in entries.items():
            reference = torch.as_tensor(unsharded.state(name)[entry], dtype=value.dtype)
            assert value.shape == reference.shape, f"{entry} of {name}"
            torch.testing.assert_close(value, reference, **tolerance, msg=prefixed(f"{entry} of {name}"))


def prefixed(what: str) -> Callable[[str], str]:
    """Make a function for ``torch.testing`` that puts a subject before its message."""
    return lambda message: f"{what}: {message}"
