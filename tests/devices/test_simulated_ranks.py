"""Simulated ranks that share one device train as one process on the CPU: every type, kernel, codec and optimizer."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.equality import Case, Table, assert_equals_unsharded, shardings_of, train_simulated
from tests.plugins.codecs.test_training import train_step

from shardwright import DataType, KernelRequest, OptimizerSpec, QCommsConfig
from shardwright.host import host
from shardwright_testing import run_simulated

KERNEL = {"cpu": "fused_torch", "cuda": "fused_triton"}
"""Kernel that runs every optimizer on a device, of both dimensions."""

NAMES = {
    kind: sorted(getattr(host(), kind))
    for kind in ("sharding_types", "compute_kernels", "optimizers", "codecs")
}


def case_of(
    sharding_type: str, kernel: str, *, num_ranks: int = 2, pooling: str = "MEAN", **others: Any
) -> Case:
    """Tables of two widths, read by shared features, on ranks of two hosts if they are four."""
    tables = [
        Table(17, 16, ("a",), pooling, sharding_type, kernel, offset=1),
        Table(9, 8 if pooling != "NONE" else 16, ("b", "a"), pooling, sharding_type, kernel),
    ]
    sizes = (3, 2, 0, 5)[:num_ranks]
    return Case(tables, sizes, local_world_size=min(2, num_ranks), **others)


def assert_trains(case: Case, device: str) -> None:
    assert_equals_unsharded(case, train_simulated(case, device))


@pytest.mark.parametrize("pooling", ["MEAN", "NONE"])
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("sharding_type", NAMES["sharding_types"])
def test_every_sharding_type_trains_on_a_shared_device(
    each_device: str, sharding_type: str, num_ranks: int, pooling: str
) -> None:
    case = case_of(
        sharding_type, KERNEL[each_device], num_ranks=num_ranks, pooling=pooling, optimizer="row_wise_adagrad"
    )
    assert_trains(case, each_device)


@pytest.mark.parametrize("data_type", ["FP32", "FP16", "BF16"])
@pytest.mark.parametrize("kernel", NAMES["compute_kernels"])
def test_every_kernel_trains_on_a_shared_device(each_device: str, kernel: str, data_type: str) -> None:
    fuses = host().compute_kernels.create(kernel).fuses_optimizer
    request = KernelRequest(
        each_device,
        DataType(data_type),
        16,
        16,
        optimizer=OptimizerSpec("adagrad") if fuses else None,
        on_this_machine=True,
    )
    answer = host().compute_kernels.create(kernel).supports(request)
    if answer is not True:
        pytest.skip(str(answer))
    tables = [Table(17, 16, ("a",), "SUM", "table_wise", kernel, data_type=data_type)]
    tables.append(Table(9, 16, ("b", "a"), "MEAN", "row_wise", kernel, data_type=data_type))
    assert_trains(Case(tables, (3, 2), "adagrad" if fuses else "sgd", is_weighted=True), each_device)


@pytest.mark.parametrize("optimizer", NAMES["optimizers"])
def test_every_optimizer_trains_on_a_shared_device(each_device: str, optimizer: str) -> None:
    for sharding_type in ("row_wise", "data_parallel"):
        assert_trains(case_of(sharding_type, KERNEL[each_device], optimizer=optimizer), each_device)


@pytest.mark.parametrize("codec", NAMES["codecs"])
def test_every_codec_gives_on_a_device_what_it_gives_on_the_cpu(each_device: str, codec: str) -> None:
    config = QCommsConfig(codec, codec)
    for sharding_type in ("table_wise", "table_row_wise"):
        on_cpu = train_step(case_of(sharding_type, KERNEL["cpu"]), config)
        shared = train_step(case_of(sharding_type, KERNEL[each_device]), config, each_device)
        for own, expected in zip(shared, on_cpu, strict=True):
            assert own.sent == expected.sent
            # Sums in another order may be encoded as the neighbouring value: of 8 bits, a 255th of what a row spans.
            torch.testing.assert_close(own.output.cpu(), expected.output, rtol=1e-2, atol=2e-2)
            for name, weight in expected.weights.items():
                torch.testing.assert_close(own.weights[name].cpu(), weight, rtol=1e-2, atol=2e-2)


def test_batches_in_host_memory_train_as_those_on_the_device(device: str) -> None:
    """Each path has its own routing."""
    case = case_of("row_wise", KERNEL[device], optimizer="adagrad")
    module = case.module()

    def outputs(place: str) -> list[Any]:
        def work(env: Any) -> Any:
            sharder = case.sharder()
            plan = shardings_of(case, sharder.tables(module))
            sharded = sharder.shard(module, plan, env, env.device_type)
            found = []
            for step in range(3):
                values = sharded(case.batch(step, env.rank).to(torch.device(place))).values()
                values.backward(torch.ones_like(values))
                found.append(values.detach().cpu())
            return found

        return run_simulated(work, 2, device_type=device)

    for own, expected in zip(outputs("cpu"), outputs(device), strict=True):
        torch.testing.assert_close(own, expected)
