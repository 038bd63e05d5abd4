"""The listener of the guards, one for the process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, partial
from typing import Any
from weakref import finalize, ref

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from shardwright.contracts import StepListener, TrainedCollection
from shardwright.runtime.sharded.collections.sharded_collection import ShardedCollection
from shardwright.runtime.sharded.tables.sharded_parameter import ShardedParameter
from shardwright.runtime.sharded.tables.sharded_table import ShardedTable
from shardwright_plugins.guards._dense_part import Wrappers, watch_dense_part
from shardwright_plugins.guards._forgotten_steps import StepWatch
from shardwright_plugins.guards._frozen import check_scale, check_trained
from shardwright_plugins.guards._replicas import LoadedReplicas, Replicas
from shardwright_plugins.guards._restarts import warn_of_restarts
from shardwright_plugins.guards._scaled_losses import ScaledLosses
from shardwright_plugins.guards._updates import BackwardPasses
from shardwright_plugins.guards._whole_tables import Twins


class _Guards(StepListener):
    """All guards; what belongs to a collection or a model goes with it."""

    def __init__(self) -> None:
        self._num_steps = 0  # of all optimizers of this process
        self._wrappers, self._twins = Wrappers(), Twins()
        # By identity: dictionaries with weak references are calls of Python.
        self._passes: dict[int, BackwardPasses] = {}
        self._watches: dict[int, StepWatch] = {}
        self._scaled: dict[int, ScaledLosses] = {}
        self._dense: dict[
            int, tuple[str, frozenset[int]]
        ] = {}  # of the model of a collection that updates at once
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._note_step)

    def has_model(self, model: Any, collections: Sequence[TrainedCollection]) -> None:
        waiting = [own for own in collections if own.updated_in_step]
        if waiting:
            self._watches[id(model)] = StepWatch(model, waiting)
            finalize(model, self._watches.pop, id(model), None)
        dense = [own for _, own in _dense_of(model) if own.requires_grad]
        shards = [own for own in model.parameters() if _is_in_step(own)]
        for collection in collections if dense else ():
            if table := collection.updated_in_backward or next(iter(collection.updated_in_step), ""):
                own_shards = [] if collection.updated_in_backward else shards
                self._scaled[id(collection)] = ScaledLosses(table, dense, own_shards)
                finalize(collection, self._scaled.pop, id(collection), None)
            if table := collection.updated_in_backward:
                self._dense[id(collection)] = table, frozenset(map(id, dense))
                finalize(collection, self._dense.pop, id(collection), None)
        if model.env.everyone.world_size == 1:
            return
        if model.env.everyone.rank == 0:
            warn_of_restarts()
        # At the root, before anything is loaded.
        model.module.register_load_state_dict_pre_hook(LoadedReplicas(model.env.everyone, _copied_weights))
        if dense and not self._wrappers.averages(model):
            own = ref(model)
            replicas = Replicas(model.env.everyone, partial(self._not_averaged, own), None)
            model.register_forward_pre_hook(partial(_begin_pass, replicas))

    def _not_averaged(self, model: ref[nn.Module]) -> Iterator[tuple[str, Tensor]]:
        """The trained dense parameters of a model that nobody averages, as far as torch shows."""
        own = model()
        if own is not None and not self._wrappers.averages(own):
            # What fully_shard has cut is no replica.
            yield from (
                pair
                for pair in _dense_of(own)
                if pair[1].requires_grad and not hasattr(pair[1], "full_tensor")
            )

    def has_dense_part(
        self, wrapper: DistributedDataParallel, module: nn.Module, parameters: Sequence[nn.Parameter]
    ) -> None:
        self._wrappers.take_in(wrapper, module, parameters)
        env = next(own.env for own in module.modules() if isinstance(own, ShardedCollection)).everyone
        if env.world_size > 1:
            watch_dense_part(wrapper, module, parameters, env)

    def begins(self, collection: TrainedCollection, parameters: Sequence[tuple[str, Any, bool]]) -> None:
        check_trained(parameters)
        check_scale(collection)

    def updates(self, collection: TrainedCollection, forward: Any) -> None:
        if (scaled := self._scaled.get(id(collection))) is not None:
            scaled.note_update()
        if not collection.updated_in_backward:
            return
        passes = self._passes.get(id(collection))
        if passes is None:
            passes = self._passes[id(collection)] = BackwardPasses()
            finalize(collection, self._passes.pop, id(collection), None)
        passes.note(collection, forward, self._num_steps)

    def steps(self, collection: TrainedCollection) -> None:
        if (scaled := self._scaled.get(id(collection))) is not None:
            scaled.check_tables()
        for watch in list(self._watches.values()):
            watch.has_stepped(collection)
        if (passes := self._passes.get(id(collection))) is not None:
            passes.check_step(collection, self._num_steps)

    def drops(self, collection: TrainedCollection) -> None:
        if (passes := self._passes.get(id(collection))) is not None:
            passes.clear(self._num_steps)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        if self._twins.checked.get(id(optimizer)) != len(optimizer.param_groups):
            self._twins.check(optimizer)
        for scaled in self._scaled.values():
            if scaled.kept:
                scaled.check_step(optimizer)
        for key, (table, dense) in self._dense.items():
            if (passes := self._passes.get(key)) is not None and passes.num_passes > 1:
                passes.warn_of(optimizer, dense, table, self._num_steps)

    def _note_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._num_steps += 1
        for key, watch in list(self._watches.items()):
            if watch.note(optimizer):
                self._watches.pop(key, None)


def _begin_pass(replicas: Replicas, model: nn.Module, inputs: Any) -> None:
    if torch.is_grad_enabled():
        replicas.begin_pass()


def _copied_weights(module: nn.Module) -> list[str]:
    """Names of the weights of tables that each rank has whole, under the present plan."""
    tables = ((path, own) for path, own in module.named_modules() if isinstance(own, ShardedTable))
    return [f"{path}.weight" for path, own in tables if not own.state.is_parted]


def _collections_of(model: nn.Module) -> list[ShardedCollection]:
    return [own for own in model.modules() if isinstance(own, ShardedCollection)]


def _dense_of(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters of a model outside of sharded collections."""
    tables = {id(parameter) for own in _collections_of(model) for parameter in own.parameters()}
    return ((name, own) for name, own in model.named_parameters() if id(own) not in tables)


def _is_in_step(parameter: nn.Parameter) -> bool:
    """True for a part of a table that is updated in the optimizer's step."""
    part = parameter.part if isinstance(parameter, ShardedParameter) else None
    return part is not None and part.update == "in_step"


@cache
def guards() -> StepListener:
    """The guards of this process."""
    return _Guards()
