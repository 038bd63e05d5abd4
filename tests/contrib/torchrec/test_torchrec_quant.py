"""Quantized tables under TorchRec's names: cut and traced they stay the same; what they are, tests of serving show."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from shardwright_torchrec import quant
from tests.contrib.serving.tables.quantized_tables import batch, outputs, tables_of

import shardwright as sw

pytestmark = pytest.mark.usefixtures("serving", "scripting")


def collection(pooling: str, *, is_weighted: bool = False) -> Any:
    return tables_of(pooling, (8, 12 if pooling != "NONE" else 8, 4), is_weighted=is_weighted)


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


def test_trace_has_collections_as_leaves() -> None:
    model = torch.nn.Sequential(quant.quantize_embeddings(collection("SUM")))
    traced = quant.symbolic_trace(model)
    assert [node.op for node in traced.graph.nodes] == ["placeholder", "call_module", "output"]
    assert torch.equal(outputs(traced(batch())), outputs(model(batch())))
    with pytest.raises(sw.UnsupportedError, match="trace the model around it"):
        quant.symbolic_trace(model[0])


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
