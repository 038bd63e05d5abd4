"""The public entry points with valid arguments, and values of the wrong kind for each of them.

`entry(name, call, argument=Argument(valid, accepts))` says which of `WRONG` an argument takes; others must be errors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from attrs import field, frozen

import shardwright as sw


def nothing(*arguments: Any, **keywords: Any) -> None:
    """A function of anything."""


WRONG: Mapping[str, Callable[[], Any]] = {
    "none": lambda: None,
    "true": lambda: True,
    "zero": lambda: 0,
    "one": lambda: 1,
    "minus": lambda: -1,
    "five": lambda: 5,
    "float": lambda: 1.5,
    "whole": lambda: 1.0,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "huge": lambda: 10**30,
    "text": lambda: "text",
    "empty": lambda: "",
    "bytes": lambda: b"x",
    "list": lambda: [5],
    "nones": lambda: [None],
    "nolist": list,
    "texts": lambda: ["text"],
    "tuple": lambda: ("a",),
    "dict": lambda: {"a": 1},
    "odd": lambda: {1: 2},
    "nodict": dict,
    "set": lambda: {1},
    "object": object,
    "class": lambda: int,
    "function": lambda: nothing,
    "iterator": lambda: iter(["a"]),
    "ints": lambda: iter([1]),
    "tensor": lambda: torch.tensor([1, 2]),
    "floats": lambda: torch.tensor([1.0, 2.0]),
    "scalar": lambda: torch.tensor(1),
    "array": lambda: np.array([1, 2]),
}
"""Values by a name, made anew for each try."""


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


@frozen
class Argument:
    """A valid value of an argument, which of `WRONG` it takes, and how errors may name it beside by its name."""

    valid: Any
    accepts: frozenset[str] = field(default="", converter=_words)
    says: str = ""
    untried: frozenset[str] = field(default="", converter=_words)


@frozen
class Entry:
    """A public function with its arguments."""

    call: Callable[..., Any]
    arguments: Mapping[str, Argument]

    def with_wrong(self, wrong: Mapping[str, Any]) -> Any:
        """What comes of a call with some values in place of valid ones."""
        return self.call(**{name: argument.valid for name, argument in self.arguments.items()} | dict(wrong))


ENTRIES: dict[str, Entry] = {}

A = Argument
_NUMBER = "zero one five float whole huge"
_NAMES = "none texts tuple iterator"
_INDICES = "zero one five"  # of devices that may be there
DEVICE_OR_NONE = A("cpu", "none", untried=_INDICES)
T = torch.tensor


def entry(name: str, call: Callable[..., Any], /, **arguments: Argument) -> None:
    """Add an entry point."""
    ENTRIES[name] = Entry(call, arguments)


def bag_table() -> sw.EmbeddingBagConfig:
    return sw.EmbeddingBagConfig(name="t", num_embeddings=10, embedding_dim=8, feature_names=["f"])


def sequence_table() -> sw.EmbeddingConfig:
    return sw.EmbeddingConfig(name="t", num_embeddings=10, embedding_dim=8, feature_names=["f"])


def features() -> sw.KeyedJaggedTensor:
    return sw.KeyedJaggedTensor(["f", "g"], T([1, 2, 3]), lengths=T([1, 0, 1, 1]))


def bags() -> sw.JaggedTensor:
    return sw.JaggedTensor(T([1, 2, 3]), T([1.0, 1.0, 1.0]), lengths=T([1, 2]))


def pooled() -> sw.KeyedTensor:
    return sw.KeyedTensor(["a", "b"], [1, 2], torch.zeros(2, 3))


def parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(3, 4))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def keyed() -> sw.KeyedOptimizer:
    return sw.KeyedOptimizerWrapper({"w": parameter()}, sgd)


def topology() -> sw.Topology:
    return sw.Topology(2, "cpu")


def table() -> sw.TableSpec:
    return sw.TableSpec("t", 10, 8, ["f"])


def sharder(**keywords: Any) -> Any:
    return sw.EmbeddingBagCollectionSharder(fused_params=keywords)


def planner_of(**keywords: Any) -> Any:
    return sw.EmbeddingShardingPlanner(**keywords).plan_tables([table()])


BATCH = {
    "values": A(T([1, 2, 3])),
    "weights": A(T([1.0, 1.0, 1.0]), "none", says="weight"),
    "lengths": A(T([1, 2]), "tensor array"),
}
entry("JaggedTensor", sw.JaggedTensor, **BATCH)
entry("JaggedTensor by offsets", partial(sw.JaggedTensor, T([1, 2, 3])), offsets=A(T([0, 1, 3])))
KEYED = {
    "keys": A(["a", "b"]),
    "stride": A(1, "none one"),
    "columns": A({"count": T([1, 2, 3])}, "none nodict", says="column"),
}
entry("KeyedJaggedTensor", sw.KeyedJaggedTensor, **KEYED, **BATCH)
entry("KeyedJaggedTensor.from_lengths_sync", sw.KeyedJaggedTensor.from_lengths_sync, **KEYED, **BATCH)
entry(
    "KeyedJaggedTensor.from_offsets_sync",
    sw.KeyedJaggedTensor.from_offsets_sync,
    **KEYED,
    values=BATCH["values"],
    weights=BATCH["weights"],
    offsets=A(T([0, 1, 3]), says="bags"),
)
entry("KeyedJaggedTensor.from_jt_dict", sw.KeyedJaggedTensor.from_jt_dict, jt_dict=A({"a": bags()}, "nodict"))
entry(
    "KeyedJaggedTensor.from_jt_dict, a value",
    lambda value: sw.KeyedJaggedTensor.from_jt_dict({"a": value}),
    value=A(bags(), says="jt_dict"),
)
entry("KeyedJaggedTensor.concat", sw.KeyedJaggedTensor.concat, kjt_list=A([features()], says="list of 0"))
entry(
    "KeyedJaggedTensor.concat, a part",
    lambda part: sw.KeyedJaggedTensor.concat([features(), part]),
    part=A(sw.KeyedJaggedTensor(["z"], T([1]), lengths=T([1, 0])), says="kjt_list"),
)
EMPTY = {
    "is_weighted": A(False, "true"),
    "device": DEVICE_OR_NONE,
    "values_dtype": A(torch.int64, "none"),
    "weights_dtype": A(torch.float32, "none"),
    "lengths_dtype": A(torch.int32),
}
entry("KeyedJaggedTensor.empty", sw.KeyedJaggedTensor.empty, **EMPTY)
entry("JaggedTensor.empty", sw.JaggedTensor.empty, **EMPTY)
entry(
    "KeyedJaggedTensor.empty_like", sw.KeyedJaggedTensor.empty_like, kjt=A(features()), device=EMPTY["device"]
)
entry("JaggedTensor.empty_like", sw.JaggedTensor.empty_like, jt=A(bags()), device=EMPTY["device"])
entry("KeyedJaggedTensor.split", features().split, segments=A([1, 1]))
entry(
    "KeyedJaggedTensor.permute",
    features().permute,
    indices=A([1, 0], "nolist"),
    indices_tensor=A(None, "none"),
)
entry("KeyedJaggedTensor[]", lambda key: features()[key], key=A("f"))
entry("KeyedJaggedTensor.to_dict", features().to_dict, compute_offsets=A(True, "true"))
entry(
    "KeyedJaggedTensor.to",
    features().to,
    device=A("cpu", untried=_INDICES),
    non_blocking=A(False, "true"),
    dtype=A(None, "none"),
)
entry(
    "JaggedTensor.from_dense",
    sw.JaggedTensor.from_dense,
    values=A([T([1, 2])], says="got 0 tensors"),
    weights=A([T([1.0, 2.0])], "none"),
)
entry(
    "JaggedTensor.from_dense_lengths",
    sw.JaggedTensor.from_dense_lengths,
    values=A(torch.ones(2, 2)),
    lengths=A(T([1, 2]), "tensor"),
    weights=A(torch.ones(2, 2), "none"),
)
PADDED = {
    "desired_length": A(2, "none zero one five"),
    "padding_value": A(0.0, "zero one minus five float whole nan inf huge"),
}
entry("JaggedTensor.to_padded_dense", bags().to_padded_dense, **PADDED)
entry("JaggedTensor.to_padded_dense_weights", bags().to_padded_dense_weights, **PADDED)
entry(
    "KeyedTensor",
    sw.KeyedTensor,
    keys=A(["a", "b"]),
    length_per_key=A([1, 2], says="lengths"),
    values=A(torch.zeros(2, 3)),
    key_dim=A(1, "one", says="dimension"),
)
entry(
    "KeyedTensor.from_tensor_list",
    sw.KeyedTensor.from_tensor_list,
    keys=A(["a"], "texts tuple"),
    tensors=A([torch.zeros(2, 3)]),
    key_dim=A(1, "one"),
    cat_dim=A(1, "none one"),
)
GROUPED = {
    "keyed_tensors": A([pooled()], says="keyed tensors"),
    "groups": A([["a"]], "nolist"),
}
entry("KeyedTensor.regroup", sw.KeyedTensor.regroup, **GROUPED)
entry(
    "KeyedTensor.regroup_as_dict",
    sw.KeyedTensor.regroup_as_dict,
    keyed_tensors=GROUPED["keyed_tensors"],
    groups=A([["a"]]),
    keys=A(["x"], "texts tuple"),
)
entry("KeyedTensor[]", lambda key: pooled()[key], key=A("a"))
entry("KeyedTensor.to", pooled().to, device=A("cpu", untried=_INDICES), non_blocking=A(False, "true"))

CONFIG = {
    "name": A("t", "text empty"),
    "num_embeddings": A(10, "one five"),
    "embedding_dim": A(8, "one five"),
    "feature_names": A(["f"], "nolist texts tuple iterator"),
    "data_type": A("FP32", "text"),  # whether a kernel reads it is asked later
}
INITIAL = {
    "weight_init_max": A(1.0, f"none scalar {_NUMBER}"),
    "weight_init_min": A(0.0, "none zero one minus whole scalar"),
    "init_fn": A(None, "none class function"),
}
entry("EmbeddingBagConfig", sw.EmbeddingBagConfig, **CONFIG, **INITIAL, pooling=A("SUM"))
entry("EmbeddingConfig", sw.EmbeddingConfig, **CONFIG, **INITIAL)
entry(
    "TableSpec",
    sw.TableSpec,
    **CONFIG,
    pooling=A("SUM", "none"),
    is_weighted=A(False, "true"),
    module=A("", "text empty"),
    optimizer=A(None, "none"),
    qcomms_config=A(None, "none nodict"),
    cache=A(sw.CacheParams()),
)
entry(
    "EmbeddingBagCollection",
    sw.EmbeddingBagCollection,
    tables=A([bag_table()], says="EmbeddingBagConfig"),
    is_weighted=A(False, "true"),
    device=DEVICE_OR_NONE,
)
entry(
    "EmbeddingBagCollection, a table",
    lambda table: sw.EmbeddingBagCollection([table]),
    table=A(bag_table(), says="EmbeddingBagConfig"),
)
entry("EmbeddingBagCollection()", sw.EmbeddingBagCollection([bag_table()]), features=A(features()))
entry(
    "EmbeddingCollection",
    sw.EmbeddingCollection,
    tables=A([sequence_table()], says="EmbeddingConfig"),
    device=DEVICE_OR_NONE,
    need_indices=A(False, "true"),
)
entry("EmbeddingCollection()", sw.EmbeddingCollection([sequence_table()]), features=A(features()))

entry(
    "OptimizerSpec",
    sw.OptimizerSpec,
    name=A("sgd", "text"),
    learning_rate=A(0.1, f"scalar {_NUMBER}"),
    parameters=A({}, "empty nolist nodict", says="parameter"),
)
RATE, BETA = A(0.1, f"scalar {_NUMBER}"), A(0.9, "zero")
entry(
    "fused_params of sgd",
    partial(sharder, optimizer="sgd"),
    learning_rate=RATE,
)
entry("fused_params of adagrad", partial(sharder, optimizer="adagrad"), learning_rate=RATE, eps=RATE)
entry("fused_params of row_wise_adagrad", partial(sharder, optimizer="row_wise_adagrad"), eps=RATE)
entry("fused_params of adam", partial(sharder, optimizer="adam"), eps=RATE, beta1=BETA, beta2=BETA)
entry(
    "fused_params",
    sharder,
    optimizer=A("sgd", "text", says="OptimizerSpec"),
    weight_decay=RATE,
    cache_load_factor=A(0.2, "none one whole", says="load_factor"),
    cache_algorithm=A("lru", says="algorithm"),
)
entry(
    "fused_params of another's optimizer",
    partial(sharder, optimizer="own"),
    beta=A(
        0.1,
        f"none true minus nan inf text empty list nones nolist texts tuple scalar {_NUMBER}",
        says="'beta'",
    ),
)
entry(
    "EmbeddingBagCollectionSharder",
    sw.EmbeddingBagCollectionSharder,
    fused_params=A({}, "none nodict", says="optimizer"),
    qcomm_codecs_registry=A(None, "none nodict", says="QCommsConfig"),
    input_checks=A("off", "none"),
)
entry(
    "CacheParams",
    sw.CacheParams,
    load_factor=A(0.2, "none one whole"),
    algorithm=A("lru"),
    stats=A(None, "none"),
)
entry(
    "EmbeddingOffloadStats",
    sw.EmbeddingOffloadStats,
    cacheability=A(0.2, _NUMBER),
    expected_lookups=A(10.0, "zero one five float whole huge"),
    mrc_hist_counts=A([1.0, 2.0], "list ints array tensor floats"),
    height=A(10, "zero one five huge"),
)
entry(
    "QCommsConfig",
    sw.QCommsConfig,
    forward_precision=A("fp16", "none text"),
    backward_precision=A("fp16", "none text"),
)
_NUMBERS = "none list ints tensor floats array"
entry(
    "ParameterConstraints",
    sw.ParameterConstraints,
    sharding_types=A(["a"], _NAMES),
    compute_kernels=A(["a"], _NAMES),
    min_partition=A(4, "none one five huge"),
    pooling_factors=A([1.0], _NUMBERS),
    num_poolings=A([1.0], _NUMBERS),
    batch_sizes=A([4], _NUMBERS),
    is_weighted=A(True, "none true"),
    cache_params=A(None, "none nodict"),
    device_group=A("cpu", "none text"),
    ranks=A([0], "none zero one five huge list ints array"),
    together=A("x", "none text"),
    apart=A("x", f"text {_NAMES}"),
    qcomms_config=A(None, "none nodict"),
    extras=A({}, "none dict nodict"),
)

SPEED = "none one five float whole huge"
entry(
    "Topology",
    sw.Topology,
    world_size=A(2, untried="huge"),
    compute_device=A("cuda"),
    hbm_cap=A(10, "none zero one five whole array"),
    ddr_cap=A(10, "none zero one five whole array"),
    local_world_size=A(2, "none one"),
    **{
        f"{link}_bw": A(1.0, SPEED, says="_bw")
        for link in ("hbm_mem", "ddr_mem", "intra_host", "inter_host", "hbm_to_ddr_mem")
    },
    memory_bytes=A({}, "dict nodict"),
    memory_bandwidths=A({}, "dict nodict"),
    link_bandwidths=A({}, "dict nodict"),
    link_latencies_ms=A({}, "dict nodict"),
    detected=A((), "nolist texts tuple"),
)
entry(
    "Topology, values by name",
    lambda memory, bandwidth, link, latency: sw.Topology(
        2,
        "cpu",
        memory_bytes={"x": memory},
        memory_bandwidths={"x": bandwidth},
        link_bandwidths={"y": link},
        link_latencies_ms={"intra_host": latency},
    ),
    memory=A(5, "zero one five whole array"),
    bandwidth=A(5.0, "one five float whole huge"),
    link=A(5.0, "one five float whole huge", says="bandwidth"),
    latency=A(1.0, _NUMBER, says="latenc"),
)
entry(
    "EmbeddingShardingPlanner",
    planner_of,
    topology=A(topology()),
    batch_size=A(4, "none one five", says="no plan"),
    constraints=A({}, "none nodict"),
    estimator=A(None, "none"),
    storage_estimator=A(None, "none", says="no estimator"),
    option_space=A(None, "none", says="no estimator"),
    proposer=A(None, "none"),
    partitioner=A(None, "none"),
    storage_reservation=A(0.1, "none zero nodict", says="StorageReservation"),
    objective=A("step_time"),
    seconds=A(5, f"none inf {_NUMBER}".replace("zero", "")),
    refinements=A((), "nolist", says="refinement "),
    listener=A(None, "none function", untried="class"),
    progress=A(False, "none true"),
    debug=A(False, "true"),
)
entry(
    "EmbeddingShardingPlanner, a rule",
    lambda rule: planner_of(topology=topology(), constraints={"t": rule}),
    rule=A(sw.ParameterConstraints(), says="constraints"),
)
entry("plan_tables", sw.EmbeddingShardingPlanner(topology()).plan_tables, tables=A([table()]))
entry(
    "plan",
    sw.EmbeddingShardingPlanner(topology()).plan,
    module=A(sw.EmbeddingBagCollection([bag_table()])),
    sharders=A([sw.EmbeddingBagCollectionSharder()], "none"),
)
entry(
    "plan, a sharder",
    lambda sharder: sw.EmbeddingShardingPlanner(topology()).plan(
        sw.EmbeddingBagCollection([bag_table()]), [sharder]
    ),
    sharder=A(sw.EmbeddingBagCollectionSharder()),
)
entry(
    "DistributedModelParallel",
    sw.DistributedModelParallel,
    module=A(sw.EmbeddingBagCollection([bag_table()])),
    env=A(sw.ShardingEnv.local()),
    plan=A(None, "none"),
    sharders=A(None, "none"),
    init_data_parallel=A(True, "true"),
)
entry(
    "TrainPipelineBase",
    partial(sw.TrainPipelineBase, optimizer=None),
    model=A(
        sw.DistributedModelParallel(sw.EmbeddingBagCollection([bag_table()]), env=sw.ShardingEnv.local())
    ),
    device=A("cpu", untried=_INDICES),
    end_of_data=A("first_rank"),
)
PART = A(0.1, "zero one whole")
BYTES = "zero one five"
entry(
    "StorageReservation",
    sw.StorageReservation,
    part=PART,
    fixed_bytes=A(5, f"huge {BYTES}"),
    dense_multiplier=A(2.0, _NUMBER),
    id_copies=A(5, f"huge {BYTES}"),
)
entry("OptionSpace", sw.OptionSpace, kernels=A({}, "nodict"), min_partition=A(4, "none one five huge"))

COUNT = "one five huge"
entry("ColumnRange", sw.ColumnRange, start=A(0, "zero one", says="columns"), stop=A(4, COUNT, says="columns"))
entry("RowsRange", sw.RowsRange, num_rows=A(10, f"zero {COUNT}"), parts=A(2, COUNT))
entry("RowsModulo", sw.RowsModulo, num_rows=A(10, f"zero {COUNT}"), parts=A(2, COUNT))
entry("RowsSplit", sw.RowsSplit, bounds=A([0, 5, 10]))
PLACE = {
    "columns": A(sw.ColumnRange(0, 4)),
    "rank": A(0, f"none zero {COUNT}"),
    "host_group": A(None, "none"),
    "local_rank": A(None, "none"),
    "dataflow": A(None, "none"),
}
entry("Block", sw.Block, rows=A(sw.RowsRange(10, 2)[0]), **PLACE)
entry(
    "BlockRun",
    sw.BlockRun,
    row_map=A(sw.RowsRange(10, 2)),
    count=A(1, "one", says="run of blocks"),
    first_part=A(0, "zero one", says="row parts"),
    is_copied=A(False, "true"),
    **PLACE,
)
entry(
    "Layout",
    sw.Layout,
    blocks=A([sw.Block(sw.RowsRange(10, 1)[0], sw.ColumnRange(0, 4))], says="one block"),
    dataflow=A(sw.Exchange()),
    variant=A("", "text empty"),
    extras=A({}, "dict nodict"),
)
entry("ShardingPlan", sw.ShardingPlan, plan=A({}, "nodict"), document=A({}, "dict nodict"))
entry(
    "ShardingPlan.from_json",
    sw.ShardingPlan.from_json,
    text=A(planner_of(topology=topology()).to_json(), says="no JSON"),
)

ROWS = {name: A(0.1, _NUMBER) for name in ("lr", "eps", "weight_decay")}
entry(
    "RowWiseAdagrad",
    sw.RowWiseAdagrad,
    params=A([parameter()]),
    initial_accumulator_value=A(0.1, _NUMBER),
    **ROWS,
)
entry("LazyAdam", sw.LazyAdam, params=A([parameter()]), betas=A((0.9, 0.9)), **ROWS)
entry(
    "KeyedOptimizerWrapper",
    sw.KeyedOptimizerWrapper,
    params=A({"w": parameter()}, says="no parameters"),
    optim_factory=A(sgd, untried="class"),
)
entry("CombinedOptimizer", sw.CombinedOptimizer, optims=A([keyed()], "nolist"))
entry("CombinedOptimizer, a part", lambda part: sw.CombinedOptimizer([part]), part=A(keyed(), says="optims"))
entry(
    "load_state_dict of an optimizer",
    lambda state_dict: keyed().load_state_dict(state_dict),
    state_dict=A(keyed().state_dict(), says="state dict"),
)
entry(
    "apply_optimizer_in_backward",
    sw.apply_optimizer_in_backward,
    optimizer_class=A(torch.optim.SGD),
    params=A((), "nolist", says="cannot be applied"),
    optimizer_kwargs=A({"lr": 0.1}, untried=" ".join(WRONG)),
)
entry(
    "apply_optimizer_in_backward, of a parameter",
    lambda optimizer_kwargs: sw.apply_optimizer_in_backward(torch.optim.SGD, [parameter()], optimizer_kwargs),
    optimizer_kwargs=A({"lr": 0.1}, "nodict"),
)
entry(
    "in_backward_optimizer_filter",
    lambda named_parameters, include: list(sw.in_backward_optimizer_filter(named_parameters, include)),
    named_parameters=A([("a", parameter())], "nolist"),
    include=A(True, "true"),
)
entry("spec_to_torch", sw.spec_to_torch, spec=A(sw.OptimizerSpec()), params=A([parameter()], "tensor floats"))
entry(
    "optimizer_spec_of",
    sw.optimizer_spec_of,
    parameter=A(parameter(), "tensor floats scalar"),
    name=A("", "text empty"),
)
entry(
    "register_fused_optimizer",
    lambda name, mapping, unsharded: sw.register_fused_optimizer(
        type("Own", (torch.optim.SGD,), {}), name, mapping, unsharded
    ),
    name=A("own", "text empty"),
    mapping=A(nothing, "class function"),
    unsharded=A(None, "none class function"),
)
