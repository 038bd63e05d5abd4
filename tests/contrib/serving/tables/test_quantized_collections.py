"""Collections of quantized tables give what float collections of the dequantized rows give."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import shardwright_serving as serving
import torch
from shardwright_serving.rows.formats import SERVED
from tests.contrib.serving.tables.quantized_tables import batch, outputs, tables_of

import shardwright as sw

PRECISIONS = [str(precision) for precision in SERVED]


def collection(pooling: str, *, is_weighted: bool = False) -> Any:
    return tables_of(pooling, (8, 12, 4), is_weighted=is_weighted, need_indices=True)


def dequantized(module: Any, quantized: Any) -> Any:
    """The float collection with what the quantized tables hold."""
    other = copy.deepcopy(module)
    with torch.no_grad():
        for table in quantized.tables:
            other.table_weight(table.name).copy_(quantized.quantized_rows(table.name).dequantized())
    return other


@pytest.mark.parametrize("output", ["FP32", "FP16", "BF16"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("pooling", "is_weighted"),
    [("SUM", False), ("SUM", True), ("MEAN", False), ("MEAN", True), ("NONE", False)],
)
def test_quantized_collection_gives_what_float_tables_of_its_rows_give(
    pooling: str, is_weighted: bool, precision: str, output: str
) -> None:
    module, features = collection(pooling, is_weighted=is_weighted), batch(is_weighted=is_weighted)
    quantized = serving.quantize_embeddings(module, precision, output_dtype=output)
    wanted = dequantized(module, quantized)(features)
    found = quantized(features)
    dtype = getattr(torch, {"FP32": "float32", "FP16": "float16", "BF16": "bfloat16"}[output])
    assert outputs(found).dtype == dtype
    assert not outputs(found).requires_grad
    assert list(found.keys()) == list(wanted.keys())
    torch.testing.assert_close(outputs(found), outputs(wanted).detach().to(dtype))
    if pooling == "NONE":
        for name, jagged in found.items():
            assert torch.equal(jagged.weights(), wanted[name].weights())


def test_quantized_collection_copied_saved_and_loaded_gives_the_same() -> None:
    quantized = serving.quantize_embeddings(collection("SUM"), "INT4")
    before = outputs(quantized(batch()))
    assert torch.equal(outputs(copy.deepcopy(quantized)(batch())), before)
    other = serving.QuantEmbeddingBagCollection(quantized.tables)
    assert not outputs(other(batch())).any()
    file = io.BytesIO()
    torch.save(quantized.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file))
    assert torch.equal(outputs(other(batch())), before)
    on_meta = serving.QuantEmbeddingBagCollection(quantized.tables, device="meta")
    on_meta.load_state_dict(quantized.state_dict(), assign=True)
    assert torch.equal(outputs(on_meta(batch())), before)


BAGS, LARGE = collection("SUM"), collection("SUM")
torch.nn.init.constant_(LARGE.table_weight("b").detach()[3], 1e8)  # too far apart for bytes


@pytest.mark.parametrize(
    ("module", "arguments", "error", "text"),
    [
        (BAGS, {"dtype": "FP32"}, sw.UnsupportedError, "cannot be quantized to FP32; possible: INT8"),
        (BAGS, {"per_table": {"x": "INT4"}}, sw.UnknownNameError, "per_table names 'x', a table of no"),
        (BAGS, {"output_dtype": "INT8"}, sw.InvalidInputError, "be 'INT8'; possible: FP32, FP16, BF16"),
        (BAGS, {"output_dtype": torch.int8}, sw.InvalidInputError, "torch.int8; possible: FP32, FP16, BF16"),
        (collection("SUM").to("meta"), {}, sw.InvalidInputError, "no weights to quantize"),
        (torch.nn.Linear(1, 1), {}, sw.InvalidInputError, r"no collection of tables .*, its unshard\(\)"),
        (LARGE, {}, sw.InvalidInputError, "table 'b': row 3 has values from"),
    ],
)
def test_what_cannot_be_quantized_raises(
    module: torch.nn.Module, arguments: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        serving.quantize_embeddings(module, **arguments)


def test_rows_of_another_shape_or_table_raise() -> None:
    quantized = serving.quantize_embeddings(collection("SUM"))
    with pytest.raises(sw.InvalidInputError, match="has 7 rows of 12 INT8 columns, got 11 rows of 8 INT8"):
        quantized.set_rows("b", quantized.quantized_rows("a"))
    with pytest.raises(sw.UnknownNameError, match="there is no table 'd'"):
        quantized.quantized_rows("d")
