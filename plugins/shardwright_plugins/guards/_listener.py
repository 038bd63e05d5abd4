"""The listener of the guards, one for the process."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any
from weakref import finalize, ref

from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from shardwright.contracts import StepListener, TrainedCollection
from shardwright_plugins.guards._dense_part import watch_dense_part
from shardwright_plugins.guards._forgotten_steps import StepWatch
from shardwright_plugins.guards._updates import BackwardPasses


class _Guards(StepListener):
    """All guards; what belongs to a collection or a model goes with it."""

    def __init__(self) -> None:
        self._num_steps = 0  # of all optimizers of this process
        # By identity: dictionaries with weak references are calls of Python.
        self._passes: dict[int, BackwardPasses] = {}
        self._watches: dict[int, tuple[ref[nn.Module], StepWatch]] = {}
        register_optimizer_step_post_hook(self._note_step)

    def has_model(self, model: nn.Module, collections: Sequence[TrainedCollection]) -> None:
        waiting = [own for own in collections if own.updated_in_step]
        if waiting:
            self._watches[id(model)] = ref(model), StepWatch(waiting)
            finalize(model, self._watches.pop, id(model), None)

    def has_dense_part(
        self, wrapper: DistributedDataParallel, module: nn.Module, parameters: Sequence[nn.Parameter]
    ) -> None:
        if dist.get_world_size(wrapper.process_group) > 1:
            watch_dense_part(wrapper, module, parameters)

    def updates(self, collection: TrainedCollection, forward: Any) -> None:
        if not collection.updated_in_backward:
            return
        passes = self._passes.get(id(collection))
        if passes is None:
            passes = self._passes[id(collection)] = BackwardPasses()
            finalize(collection, self._passes.pop, id(collection), None)
        passes.note(collection, forward, self._num_steps)

    def steps(self, collection: TrainedCollection) -> None:
        for _, watch in list(self._watches.values()):
            watch.has_stepped(collection)
        if (passes := self._passes.get(id(collection))) is not None:
            passes.check_step(collection, self._num_steps)

    def drops(self, collection: TrainedCollection) -> None:
        if (passes := self._passes.get(id(collection))) is not None:
            passes.clear(self._num_steps)

    def _note_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._num_steps += 1
        for key, (reference, watch) in list(self._watches.items()):
            model = reference()
            if model is None or watch.note(model, optimizer):
                self._watches.pop(key, None)


@cache
def guards() -> StepListener:
    """The guards of this process."""
    return _Guards()
