"""Every registered codec with every registered sharding type: near the unsharded module, by what the codec promises."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from attrs import evolve, frozen
from tests.equality import Case, Table, layouts_of, shardings_of
from tests.pairs import pairwise
from tests.plugins.built_in import built_in
from torch import Tensor, nn

from shardwright import (
    Codec,
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    Layout,
    QCommsConfig,
    ShardingEnv,
    TableSpec,
)
from shardwright.host import host
from shardwright_testing.simulated import run_simulated

RATE = 0.5
BATCH_SIZES = (6, 3, 0, 5)
FLOAT_NOISE = 1e-5


def codec_names() -> list[str]:
    return built_in("codecs")


def lossy_names() -> list[str]:
    return [name for name in codec_names() if not host().codecs.create(name).is_identity]


def sharding_types() -> list[str]:
    return built_in("sharding_types")


@frozen
class Step:
    """What one rank saw of one step."""

    output: Tensor
    weights: dict[str, Tensor]
    blocks: list[Tensor]
    sent: list[tuple[str, list[int]]]


def case_of(sharding_type: str, pooling: str, *, dim: int = 8) -> Case:
    shapes = [(17, ("a",)), (40, ("c", "a")), (3, ("b",))]
    tables = [
        Table(rows, dim, features, pooling, sharding_type, "fused_torch", variant=index, offset=index)
        for index, (rows, features) in enumerate(shapes)
    ]
    return Case(tables, BATCH_SIZES, local_world_size=2)


def config_of(codecs: dict[str, QCommsConfig] | QCommsConfig, name: str) -> QCommsConfig:
    return codecs if isinstance(codecs, QCommsConfig) else codecs.get(name, QCommsConfig())


def train_step(
    case: Case, codecs: dict[str, QCommsConfig] | QCommsConfig, device_type: str = "cpu"
) -> list[Step]:
    """One step of SGD on simulated ranks."""
    module = case.module()
    return run_simulated(
        lambda env: train_rank(case, codecs, env, module),
        case.world_size,
        local_world_size=case.local_world_size,
        device_type=device_type,
    )


def train_rank(
    case: Case, codecs: dict[str, QCommsConfig] | QCommsConfig, env: ShardingEnv, module: nn.Module
) -> Step:
    """One step of SGD on one rank."""
    kind = EmbeddingBagCollectionSharder if case.is_pooled else EmbeddingCollectionSharder
    sharder = kind({"optimizer": "sgd", "learning_rate": RATE})
    plan = {
        name: evolve(own, qcomms_config=config_of(codecs, name))
        for name, own in shardings_of(case, sharder.tables(module)).items()
    }
    sharded = sharder.shard(module, plan, env, env.device_type)
    sent = getattr(env.communicator, "sent_bytes", [])  # simulated ranks count
    before = len(sent)
    device = torch.device(env.device_type)
    values = case.output(sharded(case.batch(0, env.rank).to(device)))
    values.backward(case.gradient(0, env.rank, values).to(device))
    counted = sent[before:]
    blocks = [
        lookup.weight(index).clone()
        for lookup in sharded.engine.lookups
        for index in range(len(lookup.blocks))
    ]
    return Step(values.detach(), sharded.full_state_dict(), blocks, counted)


def largest_error(codec: Codec, largest: float) -> float:
    """How far a value of a row whose values are at most ``largest`` may be from what comes back."""
    return float(codec.error_bound(torch.tensor([[-largest, largest]])).max())


def layout_of(case: Case) -> Layout:
    """The first layout of the case's sharding type."""
    spec = TableSpec("t", 17, case.tables[0].dim, ("a",))
    return layouts_of(case.tables[0].sharding_type, spec, case.world_size, local_world_size=2)[0]


def num_encodings(case: Case) -> int:
    """How often what becomes one output value is encoded: once a row part, and once for sums made inside a host."""
    layout = layout_of(case)
    is_one_sum = case.is_pooled and layout.dataflow.sums_inside_host
    return (layout.row_map.num_parts if case.is_pooled else 1) + is_one_sum


def num_gradient_encodings(case: Case) -> int:
    """How often one bag's gradient is encoded: once for each leg of its way back."""
    return 1 + (case.is_pooled and layout_of(case).dataflow.sums_inside_host)


def unsharded_step(case: Case) -> tuple[list[Tensor], dict[str, Tensor]]:
    module = case.module()
    optimizer = torch.optim.SGD(module.parameters(), lr=RATE)
    outputs = [case.output(module(case.batch(0, rank))) for rank in range(case.world_size)]
    loss = sum(
        (values * case.gradient(0, rank, values)).sum() / case.world_size
        for rank, values in enumerate(outputs)
    )
    loss.backward()
    optimizer.step()
    return [values.detach() for values in outputs], module.state_dict()


def id_counts(case: Case, table: Table) -> Tensor:
    """How often each row of a table is looked up by all ranks."""
    ids = [
        case.batch(0, rank)[feature].values() for rank in range(case.world_size) for feature in table.features
    ]
    return torch.bincount(torch.cat(ids), minlength=table.rows)


@pytest.mark.parametrize(
    ("name", "sharding_type", "pooling"),
    pairwise(product(codec_names(), sharding_types(), ["SUM", "MEAN", "NONE"])),
)
def test_codec_and_type_equal_unsharded_within_the_codecs_bound(
    name: str, sharding_type: str, pooling: str
) -> None:
    case, codec = case_of(sharding_type, pooling), host().codecs.create(name)
    steps = train_step(case, QCommsConfig(name, name))
    outputs, weights = unsharded_step(case)
    largest = max(float(weight.abs().max()) for weight in case.module().state_dict().values())
    largest_sum = largest * (case.max_length if case.is_pooled else 1)
    bound = num_encodings(case) * largest_error(codec, largest_sum) + FLOAT_NOISE
    for step, output in zip(steps, outputs, strict=True):
        assert step.output.shape == output.shape
        assert ((step.output - output).abs() <= bound).all()
    # Gradients are at most 0.7, averaged over the ranks.
    error = num_gradient_encodings(case) * largest_error(codec, 0.7 / case.world_size)
    for table, (key, weight) in zip(case.tables, weights.items(), strict=True):
        allowed = RATE * error * id_counts(case, table)[:, None] + FLOAT_NOISE
        for step in steps:
            assert ((step.weights[key] - weight).abs() <= allowed).all(), key


@pytest.mark.parametrize("pooling", ["SUM", "NONE"])
@pytest.mark.parametrize("name", lossy_names())
def test_copies_stay_equal_bit_for_bit_whatever_is_lost(name: str, pooling: str) -> None:
    case = evolve(case_of("data_parallel", pooling), local_world_size=None)
    plain, coded = train_step(case, QCommsConfig()), train_step(case, QCommsConfig(name, name))
    for step in coded:
        assert all(torch.equal(mine, first) for mine, first in zip(step.blocks, coded[0].blocks, strict=True))
    assert not all(map(torch.equal, coded[0].blocks, plain[0].blocks))


def sent(steps: list[Step], label: str) -> int:
    return sum(sum(sizes) for step in steps for name, sizes in step.sent if name == label)


def test_bytes_of_mixed_codecs_in_one_collective_are_counted_by_table() -> None:
    case = evolve(case_of("table_wise", "SUM", dim=64), batch_sizes=(8, 16), local_world_size=None)
    codecs = {"t0": QCommsConfig("fp16", "int8"), "t1": QCommsConfig("int8", "bf16")}
    steps = train_step(case, codecs)
    bags = 24
    assert [label for label, _ in steps[0].sent] == ["headers", "ids", "results", "gradients"]
    assert sent(steps, "results") == bags * (128 + 2 * 72 + 256)  # t1 has two features
    assert sent(steps, "gradients") == bags * (72 + 2 * 128 + 256)


def test_bytes_of_sequences_are_one_vector_an_id() -> None:
    case = evolve(case_of("row_wise", "NONE", dim=16), batch_sizes=(8, 8), local_world_size=None)
    num_ids = sum(int(id_counts(case, table).sum()) for table in case.tables)
    for name, row_bytes in (("fp32", 64), ("fp16", 32), ("bf16", 32), ("int8", 24)):
        steps = train_step(case, QCommsConfig(name, name))
        assert sent(steps, "results") == sent(steps, "gradients") == num_ids * row_bytes
