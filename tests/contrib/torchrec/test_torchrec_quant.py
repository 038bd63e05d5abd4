"""Quantized tables give what float tables give, within half a step a row; cut, copied and traced they stay the same."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from shardwright_serving.tables import kernel_lookups
from shardwright_torchrec import quant
from tests.contrib.serving.tables.quantized_tables import batch, outputs, tables_of

import shardwright as sw
from shardwright import _fbgemm
from shardwright.host import host

pytestmark = pytest.mark.usefixtures("serving", "scripting")
KERNELS = ["quant_torch", "quant_fbgemm", "quant_numba"]


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which lookup serves."""
    name = str(request.param)
    kernel = host().compute_kernels.create(name)
    if name == "quant_fbgemm" and not _fbgemm.available():
        pytest.skip(str(_fbgemm.reason()))
    monkeypatch.setattr(kernel_lookups, "preferred_kernel", lambda *_: kernel)
    return name


def collection(pooling: str, *, is_weighted: bool = False) -> Any:
    return tables_of(pooling, (8, 12 if pooling != "NONE" else 8, 4), is_weighted=is_weighted)


def table_modules(module: Any) -> Any:
    return module.embedding_bags if hasattr(module, "embedding_bags") else module.embeddings


def dequantized(module: Any, quantized: Any) -> Any:
    """The float collection with what the quantized tables hold."""
    other = copy.deepcopy(module)
    with torch.no_grad():
        for name, block in table_modules(quantized).items():
            table_modules(other)[name].weight.copy_(block.rows.dequantized())
    return other


@given(
    st.integers(1, 5),
    st.integers(1, 40),
    st.sampled_from([0.0, 1e-9, 1e-5, 1e-2, 1.0, 300.0, 6e4]),
    st.sampled_from([0.0, 0.3, -50.0]),
    st.integers(0, 1000),
)
def test_quantized_rows_are_within_half_a_step(
    rows: int, columns: int, spread: float, offset: float, seed: int
) -> None:
    weight = torch.from_numpy(
        np.random.default_rng(seed).uniform(-1, 1, (rows, columns)) * spread + offset
    ).float()
    found = quant.quantize_rows(weight)
    assert found.values.dtype == torch.uint8
    rounding = 2.0**-22 * (weight.abs().max() + found.scale.float() * 255)
    assert ((found.dequantized() - weight).abs() <= found.error_bound() + rounding).all()
    # A step is no longer than what 256 levels need, but for what float16 rounds.
    span = weight.amax(1, keepdim=True) - weight.amin(1, keepdim=True)
    allowed = (span + weight.abs().amax(1, keepdim=True) * 2.0**-10) / 255 * (1 + 2.0**-10) + 2.0**-23
    assert (found.scale.float() <= allowed).all()


@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 1e8])
def test_rows_that_cannot_be_quantized_raise_naming_the_row(wrong: float) -> None:
    weight = torch.zeros(3, 4)
    weight[1, 2] = wrong
    advice = "scale the table down" if wrong == 1e8 else "mend the weights"
    with pytest.raises(sw.InvalidInputError, match=rf"row 1 has values from .*{advice}"):
        quant.quantize_rows(weight)


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize(
    ("pooling", "is_weighted"),
    [("SUM", False), ("SUM", True), ("MEAN", False), ("MEAN", True), ("NONE", False)],
)
def test_quantized_collection_gives_what_float_tables_of_its_values_give(
    pooling: str, is_weighted: bool
) -> None:
    module = collection(pooling, is_weighted=is_weighted)
    quantized = quant.quantize_embeddings(module)
    features = batch(is_weighted=is_weighted)
    found, wanted = outputs(quantized(features)), outputs(dequantized(module, quantized)(features))
    torch.testing.assert_close(found, wanted.detach())
    largest_step = max(float(block.rows.error_bound().max()) for block in table_modules(quantized).values())
    most_ids = 1 if pooling == "NONE" else 4
    error = float((found - outputs(module(features)).detach()).abs().max())
    assert 0 < error <= most_ids * largest_step + 1e-6
    assert not found.requires_grad


@pytest.mark.usefixtures("kernel")
@pytest.mark.parametrize("pooling", ["MEAN", "NONE"])
@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "column_wise", "table_row_wise", "data_parallel"])
def test_sharded_quantized_collection_equals_unsharded(kind: str, pooling: str) -> None:
    model = quant.quantize_embeddings(torch.nn.Sequential(collection(pooling)))
    rules = {
        name: sw.ParameterConstraints(sharding_types=[kind], min_partition=4) for name in ("a", "b", "c")
    }
    sharded, plan = quant.shard_quant_model(model, world_size=3, constraints=rules)
    assert {one.sharding_type for one in plan.plan["0"].values()} == {kind}
    if kind == "row_wise":
        assert len(sharded[0].blocks_of("a")) == 3
    torch.testing.assert_close(outputs(sharded(batch())), outputs(model(batch())))
    again, _ = quant.shard_quant_model(model, sharding_plan=plan)
    torch.testing.assert_close(outputs(again(batch())), outputs(model(batch())))
    if len(sharded[0].blocks_of("a")) > 1:
        with pytest.raises(sw.UnsupportedError, match="cut already"):
            quant.shard_quant_model(sharded, sharding_plan=plan)


@pytest.mark.usefixtures("kernel")
def test_quantized_collection_copied_saved_and_loaded_gives_the_same() -> None:
    quantized = quant.quantize_embeddings(collection("SUM"))
    before = outputs(quantized(batch()))
    assert torch.equal(outputs(copy.deepcopy(quantized)(batch())), before)
    other = quant.quantize_embeddings(collection("SUM"))
    with torch.no_grad():
        for parameter in other.buffers():
            parameter.zero_()
    assert not outputs(other(batch())).any()
    file = io.BytesIO()
    torch.save(quantized.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    assert torch.equal(outputs(other(batch())), before)
    other.load_state_dict({name: value * 0 for name, value in other.state_dict().items()}, assign=True)
    assert not outputs(other(batch())).any()


def test_quantized_model_takes_a_quarter_of_the_memory_and_has_no_parameters() -> None:
    module = torch.nn.Sequential(
        sw.EmbeddingBagCollection(
            [sw.EmbeddingBagConfig(name="t", num_embeddings=100, embedding_dim=64, feature_names=["f"])]
        )
    )
    quantized = quant.quantize_inference_model(copy.deepcopy(module))
    assert list(quantized.parameters()) == []
    held = sum(buffer.numel() * buffer.element_size() for buffer in quantized.buffers())
    assert held == 100 * (64 + 4)
    assert sum(p.numel() * p.element_size() for p in module.parameters()) == 100 * 64 * 4


def test_trace_has_collections_as_leaves() -> None:
    model = torch.nn.Sequential(quant.quantize_embeddings(collection("SUM")))
    traced = quant.symbolic_trace(model)
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "call_module", "output"]
    assert torch.equal(outputs(traced(batch())), outputs(model(batch())))
    with pytest.raises(sw.UnsupportedError, match="trace the model around it"):
        quant.symbolic_trace(model[0])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            {"values": torch.tensor([99])},
            r"feature 'f': id 99 .* is no row of table 'a', which has rows 0 to 10",
        ),
        ({"keys": ["x"]}, r"feature 'f' of table 'a' is not in the input. The input has: x"),
    ],
)
def test_bad_batch_raises_naming_table_and_feature(change: dict[str, Any], text: str) -> None:
    given_input = {"keys": ["f"], "values": torch.tensor([1]), "lengths": torch.tensor([1])} | change
    with pytest.raises(sw.ShardwrightError, match=text):
        quant.quantize_embeddings(collection("SUM"))(sw.KeyedJaggedTensor(**given_input))


def test_what_cannot_be_quantized_raises() -> None:
    with pytest.raises(
        sw.UnsupportedError, match=r"tables cannot be quantized to torch.float64; possible: torch.int8"
    ):
        quant.quantize_embeddings(collection("SUM"), torch.float64)
    with pytest.raises(sw.UnsupportedError, match=r"table 'b' cannot be quantized to torch.qint32"):
        quant.quantize_embeddings(collection("SUM"), per_table_weight_dtype={"b": torch.qint32})
    with pytest.raises(sw.InvalidInputError, match="no weights to quantize"):
        quant.quantize_embeddings(collection("SUM").to("meta"))
    with pytest.raises(sw.InvalidInputError, match="has no qconfig"):
        quant.QuantEmbeddingBagCollection.from_float(collection("SUM"))
    with pytest.raises(sw.UnsupportedError, match="served from 'cpu', not from 'cuda'"):
        quant.shard_quant_model(quant.quantize_embeddings(collection("SUM")), compute_device="cuda")


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [
        (torch.quint4x2, "INT4"),
        (torch.quint2x4, "INT2"),
        (torch.float8_e4m3fn, "FP8"),
        (torch.float16, "FP16"),
    ],
)
def test_torchs_types_name_precisions(dtype: torch.dtype, precision: str) -> None:
    quantized = quant.quantize_embeddings(collection("SUM"), per_table_weight_dtype={"b": dtype})
    assert [table.data_type.value for table in quantized.tables] == ["INT8", precision, "INT8"]
