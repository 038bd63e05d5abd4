"""Quantized rows are within their bounds, and their collections give what float ones of the same rows give."""

from __future__ import annotations

import copy
import io
import math
import struct
from typing import Any

import numpy as np
import pytest
import shardwright_serving as serving
import torch
from hypothesis import given
from hypothesis import strategies as st
from shardwright_serving.rows.formats import SERVED, row_bytes
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


INTEGERS = {"INT8": 8, "INT4": 4, "INT2": 2}


def e4m3(byte: int) -> float:
    """The value of a float8 e4m3: sign, four bits of exponent (bias 7), three of mantissa."""
    sign, exponent, mantissa = -1.0 if byte & 128 else 1.0, byte >> 3 & 15, byte & 7
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def decoded(row: bytes, precision: str, dim: int) -> list[float]:
    """A row's values by Python's own numbers."""
    if precision == "FP16":
        return list(struct.unpack(f"<{dim}e", row))
    scale, bias = struct.unpack("<2e", row[:4])
    if precision == "FP8":
        return [e4m3(byte) * scale + bias for byte in row[4:]]
    bits = INTEGERS[precision]
    number = int.from_bytes(row[4:], "little")  # the first column in the lowest bits
    return [(number >> bits * column & (1 << bits) - 1) * scale + bias for column in range(dim)]


def drawn(rows: int, columns: int, spread: float, offset: float, seed: int) -> torch.Tensor:
    values = np.random.default_rng(seed).uniform(-1, 1, (rows, columns)) * spread + offset
    return torch.from_numpy(values).float()


weights = st.builds(
    drawn,
    st.integers(1, 5),
    st.integers(1, 40),
    st.sampled_from([0.0, 1e-9, 1e-5, 1e-2, 1.0, 300.0, 6e4]),
    st.sampled_from([0.0, 0.3, -50.0]),
    st.integers(0, 1000),
)


@pytest.mark.parametrize("precision", PRECISIONS)
@given(weight=weights)
def test_quantized_rows_are_within_their_bound_and_read_as_their_layout_says(
    precision: str, weight: torch.Tensor
) -> None:
    largest = {"FP16": 65504.0, "FP8": 57344.0}.get(precision, torch.inf)
    weight = weight.clamp(-largest, largest)
    rows, columns = weight.shape
    found = serving.quantize_rows(weight, precision)
    assert found.packed().dtype == (torch.float16 if precision == "FP16" else torch.uint8)
    stored = found.packed().view(torch.uint8)
    assert stored.shape == (rows, row_bytes(sw.DataType(precision), columns))
    wanted = np.array([decoded(bytes(row.tolist()), precision, columns) for row in stored])
    np.testing.assert_array_equal(found.dequantized().numpy(), wanted.astype(np.float32))
    rounding = 2.0**-22 * (weight.abs().amax(1, keepdim=True) + found.scale.float() * 255)
    assert ((found.dequantized() - weight).abs() <= found.error_bound() + rounding).all()
    assert torch.equal(found.error_bound().isfinite(), torch.ones(rows, 1, dtype=torch.bool))


@pytest.mark.parametrize("precision", list(INTEGERS))
@given(weight=weights)
def test_step_of_integers_is_no_longer_than_their_levels_need(precision: str, weight: torch.Tensor) -> None:
    levels = (1 << INTEGERS[precision]) - 1
    found = serving.quantize_rows(weight, precision)
    span = weight.amax(1, keepdim=True) - weight.amin(1, keepdim=True)
    # Beside what float16 rounds: the bias down, the scale up.
    allowed = (span + weight.abs().amax(1, keepdim=True) * 2.0**-10) / levels * (1 + 2.0**-10) + 2.0**-23
    assert (found.scale.float() <= allowed).all()


@pytest.mark.parametrize("precision", PRECISIONS)
@given(mantissa=st.integers(-15, 15), exponent=st.integers(-12, 9), columns=st.integers(1, 9))
def test_constant_rows_are_exact(precision: str, mantissa: int, exponent: int, columns: int) -> None:
    """Of numbers that the precision holds: of 11 bits those of float16, of 4 bits those of e4m3."""
    value = math.ldexp(mantissa, exponent)
    weight = torch.full((2, columns), value)
    assert torch.equal(serving.quantize_rows(weight, precision).dequantized(), weight)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), 1e8])
def test_rows_that_cannot_be_quantized_raise_naming_the_row(precision: str, wrong: float) -> None:
    weight = torch.zeros(3, 4)
    weight[1, 2] = wrong
    advice = "scale the table down" if wrong == 1e8 else "mend the weights"
    with pytest.raises(sw.InvalidInputError, match=r"row 1 has values from .*" + advice):
        serving.quantize_rows(weight, precision)


@pytest.mark.parametrize(
    "wrong", [torch.zeros(3), torch.zeros(3, 4, dtype=torch.int64), np.zeros((3, 4)), torch.zeros(3, 0)]
)
def test_what_is_no_matrix_of_floats_raises(wrong: Any) -> None:
    with pytest.raises(sw.InvalidInputError, match="weight must"):
        serving.quantize_rows(wrong)
    with pytest.raises(sw.UnsupportedError, match=r"cannot be quantized to INT9; possible: INT8, "):
        serving.quantize_rows(torch.zeros(1, 4), "INT9")
