"""Codecs as users choose them: for a module, for a table, in a plan document; and what they are told when wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

import shardwright as sw

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
