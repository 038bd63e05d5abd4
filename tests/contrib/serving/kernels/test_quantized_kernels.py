"""Kernels of quantized tables keep what the kit asks, and give the same bits; FBGEMM rounds weighted sums otherwise."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import shardwright_serving as serving
import torch
from shardwright_serving import FORMATS
from shardwright_serving.plugin import shardwright_compute_kernels
from shardwright_serving.rows.formats import SERVED
from tests.contrib.serving.tables.quantized_tables import outputs, tables_of
from tests.plugins.compute_kernels.loops import is_here, kernel_of, skip_unless_here
from tests.plugins.compute_kernels.test_triton import check, launches_for, loose_kernels

import shardwright as sw
from shardwright_testing import RowFormatTests, ServingKernelTests
from shardwright_testing.kernels.kernel_groups import draw
from shardwright_testing.kernels.loops import block_spec

PRECISIONS = [str(precision) for precision in SERVED]


def sums(kernel: str, blocks: list[Any], batch: Any) -> torch.Tensor:
    """Sums of all bags, ``[B, columns]``; blocks are those of one source."""
    lookup = kernel_of(kernel).build(blocks, device=torch.device("cpu"))
    for index, spec in enumerate(blocks):
        generator = torch.Generator().manual_seed(index)
        whole = torch.randn(spec.block.num_rows, spec.table.embedding_dim, generator=generator)
        lookup.adopt(index, serving.quantize_rows(whole, spec.table.data_type).packed())
    found = lookup.forward(batch.as_bags(), training=False)[0].reshape(-1)
    if kernel_of(kernel).batch_major:
        return found.view(-1, sum(spec.block.num_columns for spec in blocks))
    pieces = found.split([found.numel() // len(blocks)] * len(blocks))
    return torch.cat([piece.view(-1, blocks[0].block.num_columns) for piece in pieces], dim=1)


@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kernel", ["quant_numba", "quant_fbgemm"])
def test_kernels_come_to_the_bits_of_plain_torch(kernel: str, precision: str, is_weighted: bool) -> None:
    columns = 112 if kernel == "quant_fbgemm" else 119  # whole registers, and what is left of them
    blocks = [block_spec(9, columns, data_type=precision, optimizer=None, is_frozen=True) for _ in range(2)]
    if kernel_of(kernel).supports(blocks[0].request) is not True:
        pytest.skip(f"{kernel} does not serve {precision} here")
    batch = draw(blocks, (40,), is_weighted=is_weighted, max_length=30)
    found, wanted = sums(kernel, blocks, batch), sums("quant_torch", blocks, batch)
    if kernel == "quant_fbgemm" and is_weighted:
        torch.testing.assert_close(found, wanted)
    else:
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("wrong", [-1, 9, 2**40])
def test_numba_refuses_an_id_that_is_no_row(wrong: int) -> None:
    block = block_spec(9, 8, data_type="INT8", optimizer=None, is_frozen=True)
    lookup = kernel_of("quant_numba").build([block], device=torch.device("cpu"))
    bags = sw.Bags(torch.tensor([3, wrong]), torch.tensor([2], dtype=torch.int32), None, [[1]])
    with pytest.raises(IndexError, match="no row of its table"):
        lookup.forward(bags, training=False)


@pytest.mark.parametrize(
    ("kernel", "changes", "reason"),
    [
        (
            "quant_numba",
            {"is_frozen": False},
            "the Numba kernel has no backward pass: it serves tables that are",
        ),
        ("quant_numba", {"optimizer": sw.OptimizerSpec("sgd")}, "the Numba kernel has no backward pass"),
        ("quant_numba", {"device": "cuda"}, "the Numba kernel runs on cpu, not on 'cuda'"),
        (
            "quant_torch",
            {"data_type": sw.DataType.BF16},
            "reads rows of INT8, INT4, INT2, FP8, FP16, not of BF16",
        ),
        ("quant_fbgemm", {"data_type": sw.DataType.FP8}, "reads rows of INT8, INT4, INT2, FP16, not of FP8"),
        ("quant_fbgemm", {"num_columns": 6}, "FBGEMM needs INT8 columns in multiples of 4, the block has 6"),
        ("quant_fbgemm", {"device": "tpu"}, "FBGEMM's kernel runs on cpu, cuda, not on 'tpu'"),
    ],
)
def test_supports_refuses_with_its_reason(kernel: str, changes: dict[str, Any], reason: str) -> None:
    skip_unless_here(kernel)
    plain = sw.KernelRequest("cpu", sw.DataType.INT8, 16, 16, is_frozen=True, on_this_machine=True)
    assert kernel_of(kernel).supports(plain) is True
    assert reason in str(kernel_of(kernel).supports(attrs.evolve(plain, **changes)))


def model(pooling: str, *, is_weighted: bool = False) -> Any:
    return tables_of(pooling, (16, 16, 16), is_weighted=is_weighted)


@pytest.mark.parametrize("kernel", ["quant_numba", "quant_fbgemm", "quant_torch"])
@pytest.mark.parametrize("keys", [["f", "g", "h"], ["f", "g", "f2", "h"], ["x", "h", "g", "f"]])
@pytest.mark.parametrize(
    ("pooling", "is_weighted"), [("SUM", False), ("MEAN", False), ("SUM", True), ("NONE", False)]
)
def test_unsharded_collection_gives_the_same_by_every_kernel(
    monkeypatch: pytest.MonkeyPatch, kernel: str, keys: list[str], pooling: str, is_weighted: bool
) -> None:
    skip_unless_here(kernel)
    quantized = serving.quantize_embeddings(
        model(pooling, is_weighted=is_weighted), "INT8", per_table={"b": "INT4"}, output_dtype="FP16"
    )
    batch = sw.KeyedJaggedTensor(
        keys,
        torch.tensor([3, 0, 1, 4, 2, 2, 1]),
        weights=torch.rand(7),
        lengths=torch.tensor([1, 0, 2, 2, 0, 2, 0, 0][: 2 * len(keys)]),
    )
    with monkeypatch.context() as only:
        only.setattr(type(quantized), "_kernel_lookups", lambda self: None)
        wanted = outputs(quantized(batch))
    quantized.use_kernel(kernel)
    assert quantized._kernel_lookups().take(batch)
    found = outputs(quantized(batch))
    if kernel == "quant_fbgemm" and is_weighted:
        torch.testing.assert_close(found, wanted)
    else:
        assert torch.equal(found, wanted)


def test_unsharded_collection_looks_up_what_was_loaded_and_names_what_is_wrong() -> None:
    quantized = serving.quantize_embeddings(model("SUM"))
    batch = sw.KeyedJaggedTensor.from_lists({"f": [[1, 2], [6]], "g": [[], [10]], "h": [[4], []]})
    before = outputs(quantized(batch))
    for name in filter(is_here, ("quant_fbgemm", "quant_torch", None)):
        quantized.use_kernel(name)
        torch.testing.assert_close(outputs(quantized(batch)), before)
    changed = {name: torch.zeros_like(value) for name, value in quantized.state_dict().items()}
    kept = {name: value.clone() for name, value in quantized.state_dict().items()}
    quantized.load_state_dict(changed, assign=True)
    assert not outputs(quantized(batch)).any()
    quantized.load_state_dict(kept)
    assert torch.equal(outputs(quantized(batch)), before)
    wrong = sw.KeyedJaggedTensor.from_lists({"f": [[1, 2], [7]], "g": [[], [10]], "h": [[4], []]})
    for name in filter(is_here, ("quant_fbgemm", "quant_torch", "quant_numba")):
        quantized.use_kernel(name)
        with pytest.raises(sw.InvalidInputError, match=r"feature 'f': id 7 .* is no row of table 'b'"):
            quantized(wrong)
    with pytest.raises(sw.UnknownNameError, match="feature 'f' of table 'a' is not in the input"):
        quantized(sw.KeyedJaggedTensor.from_lists({"g": [[1]], "h": [[1]]}))
    with pytest.raises(sw.UnsupportedError, match="'fused_torch' cannot look these tables up"):
        quantized.use_kernel("fused_torch")


class TestRowFormats(RowFormatTests):
    @pytest.fixture(params=FORMATS)
    def row_format(self, request: pytest.FixtureRequest) -> sw.RowFormat:
        return FORMATS[request.param]


class TestServingKernels(ServingKernelTests):
    @pytest.fixture(params=shardwright_compute_kernels(), ids=lambda kernel: kernel.name)
    def compute_kernel(self, request: pytest.FixtureRequest) -> sw.ComputeKernel:
        kernel: sw.ComputeKernel = request.param()
        return kernel


CHECKS = "tests/contrib/serving/kernels/quant_triton_checks.py"


COMPILE = "tests.contrib.serving.kernels.triton_compile"


@pytest.mark.slow
def test_interpreted_lookups_keep_what_the_kit_and_all_checks_ask() -> None:
    pytest.importorskip("triton")
    check(interpret=True, checks=CHECKS)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [80, 90])
def test_lookups_of_all_cases_compile_to_machine_code(capability: int) -> None:
    found = launches_for(capability, 99, COMPILE)
    assert [line["kernel"] for line in found] == ["look_up_rows"] * 5
    assert all(line["has_machine_code"] and line["rounds_to_nearest"] for line in found)
    # Four INT8 columns are read at once, and four results are written.
    assert "ld8" not in found[0]["accesses"]
    assert "st128" in found[0]["accesses"]


def test_batches_whose_payload_begins_elsewhere_are_compiled_once() -> None:
    pytest.importorskip("triton")
    assert loose_kernels({"look_up_rows": "shardwright_serving.kernels._triton_kernels"}) == ["look_up_rows"]


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_compiled_lookups_keep_what_the_kit_and_all_checks_ask() -> None:
    check(interpret=False, checks=CHECKS)


@pytest.mark.parametrize(("precision", "kernel"), [("INT8", "quant_fbgemm"), ("FP8", "quant_triton")])
def test_served_tables_on_cuda_take_triton_where_fbgemm_has_not_the_precision(
    monkeypatch: pytest.MonkeyPatch, precision: str, kernel: str
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    topology = sw.Topology(world_size=2, compute_device="cuda")
    planner = sw.EmbeddingShardingPlanner(topology=topology, objective="serving")
    table = sw.TableSpec("t", 1000, 64, data_type=precision, optimizer=None, is_frozen=True)
    assert planner.plan_tables([table]).plan[""]["t"].compute_kernel == kernel
