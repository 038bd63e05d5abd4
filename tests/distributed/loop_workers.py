"""What ranks do in the tests of training loops that people write; importable by their processes."""

from __future__ import annotations

import gc
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock
from weakref import ref

import torch
import torch.distributed as dist
from attrs import evolve
from tests.distributed import workers
from tests.equality import Case, count_profiled, train_rank
from tests.errors import error_of
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from shardwright import (
    DefaultDataParallelWrapper,
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    EmbeddingCollection,
    EmbeddingCollectionSharder,
    EmbeddingConfig,
    EmbeddingShardingPlanner,
    KeyedJaggedTensor,
    LeaveAlone,
    ParameterConstraints,
    ShardingEnv,
    Topology,
    TrainPipelineSparseDist,
    apply_optimizer_in_backward,
    in_backward_optimizer_filter,
)
from shardwright import clip_grad_norm_ as clip_grad_norm_over_ranks
from shardwright.runtime.sharded.collections.sharded_collection import ShardedCollection

TYPES = ["row_wise", "table_wise", "data_parallel"]

State = dict[str, torch.Tensor]


def local_world_sizes_that_differ(case: Case, how: str) -> str:
    """Train where rank 1 takes a host to have another number of ranks; returns the error.

    Args:
        case: what is trained.
        how: whether the variable differs, or an environment made by hand does.
    """
    size = 1 if dist.get_rank() == 1 else 2
    if how == "by hand":
        env = evolve(ShardingEnv.from_process_group(), local_world_size=size)
        return error_of(lambda: train_rank(case, env, case.module(), count_profiled))
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": str(size)}):
        return error_of(ShardingEnv.from_process_group)


def model_of(
    types: list[str] = TYPES,
    kernels: list[str] | None = None,
    *,
    module: nn.Module | None = None,
    is_averaged: bool = True,
    update: str | None = None,
) -> DistributedModelParallel:
    """A sharded model.

    Args:
        types: the tables' sharding types.
        kernels: their compute kernels.
        module: what is sharded, the small model of the other tests by default.
        is_averaged: the model averages its dense gradients itself.
        update: when its tables are updated.
    """
    env = ShardingEnv.from_process_group()
    module = workers.clicks() if module is None else module
    sharders = [EmbeddingBagCollectionSharder(None if kernels == ["dense"] else workers.FUSED)]
    plan = workers.planner(env.world_size, types, kernels).collective_plan(module, sharders, dist.group.WORLD)
    return DistributedModelParallel(
        module, env, "cpu", plan, sharders, init_data_parallel=is_averaged, update=update
    )


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    return model(workers.batch(step, dist.get_rank())).square().mean()


def dense_optimizer(model: nn.Module) -> torch.optim.SGD:
    dense = [parameter for _, parameter in in_backward_optimizer_filter(model.named_parameters())]
    return torch.optim.SGD(dense, lr=workers.LEARNING_RATE)


def train(model: nn.Module, steps: range, optimizer: Any) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


# DistributedDataParallel around what is sharded


class Enclosing(nn.Module):
    """What a framework's module is to a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.model(features)


def with_bare_collection() -> nn.Module:
    """A model whose collection was sharded by hand."""
    model, env = workers.clicks(), ShardingEnv.from_process_group()
    sharder = EmbeddingBagCollectionSharder(fused_params=workers.FUSED)
    plan = workers.planner(env.world_size, TYPES).collective_plan(model, [sharder])
    bags = model.get_submodule("sparse.bags")
    model.sparse.bags = sharder.shard(bags, plan.plan["sparse.bags"], env, "cpu", "sparse.bags")
    return model


def train_in_data_parallel(around: str, steps: int, *, finds_unused: bool) -> State:
    """Train as Accelerate and Lightning do; returns the state.

    Args:
        around: what is wrapped.
        steps: how many.
        finds_unused: the wrapper looks for parameters that take no part.
    """
    model = with_bare_collection() if around == "bare collection" else model_of(is_averaged=False)
    wrapped = DistributedDataParallel(
        Enclosing(model) if around == "enclosing module" else model, find_unused_parameters=finds_unused
    )
    train(wrapped, range(steps), dense_optimizer(model))
    wrapped.load_state_dict(wrapped.state_dict())
    if around != "bare collection":
        return model.full_state_dict()
    of_bags = model.sparse.bags.full_state_dict()
    return model.state_dict() | {f"sparse.bags.{name}": value for name, value in of_bags.items()}


class TwoTowers(nn.Module):
    """Two small models, whose outputs are added."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = workers.clicks(1), workers.clicks(2)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.left(features) + self.right(features)


def train_beside_tables_left_alone(steps: int) -> tuple[list[str], State]:
    """Train a model one of whose collections is left unsharded; returns the paths of the others, and the state."""
    model = TwoTowers()
    sgd = {"optimizer": "sgd", "learning_rate": workers.LEARNING_RATE}
    sharders = [EmbeddingBagCollectionSharder(sgd), LeaveAlone(model.left.sparse.bags)]
    sharded = DistributedModelParallel(model, sharders=sharders)
    train(sharded, range(steps), dense_optimizer(sharded))
    return list(sharded.sharded_modules), sharded.full_state_dict()


def accumulate_without_sums(steps: int) -> State:
    """Two batches a step, of which only the second's gradients are summed over the ranks; returns the state."""
    model = model_of(kernels=["dense"], is_averaged=False)
    wrapped, optimizer = DistributedDataParallel(model), dense_optimizer(model)
    for step in range(steps):
        optimizer.zero_grad()
        with wrapped.no_sync():  # where two forward passes before two backward passes do no harm
            for half in [loss_of(wrapped, 2 * step) / 2 for _ in range(2)]:
                half.backward()
        loss_of(wrapped, 2 * step + 1).backward()
        optimizer.step()
    return {name: value for name, value in model.full_state_dict().items() if name.startswith("over.")}


def data_parallel_twice(around: str) -> str:
    """Wrap what is averaged already, or has nothing to average; returns the error."""
    if around == "nothing dense":
        return error_of(lambda: DistributedDataParallel(with_bare_collection().sparse))
    if around == "before":
        return error_of(lambda: model_of(module=DistributedDataParallel(workers.clicks())))
    if around == "a part before":
        module = workers.clicks()
        module.over = DistributedDataParallel(module.over)
        return error_of(lambda: model_of(module=module))
    model = model_of()
    inside = {"model": model, "enclosing module": Enclosing(model), "inner module": model.module}[around]
    before = model.full_state_dict()
    text = error_of(lambda: DistributedDataParallel(inside, find_unused_parameters=True))
    after = model.full_state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    train(model, range(1), dense_optimizer(model))
    return text


def optimizers_of_dense_parameters_in_backward() -> str:
    module = workers.clicks()
    apply_optimizer_in_backward(torch.optim.SGD, module.over.parameters(), {"lr": 0.1})
    return error_of(lambda: model_of(module=module))


# Scaled and clipped gradients


def scaled_without_autocast(*, is_clipped: bool) -> tuple[str, str]:
    """Two steps with a scaler of the dense part's optimizer, then with none; returns both errors."""
    texts = []
    for is_on in (True, False):
        model = model_of(kernels=["fused_torch"])
        optimizer, scaler = dense_optimizer(model), torch.amp.GradScaler("cpu", 1024.0, enabled=is_on)

        def step(number: int, model: Any = model, optimizer: Any = optimizer, scaler: Any = scaler) -> None:
            scaler.scale(loss_of(model, number)).backward()
            if is_clipped:
                scaler.unscale_(optimizer)
                clip_grad_norm_([own for group in optimizer.param_groups for own in group["params"]], 100.0)
            scaler.step(optimizer)
            scaler.update()
            if is_clipped:  # as far as it goes: by no power of 2
                clip_grad_norm_([own for group in optimizer.param_groups for own in group["params"]], 1e-3)
            optimizer.zero_grad()

        texts.append(error_of(lambda step=step: [step(number) for number in range(2)]))  # type: ignore[misc]
    return texts[0], texts[1]


def scaled_tables_in_step(given: str) -> tuple[str, bool]:
    """Train tables that are updated in the step with scaled losses: the error, and if tables are as before.

    Args:
        given: optimizers that the scaler is given, ``"both"`` or ``"dense"``; ``"dense, after tables"``: the step of
            the tables' comes first.
    """
    model = model_of(kernels=["fused_torch"], update="in_step")
    before = model.full_state_dict()
    optimizer, scaler = dense_optimizer(model), torch.amp.GradScaler("cpu", 1024.0)

    def step(number: int) -> None:
        scaler.scale(loss_of(model, number)).backward()
        if given == "dense, after tables":
            model.fused_optimizer.step()
        scaler.step(optimizer)
        if given == "dense":
            model.fused_optimizer.step()
        if given == "both":
            scaler.step(model.fused_optimizer)
        scaler.update()
        optimizer.zero_grad()
        model.fused_optimizer.zero_grad()

    text = error_of(lambda: [step(number) for number in range(2)])  # type: ignore[func-returns-value]
    after, tables = model.full_state_dict(), [name for name in before if "embedding_bags" in name]
    return text, all(torch.equal(before[name], after[name]) for name in tables)


def halved_by_hand() -> str:
    """Divide the dense gradients by 2, where there is no scaler; returns the error."""
    gc.collect()  # scalers of other tests
    model = model_of(kernels=["fused_torch"])
    optimizer = dense_optimizer(model)

    def step(number: int) -> None:
        loss_of(model, number).backward()
        for group in optimizer.param_groups:
            for own in group["params"]:
                own.grad /= 2
        optimizer.step()
        optimizer.zero_grad()

    return error_of(lambda: [step(number) for number in range(2)])


def one_rank_clips() -> str:
    """Rank 1 alone clips the parameters that it lists, and goes no further; returns each rank's error."""
    model = model_of(kernels=["fused_torch"])
    optimizer = dense_optimizer(model)
    train(model, range(1), optimizer)
    if dist.get_rank() == 1:
        return error_of(lambda: clip_grad_norm_(list(model.parameters()), 1.0))
    return error_of(lambda: train(model, range(1, 2), optimizer))


# Backward passes


def backward_passes(how: str) -> tuple[str, State, State]:
    """Go back in another way than once after each forward pass, then train.

    Returns:
        What was raised, the dense weights after it, and after a good step.
    """
    model = model_of()
    optimizer = dense_optimizer(model)
    text = error_of(lambda: _go_back(model, how))
    optimizer.zero_grad()
    dense = {name: value.detach().clone() for name, value in model.module.over.named_parameters()}
    train(model, range(7, 8), optimizer)
    return text, dense, {name: value.detach() for name, value in model.module.over.named_parameters()}


def _go_back(model: DistributedModelParallel, how: str) -> None:
    if how == "inner module":
        loss_of(model.module, 0).backward()
        return
    first = loss_of(model, 0)
    if how == "autograd.grad":
        torch.autograd.grad(first, list(model.module.over.parameters()))
    elif how == "same graph":
        first.backward(retain_graph=True)
        first.backward()
    else:
        second = loss_of(model, 1)
        second.backward()
        first.backward()


def train_on_sums(steps: int) -> State:
    """Two forward passes and one backward pass a step, after an evaluation with gradients; returns the state."""
    model = model_of(kernels=["dense"])
    optimizer = dense_optimizer(model)
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, 90)
        (loss_of(model, 2 * step) + loss_of(model, 2 * step + 1)).backward()
        optimizer.step()
    return model.full_state_dict()


def partial_pass(how: str, kernels: dict[str, str]) -> tuple[str, bool]:
    """Ask for gradients by another way than ``backward()``, of a collection without dense layers.

    Args:
        how: the other way.
        kernels: the compute kernel of each table.

    Returns:
        What was raised, and whether the tables are as they were.
    """
    module = workers.clicks().sparse
    rules = {
        name: ParameterConstraints(sharding_types=["row_wise"], compute_kernels=[kernel])
        for name, kernel in kernels.items()
    }
    topology = Topology(world_size=dist.get_world_size(), compute_device="cpu")
    sharders = [EmbeddingBagCollectionSharder()]
    plan = EmbeddingShardingPlanner(topology, 6, constraints=rules).collective_plan(module, sharders)
    model = DistributedModelParallel(module, plan=plan, sharders=sharders, device="cpu")
    before = model.full_state_dict()
    loss = model.module.bags(workers.batch(0, dist.get_rank())).values().square().mean()
    visible = [p for _, p in in_backward_optimizer_filter(model.named_parameters())]
    text = error_of(
        lambda: (
            torch.autograd.grad(loss, visible) if how == "autograd.grad" else loss.backward(inputs=visible)
        )
    )
    after = model.full_state_dict()
    return text, all(torch.equal(before[name], after[name]) for name in before)


# What changes after a model was made


def changed_after_sharding(how: str) -> str:
    """Change a model's parameters after it was sharded and wrapped, and train; returns the error."""
    module = workers.clicks()
    if how == "unfrozen":
        module.over.weight.requires_grad_(False)
    model = model_of(module=module)
    if how == "frozen":
        model.module.sparse.requires_grad_(False)
    elif how == "dense frozen":
        train(model, range(1), dense_optimizer(model))
        module.over.bias.requires_grad_(False)
    elif how == "unfrozen":
        module.over.weight.requires_grad_(True)
    elif how == "replaced":
        module.over.weight = nn.Parameter(module.over.weight.detach().clone())
    elif how == "assigned":
        return error_of(lambda: model.load_state_dict(model.full_state_dict(), assign=True))
    elif how == "assigned inside":
        module.load_state_dict(model.full_state_dict(), assign=True)
    return error_of(lambda: train(model, range(2), dense_optimizer(model)))


def frozen_and_looked_up() -> tuple[bool, bool]:
    """Freeze the tables, look them up without gradients, unfreeze and train; whether they changed in each."""
    model = model_of()
    bags = model.module.sparse
    before = model.full_state_dict()
    bags.requires_grad_(False)
    with torch.no_grad():
        loss_of(model, 0)
    frozen = model.full_state_dict()
    bags.requires_grad_(True)
    train(model, range(1), dense_optimizer(model))
    after = model.full_state_dict()
    names = [name for name in before if name.startswith("sparse.")]
    return (
        any(not torch.equal(before[name], frozen[name]) for name in names),
        all(not torch.equal(before[name], after[name]) for name in names),
    )


def assigned_before_wrapping(steps: int) -> State:
    """Load by assignment into a model that is not wrapped yet, then wrap and train; returns the state."""
    model = model_of(module=workers.clicks(seed=99), is_averaged=False)
    model.load_state_dict(workers.clicks().state_dict(), assign=True)
    model.init_data_parallel()
    train(model, range(steps), dense_optimizer(model))
    return model.full_state_dict()


def one_rank_loads(what: str) -> str:
    """Rank 1 alone loads; returns each rank's error."""
    model = model_of()
    loaded = model.fused_optimizer if what == "optimizer" else model
    state = loaded.full_state_dict()
    train(model, range(1), dense_optimizer(model))
    if dist.get_rank() == 1:
        return error_of(lambda: loaded.load_state_dict(state))
    return error_of(lambda: train(model, range(1, 2), dense_optimizer(model)))


# What stays in memory


@contextmanager
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class WithLoss(workers.Clicks):
    """The model as pipelines take it."""

    def forward(self, features: KeyedJaggedTensor) -> Any:
        output = super().forward(features)
        return output.square().mean(), output


def _used_and_dropped(use: str) -> list[ref[Any]]:
    torch.manual_seed(3)
    model = model_of(module=WithLoss("cpu") if use == "pipeline" else None)
    optimizer = workers.optimizers_of(model)
    if use == "pipeline":
        pipeline = TrainPipelineSparseDist(model, optimizer, torch.device("cpu"))
        batches = iter([workers.batch(step, dist.get_rank()) for step in range(3)])
        for _ in range(3):
            pipeline.progress(batches)
    else:
        train(model, range(1), optimizer)
        model.load_state_dict(model.full_state_dict())
    inside = [module for module in model.modules() if isinstance(module, ShardedCollection)]
    return [ref(model), *map(ref, inside), *(ref(module.engine) for module in inside)]


def dropped_models(num_models: int, use: str) -> tuple[list[int], int]:
    """Make, use and drop models one after the other, without the garbage collector.

    Returns:
        For each how many of its parts are alive, and how many more descriptors are open at the end than after the
        first.
    """
    alive, descriptors = [], []
    _used_and_dropped(use)  # what is imported and compiled at first use keeps frames, and so what they have
    with without_collector():
        for _ in range(num_models):
            parts = _used_and_dropped(use)
            alive.append(sum(part() is not None for part in parts))
            descriptors.append(len(os.listdir("/proc/self/fd")))
    return alive, descriptors[-1] - descriptors[0]


# Compiled models


class Towers(nn.Module):
    """Two collections, pooled and of sequences, and dense layers."""

    def __init__(self) -> None:
        super().__init__()
        self.clicks = workers.Clicks("cpu")
        self.rows = EmbeddingCollection(
            [EmbeddingConfig(name="row", num_embeddings=50, embedding_dim=8, feature_names=["user"])]
        )
        self.deep = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        rows = self.rows(features)["user"]
        examples = torch.arange(rows.lengths().numel()).repeat_interleave(rows.lengths())
        pooled = torch.zeros(rows.lengths().numel(), 8).index_add(0, examples, rows.values())
        return self.clicks(features) + self.deep(pooled).squeeze(1)


def compiled(how: str, steps: int) -> tuple[list[State], int]:
    """Train a model as it is and compiled; returns both states, and how many graphs were captured.

    Args:
        how: whether the sharded model, what is in it, it in place, or the whole step is compiled.
        steps: how many.
    """
    from torch._dynamo.utils import counters

    states = []
    for is_compiled in (False, True):
        torch.manual_seed(3)
        model = called = _towers()
        if is_compiled and how == "in place":
            model.compile(backend="eager")
        elif is_compiled and how == "inner":
            model.module.compile(backend="eager")
        elif is_compiled and how != "whole step":
            called = torch.compile(model, backend=how)
        torch._dynamo.reset()
        counters.clear()
        is_whole = is_compiled and how == "whole step"
        run = torch.compile(train, backend="eager") if is_whole else train
        run(called, range(steps), dense_optimizer(model))
        states.append(model.full_state_dict())
    return states, counters["stats"]["unique_graphs"]


def _towers() -> DistributedModelParallel:
    module, fused = Towers(), workers.FUSED
    sharders = [EmbeddingBagCollectionSharder(fused), EmbeddingCollectionSharder(fused)]
    topology = Topology(world_size=dist.get_world_size(), compute_device="cpu")
    plan = EmbeddingShardingPlanner(topology, batch_size=6).collective_plan(module, sharders)
    return DistributedModelParallel(module, plan=plan, sharders=sharders, device="cpu")


# What PyTorch offers around the dense part


class Parts(nn.Module):
    """A model with two dense layers, one of which every other rank and step leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.clicks = workers.clicks()
        self.head = nn.Linear(1, 1)

    def forward(self, features: KeyedJaggedTensor, *, uses_head: bool = True) -> torch.Tensor:
        output = self.clicks(features)
        return self.head(output.unsqueeze(1)).squeeze(1) if uses_head else output


def dense_options(
    wrapper: DefaultDataParallelWrapper, *, drops_head: bool
) -> tuple[list[bool], dict[str, Any]]:
    """Train with options of the wrapper; whether dense parameters are equal on all ranks, and the wrapper's options."""
    torch.manual_seed(7)
    module, env = Parts(), ShardingEnv.from_process_group()
    sharders = [EmbeddingBagCollectionSharder(fused_params=workers.FUSED)]
    plan = workers.planner(env.world_size, TYPES).collective_plan(module, sharders)
    model = DistributedModelParallel(module, env, "cpu", plan, sharders, data_parallel_wrapper=wrapper)
    optimizer = dense_optimizer(model)
    before = model.module.head.weight.detach().clone()
    for step in range(4):
        optimizer.zero_grad()
        rank = dist.get_rank()
        output = model(workers.batch(step, rank), uses_head=not drops_head or (step + rank) % 2 == 0)
        output.square().mean().backward()
        optimizer.step()
    told: list[Any] = [None] * env.world_size
    dense = {name: value for name, value in model.full_state_dict().items() if "bags" not in name}
    dist.all_gather_object(told, dense)
    (own,) = model._wrapper
    equal = [torch.equal(dense[name], other[name]) for other in told for name in dense]
    changed = not torch.equal(before, model.module.head.weight)
    return [*equal, changed], {
        "static_graph": own.static_graph,
        "find_unused_parameters": own.find_unused_parameters,
        "bucket_bytes": own.bucket_bytes_cap,
    }


def fully_sharded(what: str) -> State | str:
    """Give parts of a model to `fully_shard` and train; returns its whole state, or the error.

    Args:
        what: "dense": the dense layer; "root": everything; "rest": everything but tables.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = model_of(is_averaged=False)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if what == "root":
        return error_of(lambda: fully_shard(model, mesh=mesh))
    if what == "dense":
        fully_shard(model.module.over, mesh=mesh)
    else:
        tables = in_backward_optimizer_filter(model.named_parameters(), include=True)
        fully_shard(model.module, mesh=mesh, ignored_params={own for _, own in tables})
    train(model, range(3), torch.optim.SGD(model.module.over.parameters(), lr=workers.LEARNING_RATE))
    return model.full_state_dict()


def norms_of_fully_sharded() -> list[float]:
    """Norms, with exponents 2 and infinity, over tables and a dense layer that `fully_shard` cuts."""
    from torch.distributed.fsdp import fully_shard

    model = model_of(is_averaged=False, update="in_step")
    fully_shard(model.module.over)
    loss_of(model, 0).backward()
    return [float(clip_grad_norm_over_ranks(model.parameters(), 1e6, kind)) for kind in (2.0, math.inf)]


def checkpointed_and_autocast(how: str) -> tuple[State, float]:
    """Train with activation checkpoints or bfloat16 in the dense part; returns the state and the last loss."""
    from torch.utils.checkpoint import checkpoint

    module = workers.clicks()
    model = model_of(module=module)
    optimizer, rank = dense_optimizer(model), dist.get_rank()
    if how == "checkpoint":
        over = module.over.forward
        module.over.forward = lambda values: checkpoint(over, values, use_reentrant=False)
    for step in range(3):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=how == "autocast"):
            output = model(workers.batch(step, rank))
        assert output.dtype == (torch.bfloat16 if how == "autocast" else torch.float32)
        loss = output.float().square().mean()
        loss.backward()
        optimizer.step()
    return model.full_state_dict(), float(loss)


@workers.or_error
def no_sync_beside_updates_in_backward() -> None:
    """Call `no_sync()` where tables are updated in the backward pass."""
    workers.wrap(workers.clicks(), ["row_wise"]).no_sync()
