"""The storage model that plans by default, beside what kernels allocate for the blocks of every option."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attrs import evolve
from tests.plugins.compute_kernels.loops import OPTIMIZERS, draw_batch

import shardwright as sw
from shardwright.contracts.compute_kernel import KernelRequest
from shardwright.contracts.lookup import BlockSpec
from shardwright.host import host
from shardwright.optim import spec_to_torch
from shardwright.planning.machines.topology import Topology
from shardwright.planning.options.enumeration import enumerate_options
from shardwright.planning.options.options import Options
from shardwright.planning.tables.constraints import Constraints, ParameterConstraints
from shardwright.planning.tables.optimizers import OptimizerSpec
from shardwright.planning.tables.spec import DataType, TableSpec
from shardwright_testing.equality.cases import Case, Table, shard_case
from shardwright_testing.kernels.memory import held_bytes
from shardwright_testing.simulated import run_simulated

TOLERATED = 0.03  # the planner's promise
KERNELS = ["dense", "fused", "fused_torch", "fused_numba"]


def options_of(optimizer: str, data_type: str, kernel: str) -> Options:
    """Every option of a table on two hosts of two ranks; without ids, so that nothing but the table takes memory."""
    shows = not host().compute_kernels[kernel].fuses_optimizer  # the optimizer is a script's then
    spec = OptimizerSpec(optimizer, 0.1, is_assumed=shows)
    table = TableSpec("t", 4001, 64, ["f"], data_type, optimizer=spec)
    rule = ParameterConstraints(pooling_factors=[0.0], compute_kernels=[kernel])
    topology = Topology(4, "cpu", local_world_size=2)
    return enumerate_options([table], topology, Constraints({"t": rule}), host(), batch_size=1)


def allocated_bytes(block: Any, table: TableSpec, kernel: Any) -> int:
    """Bytes of the tensors behind a block, after a step."""
    torch.set_num_threads(1)
    request = KernelRequest.of(
        table, block.num_columns, device="cpu", on_this_machine=True, first_column=block.columns.start
    )
    specs = [BlockSpec(table, block, request, num_slots=1)]
    lookup = kernel.build(specs, device=torch.device("cpu"))
    sums, saved = lookup.forward(draw_batch(specs, (3,), is_weighted=False).as_bags(), training=True)
    columns = table.embedding_dim if kernel.needs_whole_rows(request) else block.num_columns
    gradients = lookup.backward(saved, torch.ones(sums.numel() // block.num_columns * columns))
    if not lookup.parameters():
        return held_bytes(lookup)
    for parameter, gradient in zip(lookup.parameters(), gradients, strict=True):
        parameter.grad = gradient
    users = spec_to_torch(table.optimizer, lookup.parameters())
    users.step()
    return held_bytes(lookup, users.state)


def memory_of(update: str, optimizer: str, rows: int) -> Any:
    """Bytes of each shard of a table on two ranks that look up 3 x 100 ids each, in cut columns."""
    table = TableSpec("t", rows, 64, ["f"], optimizer=OptimizerSpec(optimizer, 0.1), update=update)
    rule = ParameterConstraints(
        pooling_factors=[3.0],
        compute_kernels=["fused_torch"],
        sharding_types=["column_wise"],
        min_partition=32,
    )
    topology = Topology(2, "cpu")
    options = enumerate_options([table], topology, Constraints({"t": rule}), host(), batch_size=100)
    return host().estimators.create("weights_and_buffers").estimate(options, topology)["ddr"]


@pytest.mark.parametrize(
    ("optimizer", "columns"),
    [("adagrad", 32), ("row_wise_adagrad", 64)],  # the latter needs the gradients of whole rows
)
def test_storage_model_counts_the_gradients_that_are_kept_for_the_step(optimizer: str, columns: int) -> None:
    for rows, kept in ((4000, 600), (50, 50)):
        more = memory_of("in_step", optimizer, rows) - memory_of("in_backward", optimizer, rows)
        assert more.tolist() == [kept * (8 + 4 * columns)] * len(more)


@pytest.mark.parametrize("optimizer", ["adagrad", "row_wise_adagrad"])
def test_storage_model_counts_the_gradients_that_arrive_which_may_be_of_whole_rows(optimizer: str) -> None:
    table = Table(40, 64, ("a",), "SUM", "column_wise", "fused_torch")
    rule = ParameterConstraints(sharding_types=["column_wise"], min_partition=32, pooling_factors=[3.0])
    case = Case([table], (5, 5), optimizer, constraints=rule)
    features = sw.KeyedJaggedTensor(["a"], torch.arange(15), lengths=torch.full((5,), 3))

    def arrived(env: sw.ShardingEnv) -> list[int]:
        output = shard_case(case, env, case.module())(features).values()
        output.backward(torch.ones_like(output))
        return [sum(of) for name, of in env.communicator.sent_bytes if name == "gradients"]  # type: ignore[attr-defined]

    options = enumerate_options(
        case.specs(),
        topology := Topology(2, "cpu"),
        Constraints({"t0": evolve(rule, compute_kernels=["fused_torch"])}),
        host(),
        batch_size=5,
    )
    (kernel, request), *_ = options.requests
    table_bytes = options.compute_kernels[kernel].memory_bytes(request, 40)["device"]
    used = host().estimators.create("weights_and_buffers").estimate(options, topology)["ddr"]
    ids_bytes = 8 * 2 * 5 * 3
    (sent,) = {tuple(own) for own in run_simulated(arrived, 2)}
    assert (used - table_bytes - ids_bytes).tolist() == list(sent) * len(used)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("data_type", ["FP32", "FP16", "BF16"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_storage_model_is_what_is_allocated_for_every_option(
    optimizer: str, data_type: str, kernel: str
) -> None:
    request = KernelRequest("cpu", DataType(data_type), 64, 64, optimizer=OptimizerSpec(optimizer))
    if host().compute_kernels.create(kernel).supports(request) is not True:
        pytest.skip(f"{kernel} says it does not support this")
    options = options_of(optimizer, data_type, kernel)
    estimated = host().estimators.create("weights_and_buffers").estimate(options, Topology(4, "cpu"))["ddr"]
    checked = 0
    for option in range(options.num_options):
        blocks = list(options.layouts[option].blocks)
        per_shard = [
            value
            for run in range(*options.shards_of(option).indices(options.num_shards))
            for value in [estimated[run]] * int(options.count[run])
        ]
        for block, bytes_said in list(zip(blocks, per_shard, strict=True))[:2]:
            held = allocated_bytes(block, options.tables[0], options.kernel_of(option))
            assert bytes_said == pytest.approx(held, rel=TOLERATED)
            checked += 1
    assert checked >= options.num_options
