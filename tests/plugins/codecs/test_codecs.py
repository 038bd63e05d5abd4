"""What the built-in codecs promise, and how tables, sharders and constraints ask for codecs."""

from __future__ import annotations

import json
import math
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from tests.drawn import drawn
from tests.plugins.built_in import built_in
from torch import Tensor

import shardwright as sw
from shardwright import Codec, _fbgemm
from shardwright.host import host
from shardwright_plugins.codecs import int8
from shardwright_testing.codecs import check_codec

CODECS = built_in("codecs")
with_fbgemm = pytest.mark.skipif(not _fbgemm.available(), reason="FBGEMM is not installed")
_FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
_MAGNITUDES = st.sampled_from([1e-42, 1e-30, 1e-9, 1e-6, 1e-3, 1.0, 7e4, 1e30])


def codec_of(name: str) -> Codec:
    return host().codecs.create(name)


def round_trip(codec: Codec, values: Tensor) -> Tensor:
    encoded = torch.full((values.shape[0], codec.row_bytes(values.shape[1])), 0xAB, dtype=torch.uint8)
    codec.encode(values, encoded)
    decoded = torch.full(values.shape, -7.0)
    codec.decode(encoded, decoded)
    return decoded


@st.composite
def blocks(draw: st.DrawFn) -> Tensor:
    """Blocks of any floats, or of one magnitude with offsets, as embeddings and gradients are."""
    shape = draw(st.tuples(st.integers(0, 6), st.integers(1, 9)))
    if draw(st.booleans()):
        return torch.from_numpy(draw(hnp.arrays(np.float32, shape, elements=_FLOATS)))
    noise = draw(hnp.arrays(np.float64, shape, elements=st.floats(-1, 1)))
    offset = draw(hnp.arrays(np.float64, (shape[0], 1), elements=st.sampled_from([0.0, 1.0, -300.0])))
    return torch.from_numpy(((noise + offset) * draw(_MAGNITUDES)).astype(np.float32))


@pytest.fixture(params=["fbgemm", "torch"])
def implementation(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """With FBGEMM's operators, and as if there were none."""
    if request.param == "torch":
        monkeypatch.setattr(_fbgemm, "serves", lambda operator, device_type: False)
    elif not _fbgemm.available():
        pytest.skip("FBGEMM is not installed")
    return request.param


@pytest.mark.parametrize("name", CODECS)
def test_codec_nan_is_kept(name: str, implementation: str) -> None:
    values = torch.ones(3, 4)
    values[1, 2] = torch.nan
    decoded = round_trip(codec_of(name), values)
    assert decoded[1, 2].isnan()
    assert torch.equal(decoded[::2], values[::2])


def test_codecs_bytes_of_a_vector_of_64_columns() -> None:
    sizes = {name: codec_of(name).row_bytes(64) for name in ("fp32", "fp16", "bf16", "int8")}
    assert sizes == {"fp32": 256, "fp16": 128, "bf16": 128, "int8": 72}


def test_fp16_saturates_what_is_too_large_and_infinities() -> None:
    values = torch.tensor([[65504.0, 65519.0, 65520.0, 1e30, torch.inf, -torch.inf, -7e4]])
    limit = 65504.0
    expected = torch.tensor([[limit, limit, limit, limit, limit, -limit, -limit]])
    assert torch.equal(round_trip(codec_of("fp16"), values), expected)


def test_fp16_denormals_are_kept_and_smaller_values_become_zero() -> None:
    values = torch.tensor([[2.0**-24, 3 * 2.0**-24, 2.0**-26, -(2.0**-15)]])
    expected = torch.tensor([[2.0**-24, 3 * 2.0**-24, 0.0, -(2.0**-15)]])
    assert torch.equal(round_trip(codec_of("fp16"), values), expected)


def test_bf16_keeps_infinities_and_the_magnitude_of_small_gradients() -> None:
    values = torch.tensor([[torch.inf, -torch.inf, 1e-30, -1e-38, 3.4e38]])
    decoded = round_trip(codec_of("bf16"), values)
    assert torch.equal(decoded[0, :2], values[0, :2])
    torch.testing.assert_close(decoded[0, 2:4], values[0, 2:4], rtol=2**-8, atol=0)
    assert decoded[0, 4] == torch.inf


def test_float_codecs_round_as_numpy_and_torch_do() -> None:
    values = torch.randn(20, 13) * 100
    assert torch.equal(
        round_trip(codec_of("fp16"), values),
        torch.from_numpy(values.numpy().astype(np.float16).astype(np.float32)),
    )
    assert torch.equal(round_trip(codec_of("bf16"), values), values.bfloat16().float())
    assert torch.equal(round_trip(codec_of("fp32"), values), values)


def test_int8_is_the_row_wise_format_by_an_independent_reading(implementation: str) -> None:
    values = torch.randn(5, 6) * 1e-7
    encoded = torch.empty(5, 14, dtype=torch.uint8)
    codec_of("int8").encode(values, encoded)
    for row, written in zip(values.tolist(), encoded.numpy(), strict=True):
        scale, least = struct.unpack("<2f", written[6:].tobytes())
        assert least == min(row)
        assert math.isclose(scale, (max(row) - min(row)) / 255, rel_tol=1e-5)
        for value, code in zip(row, written[:6].tolist(), strict=True):
            assert abs(code * scale + least - value) <= scale


def test_int8_row_with_an_infinity_becomes_nan_and_no_other(implementation: str) -> None:
    values = torch.ones(4, 3)
    values[1, 0], values[3, 2] = torch.inf, -torch.inf
    decoded = round_trip(codec_of("int8"), values)
    assert decoded[1].isnan().all()
    assert decoded[3].isnan().all()
    assert torch.equal(decoded[::2], values[::2])


def test_int8_largest_floats_do_not_become_infinite(implementation: str) -> None:
    most = torch.finfo(torch.float32).max
    rows = torch.rand(300, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2 - 1
    rows[:, 1] = 1.0 - 1e-7 * (torch.arange(300) % 5)  # at the end of what float32 holds, and near it
    values = (rows * most).float()
    check_codec(codec_of("int8"), torch.cat([values, -values]))


def test_int8_rows_of_one_value_come_back_exactly(implementation: str) -> None:
    values = torch.tensor([0.1, -3e-9, 1e30, 2e38, 0.0, -2e38, 1e-40])[:, None].expand(7, 5)
    assert torch.equal(round_trip(codec_of("int8"), values), values)


def test_int8_small_rows_beside_large_ones_keep_their_own_precision(implementation: str) -> None:
    values = torch.randn(6, 16) * torch.tensor([1.0, 1e-9, 1e-3, 0.0, 1e-20, 1e4])[:, None]
    check_codec(codec_of("int8"), values)
    relative = (round_trip(codec_of("int8"), values) - values).norm(dim=1) / values.norm(dim=1)
    assert (relative[[0, 1, 2, 4, 5]] < 0.01).all()


@with_fbgemm
@drawn(blocks(), quick=60, thorough=300)
def test_int8_bytes_of_either_implementation_are_read_alike_by_both(values: Tensor) -> None:
    """A rank with FBGEMM and one without understand each other."""
    codec, written = codec_of("int8"), []
    bound = codec.error_bound(values)
    for write in (codec.encode, int8._write):
        encoded = torch.zeros(values.shape[0], codec.row_bytes(values.shape[1]), dtype=torch.uint8)
        if values.numel():
            write(values, encoded)
        written.append(encoded)
    for encoded in written:
        by_fbgemm = torch.empty_like(values)
        codec.decode(encoded, by_fbgemm)
        scale, least = int8._parameters(encoded).double().unbind(1)
        by_hand = encoded[:, :-8].double() * scale[:, None] + least[:, None]
        assert ((by_fbgemm.double() - values.double()).abs() <= bound).all()
        assert ((by_hand - by_fbgemm.double()).abs() <= bound).all()


HALF = sw.QCommsConfig(forward_precision=sw.CommType.FP16, backward_precision=sw.CommType.BF16)


def planned(tables: list[sw.TableSpec], **constraints: Any) -> sw.ShardingPlan:
    topology = sw.Topology(world_size=2, compute_device="cpu")
    return sw.EmbeddingShardingPlanner(topology=topology, constraints=constraints or None).plan_tables(tables)


def test_comm_type_is_the_registered_names_under_torchrecs_name() -> None:
    assert sw.CommType.FP16.value == "fp16"
    assert sw.CommType.INT8 == "int8"
    with pytest.raises(AttributeError, match=r"no codec 'fp61'.*Did you mean 'fp16'"):
        _ = sw.CommType.FP61


def test_qcomms_config_bytes_of_a_vector_are_those_of_each_direction() -> None:
    config = sw.QCommsConfig("fp16", "int8")
    assert (config.result_row_bytes(10), config.gradient_row_bytes(10)) == (20, 18)


def test_qcomms_config_identity_is_no_codec_at_run_time() -> None:
    assert sw.QCommsConfig("fp32", "float16").forward is None
    assert sw.QCommsConfig("fp32", "float16").backward.name == "fp16"


def test_qcomms_config_over_takes_each_direction_by_itself() -> None:
    assert sw.QCommsConfig(backward_precision="int8").over(HALF) == sw.QCommsConfig("fp16", "int8")
    assert HALF.over(sw.QCommsConfig("int8", "int8")) == HALF
    assert HALF.over(None) == HALF


@pytest.mark.parametrize("wrong", [3, "", ["fp16"]])
def test_qcomms_config_precision_that_is_no_name_is_refused(wrong: Any) -> None:
    with pytest.raises(sw.InvalidInputError, match="forward_precision must"):
        sw.QCommsConfig(forward_precision=wrong)


@pytest.mark.parametrize("sharder", [sw.EmbeddingBagCollectionSharder, sw.EmbeddingCollectionSharder])
def test_sharder_unknown_codec_is_refused_at_once_with_the_nearest(sharder: Any) -> None:
    with pytest.raises(sw.UnknownPluginError, match=r"no codec 'int88'\. Known: bf16.*Did you mean 'int8'"):
        sharder(qcomm_codecs_registry=sw.QCommsConfig("int88"))
    with pytest.raises(sw.InvalidInputError, match="qcomm_codecs_registry must be a QCommsConfig"):
        sharder(qcomm_codecs_registry="fp16")


def test_sharder_codecs_are_known_when_planning_and_stand_in_the_plan() -> None:
    module = sw.EmbeddingBagCollection(
        [sw.EmbeddingBagConfig(name="t", num_embeddings=9, embedding_dim=4, feature_names=["f"])],
        device="meta",
    )
    sharder = sw.EmbeddingBagCollectionSharder(qcomm_codecs_registry=HALF)
    (table,) = sharder.tables(module)
    assert table.qcomms_config == HALF
    assert planned([table]).plan[""]["t"].qcomms_config == HALF


def test_constraint_codecs_prevail_over_the_sharders_in_what_they_say() -> None:
    tables = [sw.TableSpec(name, 10, 4, ["f"], qcomms_config=HALF) for name in ("user_id", "item_id")]
    plan = planned(tables, **{"user_*": sw.ParameterConstraints(qcomms_config=sw.QCommsConfig("int8"))}).plan[
        ""
    ]
    assert plan["user_id"].qcomms_config == sw.QCommsConfig("int8", "bf16")
    assert plan["item_id"].qcomms_config == HALF


def test_plan_document_has_codecs_and_gives_them_back() -> None:
    plan = planned(
        [sw.TableSpec("a", 10, 4, ["f"]), sw.TableSpec("b", 10, 4, ["f"])],
        a=sw.ParameterConstraints(qcomms_config=sw.QCommsConfig(backward_precision="half")),
    )
    document = json.loads(plan.to_json())
    assert document["modules"][""]["a"]["qcomms_config"] == {"backward_precision": "fp16"}
    assert "qcomms_config" not in document["modules"][""]["b"]
    assert {"kind": "codecs", "name": "fp16"}.items() <= {
        key: value for own in document["plugins"] if own["name"] == "fp16" for key, value in own.items()
    }.items()
    assert sw.ShardingPlan.from_json(plan.to_json()) == plan
    assert "backward_precision='fp16'" in repr(plan)


@pytest.mark.parametrize(
    ("entry", "told"),
    [
        ({"forward_precision": "fp61"}, r"table 'a': no codec 'fp61'.*Did you mean 'fp16'"),
        (
            {"forward": "fp16"},
            r"table 'a': qcomms_config has the key 'forward', which is not read. Known: .*forward_precision",
        ),
        (
            {"forward_precision": 16},
            r"table 'a': qcomms_config.forward_precision must be null or a text, got 16",
        ),
        ("fp16", r"table 'a': qcomms_config must be an object"),
    ],
)
def test_plan_document_wrong_codecs_are_told_with_module_and_table(entry: Any, told: str) -> None:
    document = json.loads(planned([sw.TableSpec("a", 10, 4, ["f"])]).to_json())
    document["modules"][""]["a"]["qcomms_config"] = entry
    with pytest.raises(sw.PlanError, match=told):
        sw.ShardingPlan.from_json(json.dumps(document))
