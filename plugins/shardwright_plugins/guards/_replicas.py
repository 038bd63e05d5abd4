"""Guard over replicas: parameters that are to be the same on all ranks are compared by value.

What lets dense ones drift shows in no operation: a model that nobody averages, another seed, a step that one rank alone
leaves out, a parameter that it changes by hand. They are compared from time to time. What a state dict brings, for
them or for tables that each rank has whole, is compared before it is loaded.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeGuard, final

import torch
from torch import Tensor, nn

from shardwright.errors import DistributedError, InvalidInputError
from shardwright.runtime.ranks.environment import ShardingEnv
from shardwright.runtime.step.compiling import untraced

EVERY_VARIABLE = "SHARDWRIGHT_COMPARE_REPLICAS_EVERY"
_EVERY = 100
"""Forward passes from one comparison to the next. A pass over 400 MB of parameters takes 25 ms on one core of an AMD
EPYC (16 GB/s), and the ranks meet in the store of their process group."""
_FIRST = 2
"""The forward pass that is compared first: a model that nobody averages has drifted by then."""


def passes_between(environment: Mapping[str, str] = os.environ) -> int:
    """Forward passes from one comparison to the next; 0: none are made.

    Raises:
        InvalidInputError: the variable's value is no such number.
    """
    asked = environment.get(EVERY_VARIABLE) or str(_EVERY)
    if not asked.isdecimal():
        raise InvalidInputError(
            f"{EVERY_VARIABLE} is {asked!r}; it must be the number of forward passes from one comparison of dense "
            "parameters to the next, or 0 for none"
        )
    return int(asked)


class Replicas:
    """Dense parameters of one model, which all ranks are to have alike.

    Args:
        env: the ranks.
        dense: function that gives their names and values.
        check_average: function that raises where it knows why the average of their gradients failed; ``None`` if nobody
            averages them. A difference then is a warning, since they may be meant to differ, as the parts of a model
            that another library cuts over the ranks.
    """

    def __init__(
        self,
        env: ShardingEnv,
        dense: Callable[[], Iterable[tuple[str, Tensor]]],
        check_average: Callable[[], object] | None,
    ) -> None:
        self._env, self._dense, self._check_average = env, dense, check_average
        self._every, self._num_passes = passes_between(), 0

    def begin_pass(self) -> None:
        """Count a forward pass with gradients, which all ranks begin, and compare if it is time.

        Raises:
            DistributedError: ranks have different values, naming the first parameter and the ranks; on all ranks.
            RuntimeError: they differ because a parameter got no gradient in the last backward pass, as torch says it.
        """
        self._num_passes += 1
        if self._every and (self._num_passes == _FIRST or self._num_passes % self._every == 0):
            self._compare()

    @untraced
    @torch.no_grad()
    def _compare(self) -> None:
        named = list(self._dense())
        if not named:
            return
        values = _values_of(named)
        try:
            self._env.agree(f"the dense parameters in forward pass {self._num_passes}", values, _ADVICE)
        except DistributedError as error:
            if self._check_average is not None:
                if error.subject:  # they were compared, and all ranks are here
                    self._check_average()
                raise
            self._every = 0
            warnings.warn(f"{error}. {_NOT_AVERAGED}", RuntimeWarning, stacklevel=2)


_ADVICE = (
    "These are checksums of values that are to be equal bit for bit: begin with the same weights, change them on all "
    "ranks alike, and make each step of their optimizer on every rank. If ranks may differ, set "
    f"{EVERY_VARIABLE}=0"
)
_NOT_AVERAGED = (
    "Nobody averages their gradients: call init_data_parallel(), or wrap the model in DistributedDataParallel"
)


@final
class LoadedReplicas:
    """A hook of a module's ``load_state_dict``, which compares what is loaded into replicas, where it is plain tensors.

    A copy of the module, such as an unsharded one, is loaded by its rank alone: the hook does nothing there.

    Args:
        env: all ranks, which load together.
        names_of: function that gives the names of the replicas in the module.
    """

    def __init__(self, env: ShardingEnv, names_of: Callable[[nn.Module], Iterable[str]]) -> None:
        self._env, self._names_of = env, names_of

    def __reduce__(self) -> tuple[type[Any], tuple[Any]]:
        return partial, (_no_hook,)

    @untraced
    @torch.no_grad()
    def __call__(self, module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
        """Compare the values.

        Raises:
            DistributedError: ranks have different values, naming the first parameter and the ranks; on all ranks,
                before anything is changed.
        """
        found = ((name, state_dict.get(prefix + name)) for name in self._names_of(module))
        named = [(name, value) for name, value in found if _is_plain(value)]
        self._env.agree(f"load_state_dict() of {type(module).__name__}", _values_of(named), _LOAD_ALIKE)


def _is_plain(value: Any) -> TypeGuard[Tensor]:
    """True for a tensor of torch's with elements, and none that is sharded or on ``meta``."""
    return type(value) in (Tensor, nn.Parameter) and value.numel() > 0 and not value.is_meta


def _no_hook(*_: Any) -> None:
    """Do nothing."""


_LOAD_ALIKE = (
    "These are checksums of values that each rank has a copy of, and are to be equal bit for bit: load the same file "
    "on every rank. Nothing was changed"
)


def _values_of(named: Sequence[tuple[str, Tensor]]) -> dict[str, int]:
    """The sum of each tensor's bits as integers of 8 bytes: exact, whatever the order in which they are added."""
    sums: list[Tensor] = []
    for _, value in named:
        words = value.detach().reshape(-1).view(torch.uint8)
        if words.storage_offset() % 8:
            words = words.clone()
        whole = words.numel() // 8 * 8
        total = words[:whole].view(torch.int64).sum() + words[whole:].sum()
        sums.append(total.to(sums[0].device) if sums else total)
    collected: list[int] = torch.stack(sums).tolist() if sums else []
    return {repr(name): sum_ for (name, _), sum_ in zip(named, collected, strict=True)}
