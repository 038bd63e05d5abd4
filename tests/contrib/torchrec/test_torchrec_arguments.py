"""Topologies, constraints, models and quantizing take TorchRec's arguments; what is not done is refused by name."""

from __future__ import annotations

import dataclasses
import inspect
from enum import Enum, IntEnum
from typing import Any

import attrs
import pytest
import shardwright_serving as serving
import torch
from shardwright_torchrec.distributed.fbgemm_qcomm_codec import get_qcomm_codecs_registry
from shardwright_torchrec.modules.configs import EmbeddingBagConfig, EmbeddingConfig
from shardwright_torchrec.parallel.constraints import CacheParams, ParameterConstraints
from shardwright_torchrec.parallel.model_parallel import (
    DistributedModelParallel,
    get_unwrapped_module,
)
from shardwright_torchrec.parallel.sharders import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
from shardwright_torchrec.planner.planners import EmbeddingShardingPlanner
from shardwright_torchrec.planner.topologies import Topology
from shardwright_torchrec.planner.types import Storage
from shardwright_torchrec.quant.inference import (
    DEFAULT_QUANT_MAPPING,
    DEFAULT_SHARDERS,
    quantize_inference_model,
    shard_quant_model,
    trim_torch_package_prefix_from_typename,
)
from tests.errors import raises

import shardwright as sw
from shardwright import DataType, InvalidInputError, UnsupportedError
from shardwright.runtime.step.batches.inputs import InputChecks

GIB = 1 << 30
BANDWIDTHS = ("hbm_mem_bw", "ddr_mem_bw", "hbm_to_ddr_mem_bw", "intra_host_bw", "inter_host_bw")


def names_of(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in ("self", "further")]


def test_arguments_stand_in_torchrecs_order() -> None:
    """TorchRec 1.8.0's signatures."""
    assert names_of(Topology.__init__) == [
        *("world_size", "compute_device", "hbm_cap", "ddr_cap", "ssd_cap", "local_world_size", "pod_size"),
        *("hbm_mem_bw", "ddr_mem_bw", "ssd_mem_bw", "hbm_to_ddr_mem_bw", "intra_host_bw", "inter_host_bw"),
        *("bwd_compute_multiplier", "custom_topology_data", "weighted_feature_bwd_compute_multiplier"),
        *("uneven_sharding_perf_multiplier", "generalized_comms_bandwidths", "created_by_factory"),
    ]
    assert names_of(ParameterConstraints.__init__) == [
        *("sharding_types", "compute_kernels", "min_partition", "pooling_factors", "num_poolings"),
        *("batch_sizes", "is_weighted", "cache_params", "enforce_hbm", "stochastic_rounding"),
        *("bounds_check_mode", "feature_names", "output_dtype", "device_group", "key_value_params"),
        "use_virtual_table",
    ]
    assert names_of(CacheParams.__init__) == [
        *("algorithm", "load_factor", "reserved_memory", "precision", "prefetch_pipeline", "stats"),
        "multipass_prefetch_config",
    ]
    assert names_of(EmbeddingCollectionSharder.__init__) == [
        *("fused_params", "qcomm_codecs_registry", "use_index_dedup")
    ]


def test_devices_have_the_memory_of_each_rank() -> None:
    topology = Topology(2, "cuda", [GIB, 2 * GIB], 3 * GIB)
    assert [device.storage for device in topology.devices] == [
        Storage(GIB, 3 * GIB),
        Storage(2 * GIB, 3 * GIB),
    ]
    assert [device.rank for device in topology.devices] == [0, 1]
    assert Topology(1, "cuda", ssd_cap=5, ssd_mem_bw=7).devices[0].storage.ssd == 5


def test_scripts_estimators_read_the_topologys_bandwidths() -> None:
    given = {name: float(place) for place, name in enumerate(BANDWIDTHS, start=1)}
    topology = Topology(2, "cuda", **given)
    assert {name: getattr(topology, name) for name in BANDWIDTHS} == given
    assert all(getattr(Topology(2, "cpu"), name) > 0 for name in BANDWIDTHS)
    assert topology.bwd_compute_multiplier == 2


def test_device_memory_of_a_cpu_is_not_used() -> None:
    topology = Topology(2, "cpu", hbm_cap=GIB, ddr_cap=2 * GIB, hbm_mem_bw=1.0)
    assert topology.devices[1].storage == Storage(0, 2 * GIB)
    assert topology == Topology(2, "cpu", ddr_cap=2 * GIB)


@pytest.mark.parametrize(
    "given",
    [
        {"bwd_compute_multiplier": 3},
        {"custom_topology_data": object()},
        {"uneven_sharding_perf_multiplier": 0.5},
        {"pod_size": 3},
    ],
)
def test_topology_refuses_what_is_not_done_by_name(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(sw.UnsupportedError, match=name):
        Topology(4, "cpu", local_world_size=2, **given)


class Mode(Enum):
    FATAL = 0


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        ({"enforce_hbm": True}, "compute_kernels"),
        ({"stochastic_rounding": True}, "fused_params={'stochastic_rounding': True}"),
        ({"bounds_check_mode": Mode.FATAL}, "fused_params={'bounds_check_mode': ...}"),
        ({"output_dtype": sw.DataType.FP16}, "qcomms_config"),
        ({"use_virtual_table": True}, "hash-embedding"),
    ],
)
def test_constraints_refuse_what_is_not_done_by_name(given: dict[str, Any], instead: str) -> None:
    (name,) = given
    with pytest.raises(sw.UnsupportedError) as caught:
        ParameterConstraints(**given)
    assert f"ParameterConstraints({name}=" in str(caught.value)
    assert instead in str(caught.value)


def test_constraints_that_ask_for_what_is_done_are_shardwrights() -> None:
    cache = CacheParams("lfu", 0.5, prefetch_pipeline=True)
    rule = ParameterConstraints(
        ["row_wise"],
        pooling_factors=[2.0],
        cache_params=cache,
        enforce_hbm=False,
        feature_names=["a"],
        output_dtype=sw.DataType.FP32,
    )
    assert rule.to_data() == {
        "sharding_types": ["row_wise"],
        "pooling_factors": [2.0],
        "cache_params": {"load_factor": 0.5, "algorithm": "lfu"},
    }
    assert rule.feature_names == ["a"]
    assert attrs.evolve(rule, ranks=(1,)).ranks == (1,)
    assert CacheParams() == CacheParams(load_factor=None)


def test_constraints_can_be_changed_after_they_were_made() -> None:
    asked = ParameterConstraints()
    before = hash(asked)
    asked.min_partition = 4
    assert asked == ParameterConstraints(min_partition=4)
    assert hash(asked) == hash(ParameterConstraints(min_partition=4)) != before
    with pytest.raises(sw.UnsupportedError, match="fused_params"):
        asked.stochastic_rounding = True
    with pytest.raises(AttributeError, match="min_partitions"):
        asked.min_partitions = 4


def test_configurations_can_be_changed_after_they_were_made() -> None:
    table = EmbeddingBagConfig(name="t", num_embeddings=6, embedding_dim=8, feature_names=["f"])
    table.data_type = sw.DataType.FP16
    table.num_embeddings_post_pruning = None
    assert table.num_embeddings_post_pruning is None
    assert sw.EmbeddingBagCollection([table]).embedding_bags["t"].weight.dtype is torch.float16
    with pytest.raises(sw.InvalidInputError, match="num_embeddings"):
        table.num_embeddings = -1
    with pytest.raises(sw.UnsupportedError, match="num_embeddings_post_pruning=5"):
        table.num_embeddings_post_pruning = 5  # type: ignore[assignment]


def test_cache_keeps_rows_in_the_tables_data_type_and_no_other() -> None:
    table = sw.EmbeddingBagConfig(
        name="t", num_embeddings=6, embedding_dim=8, feature_names=["f"], data_type=sw.DataType.FP16
    )

    def plan(precision: Any) -> sw.ShardingPlan:
        rule = ParameterConstraints(cache_params=CacheParams(precision=precision))
        planner = EmbeddingShardingPlanner(Topology(2, "cpu", GIB), constraints={"t": rule}, debug=False)
        return planner.plan(
            sw.EmbeddingBagCollection([table], device="meta"), [EmbeddingBagCollectionSharder()]
        )

    assert plan(sw.DataType.FP16) == plan(None)
    with pytest.raises(sw.UnsupportedError, match=r"'t'.* FP16"):
        plan(sw.DataType.FP32)


def test_planner_warns_of_constraints_for_tables_that_are_not_there() -> None:
    table = sw.EmbeddingBagConfig(name="user", num_embeddings=6, embedding_dim=8, feature_names=["u"])
    constraints = {
        name: ParameterConstraints(sharding_types=["row_wise"]) for name in ("user", "usr", "item")
    }
    planner = EmbeddingShardingPlanner(Topology(2, "cpu", GIB), constraints=constraints, debug=False)
    with pytest.warns(RuntimeWarning) as caught:
        plan = planner.plan(
            sw.EmbeddingBagCollection([table], device="meta"), [EmbeddingBagCollectionSharder()]
        )
    assert plan.plan[""]["user"].sharding_type == "row_wise"
    texts = sorted(str(warning.message) for warning in caught)
    assert [text.split(" is ")[0] for text in texts] == ["constraints['item']", "constraints['usr']"]
    assert "Did you mean 'user'? It is left out." in texts[1]
    assert "usr" not in plan.to_json()


def test_use_index_dedup_sends_each_id_once() -> None:
    from shardwright_dedup import DedupEmbeddingCollection

    table = sw.EmbeddingConfig(9, 4, "t", feature_names=["f"])
    sharders = [EmbeddingCollectionSharder({"optimizer": "adam"}, None, True)]
    env = sw.ShardingEnv.local(device_type="cpu")
    model = sw.DistributedModelParallel(sw.EmbeddingCollection([table]), env=env, sharders=sharders)
    assert [type(each) for each in model.sharded_modules.values()] == [DedupEmbeddingCollection]
    assert model(sw.KeyedJaggedTensor.from_lists({"f": [[7, 7], [7]]}))["f"].values().shape == (3, 4)


@pytest.mark.parametrize("kind", [EmbeddingConfig, EmbeddingBagConfig])
def test_configuration_takes_torchrecs_fields_and_is_replaced(kind: Any) -> None:
    table = kind(10, 8, "t", feature_names=["f"], need_pos=False, use_virtual_table=False)
    wider = dataclasses.replace(table, embedding_dim=16)
    assert type(wider) is kind
    assert (wider.embedding_dim, wider.name, wider.feature_names) == (16, "t", ["f"])
    with pytest.raises(sw.UnsupportedError, match=r"table 't': use_virtual_table=True .*hash-embedding"):
        kind(10, 8, "t", use_virtual_table=True)


def model() -> torch.nn.Module:
    bags = sw.EmbeddingBagCollection([EmbeddingBagConfig(10, 8, "t", feature_names=["f"])])
    return torch.nn.ModuleDict({"bags": bags, "dense": torch.nn.Linear(8, 1)})


def test_model_takes_torchrecs_arguments() -> None:
    env = sw.ShardingEnv.local(device_type="cpu")
    wrapper = sw.DefaultDataParallelWrapper()
    made = DistributedModelParallel(model(), env, init_parameters=False, data_parallel_wrapper=wrapper)
    assert [name for name, _ in made.bare_named_parameters()] == ["dense.weight", "dense.bias"]
    assert made.sparse_grad_parameter_names() == []
    assert get_unwrapped_module(made) is made.module

    class Own:
        def wrap(self, dmp: Any, env: Any, device: Any) -> None: ...

    with pytest.raises(sw.UnsupportedError, match=r"data_parallel_wrapper=Own.*init_data_parallel=False"):
        DistributedModelParallel(model(), env, data_parallel_wrapper=Own())  # type: ignore[arg-type]
    with pytest.raises(sw.UnsupportedError, match="model_tracker_configs"):
        DistributedModelParallel(model(), env, model_tracker_configs=object())


def test_sharder_takes_the_registry_of_codecs() -> None:
    registry = get_qcomm_codecs_registry(sw.QCommsConfig(forward_precision="half"), device="cpu")
    sharder = EmbeddingBagCollectionSharder(qcomm_codecs_registry=registry)
    assert sharder.qcomm_codecs_registry == sw.QCommsConfig("fp16")
    with raises(sw.UnsupportedError, subject="comm_ops", asked=["POOLED_EMBEDDINGS_ALL_TO_ALL"]):
        get_qcomm_codecs_registry(sw.QCommsConfig(), comm_ops=["POOLED_EMBEDDINGS_ALL_TO_ALL"])


def test_quantizing_takes_torchrecs_arguments() -> None:
    quantized = quantize_inference_model(model(), fp_weight_dtype=torch.int8)
    sharded, plan = shard_quant_model(quantized, sharders=DEFAULT_SHARDERS, ddr_cap=10**9)
    assert type(quantized["bags"]) in DEFAULT_QUANT_MAPPING.values()  # type: ignore[index]
    assert isinstance(sharded["bags"], serving.PlacedQuantEmbeddingBagCollection)  # type: ignore[index]
    assert list(plan.plan) == ["bags"]
    assert trim_torch_package_prefix_from_typename("<torch_package_0>.a.B") == "a.B"
    assert trim_torch_package_prefix_from_typename("a.B") == "a.B"
    with pytest.raises(sw.UnsupportedError, match="fp_weight_dtype"):
        quantize_inference_model(model(), fp_weight_dtype=torch.float16)


class BoundsCheckMode(IntEnum):
    """FBGEMM's, by names and values."""

    FATAL = 0
    WARNING = 1
    IGNORE = 2
    NONE = 3
    V2_FATAL = 6


class SparseType(Enum):
    """FBGEMM's."""

    FP32 = "fp32"
    FP16 = "fp16"


LEVELS = {
    BoundsCheckMode.FATAL: InputChecks.STANDARD,
    BoundsCheckMode.WARNING: InputChecks.WARNING,
    BoundsCheckMode.IGNORE: InputChecks.IGNORE,
    BoundsCheckMode.NONE: InputChecks.OFF,
    BoundsCheckMode.V2_FATAL: InputChecks.STANDARD,
    "warning": InputChecks.WARNING,
    3: InputChecks.OFF,
}


@pytest.mark.parametrize(("mode", "level"), LEVELS.items())
def test_bounds_check_mode_is_a_level_of_input_checks(mode, level):
    sharder = EmbeddingBagCollectionSharder({"bounds_check_mode": mode})
    assert sharder.input_checks is level
    assert sharder.optimizer.parameters == ()


TAKEN = [
    {"output_dtype": DataType.FP32},
    {"output_dtype": SparseType.FP32},
    {"output_dtype": torch.float32},
    {"output_dtype": None},
    {"prefetch_pipeline": True},
    {"cache_reserved_memory": 0.0, "cache_precision": None, "cache_sets": 0, "enforce_hbm": False},
]


@pytest.mark.parametrize("fused_params", TAKEN)
def test_keys_that_ask_for_what_is_done_anyway_are_taken(fused_params):
    sharder = EmbeddingBagCollectionSharder({"optimizer": "adam", **fused_params})
    assert str(sharder.optimizer) == "adam(learning_rate=0.01)"


REFUSED = [
    ({"output_dtype": SparseType.FP16}, UnsupportedError, "lookups give float32.*qcomm_codecs_registry"),
    (
        {"output_dtype": torch.bfloat16},
        UnsupportedError,
        "is torch.bfloat16: lookups give float32",
    ),
    ({"cache_reserved_memory": 2.0}, UnsupportedError, "cache_load_factor says"),
    ({"cache_sets": 32}, UnsupportedError, "cache_load_factor says"),
    (
        {"cache_precision": DataType.FP16},
        UnsupportedError,
        "rows in the cache have the table's own data_type",
    ),
    ({"enforce_hbm": True}, UnsupportedError, "optimizer states lie where the compute kernel keeps them"),
    ({"bounds_check_mode": "loud"}, InvalidInputError, "one of FATAL, WARNING, IGNORE, NONE, got 'loud'"),
]


@pytest.mark.parametrize(("fused_params", "error", "text"), REFUSED)
def test_keys_that_ask_for_what_there_is_not_are_refused_by_name(fused_params, error, text):
    (name,) = fused_params
    with pytest.raises(error, match=rf"{name}.*{text}"):
        EmbeddingBagCollectionSharder(fused_params)


class EmbOptimType(Enum):
    """FBGEMM's names and values (split_embedding_configs.py, 1.8.0)."""

    SGD = "sgd"
    EXACT_SGD = "exact_sgd"
    EXACT_ADAGRAD = "exact_adagrad"
    EXACT_ROWWISE_ADAGRAD = "exact_row_wise_adagrad"
    ROWWISE_ADAGRAD = "row_wise_adagrad"
    PARTIAL_ROWWISE_ADAM = "partial_row_wise_adam"
    LARS_SGD = "lars_sgd"


OPTIMIZERS = {
    EmbOptimType.SGD: "sgd",
    EmbOptimType.EXACT_SGD: "sgd",
    EmbOptimType.EXACT_ADAGRAD: "adagrad",
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: "row_wise_adagrad",
    EmbOptimType.ROWWISE_ADAGRAD: "row_wise_adagrad",
    EmbOptimType.PARTIAL_ROWWISE_ADAM: "partial_row_wise_adam",
    EmbOptimType.LARS_SGD: "lars",
    "rowwise_adagrad": "row_wise_adagrad",
    "Exact_SGD": "sgd",
    "acme_shampoo": "acme_shampoo",
}


@pytest.mark.parametrize("sharder", [EmbeddingBagCollectionSharder, EmbeddingCollectionSharder])
@pytest.mark.parametrize(("optimizer", "name"), OPTIMIZERS.items())
def test_optimizers_have_fbgemms_names_too(sharder, optimizer, name):
    assert sharder({"optimizer": optimizer}).optimizer.name == name


class WeightDecayMode(Enum):
    """FBGEMM's."""

    L2 = 1


def test_members_of_enumerations_are_their_names():
    sharder = EmbeddingBagCollectionSharder({"optimizer": "sgd", "weight_decay_mode": WeightDecayMode.L2})
    assert sharder.optimizer.get("weight_decay_mode", None) == "l2"
