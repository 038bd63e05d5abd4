"""Several keyed optimizers as one.

Parameter groups are shared, not copied: a learning-rate schedule on the whole reaches all of its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from shardwright.arguments import checked
from shardwright.errors import DuplicateNameError, InvalidInputError
from shardwright.optim._keyed_state import check_form, check_names
from shardwright.optim.keyed import KeyedOptimizer, OptimizerWrapper


class CombinedOptimizer(KeyedOptimizer):
    """Several keyed optimizers as one: of the sharded tables and of the dense rest.

    Args:
        optims: the parts, or pairs of a key and a part; ``"key."`` is put before the part's parameter names.

    Raises:
        DuplicateNameError: two parts have a parameter, or a name of one, in common.
        InvalidInputError: a part is an optimizer of torch, which knows no names of parameters.

    Example:
        >>> import torch, shardwright as sw
        >>> over, under = torch.nn.Linear(2, 1, bias=False), torch.nn.Linear(3, 2, bias=False)
        >>> parts = [
        ...     (key, sw.KeyedOptimizerWrapper(dict(part.named_parameters()), lambda p: torch.optim.SGD(p, lr=0.1)))
        ...     for key, part in {"over": over, "under": under}.items()
        ... ]
        >>> sorted(sw.CombinedOptimizer(parts).params)
        ['over.weight', 'under.weight']
    """

    @checked
    def __init__(self, optims: Sequence[Optimizer | tuple[str, Optimizer]]) -> None:
        self._optims = [_keyed(*part) if isinstance(part, tuple) else _keyed("", part) for part in optims]
        parts = [part for _, part in self._optims]
        super().__init__(
            _joined_params(self._optims),
            _JoinedState(parts),
            list(chain.from_iterable(part.param_groups for part in parts)),
        )
        self.params = _JoinedParams(self._optims)

    @property
    def optimizers(self) -> list[tuple[str, KeyedOptimizer]]:
        """The parts with their keys."""
        return list(self._optims)

    @staticmethod
    def prepend_opt_key(name: str, opt_key: str) -> str:
        """The name of a part's parameter in the whole: ``"key.name"``."""
        return ".".join(word for word in (opt_key, name) if word)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step every part.

        Args:
            closure: computes the loss and the gradients again; called once.

        Returns:
            The closure's loss, if there is one.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for _, part in self._optims:
            part.step()
        return loss

    def init_state(self, sparse_grad_parameter_names: Set[str] | None = None) -> None:
        """Make the state of every part, where it has none yet."""
        for _, part in self._optims:
            part.init_state(sparse_grad_parameter_names)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of every part."""
        for _, part in self._optims:
            part.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """The state dicts of the parts, joined."""
        joined: dict[str, Any] = {"state": {}}
        for key, part in self._optims:
            state_dict = part.state_dict()
            for name, state in state_dict["state"].items():
                joined["state"][self.prepend_opt_key(name, key)] = state
            for group in state_dict.get("param_groups", ()):
                names = [self.prepend_opt_key(name, key) for name in group["params"]]
                joined.setdefault("param_groups", []).append({**group, "params": names})
        return joined

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Check that a state dict fits every part, changing nothing.

        Raises:
            UnknownNameError: it names a parameter that no part has.
            InvalidInputError: state is missing, or entries, shapes or groups differ.
        """
        check_form(state_dict)
        check_names(self.params, state_dict["state"])
        for group in state_dict.get("param_groups", ()):
            check_names(self.params, group["params"])
        for key, part in self._optims:
            part.check_state_dict(self._part_of(state_dict, key, part))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state dict into the parts; if it does not fit all of them, nothing is changed."""
        with self.loading():
            self.check_state_dict(state_dict)
        for key, part in self._optims:
            part.load_state_dict(self._part_of(state_dict, key, part))
        self.post_load_state_dict()

    @contextmanager
    def loading(self) -> Iterator[None]:
        """A context for the checks before a state dict is loaded, in those of all parts."""
        with ExitStack() as stack:
            for _, part in self._optims:
                stack.enter_context(part.loading())
            yield

    def save_param_groups(self, save: bool) -> None:
        """Set if hyperparameters are part of the parts' state dicts."""
        for _, part in self._optims:
            part.save_param_groups(save)

    def _part_of(self, state_dict: Mapping[str, Any], key: str, part: KeyedOptimizer) -> dict[str, Any]:
        """Extract the state and groups of one part, under the part's own names."""
        names = {self.prepend_opt_key(name, key): name for name in part.params}
        state = {names[name]: value for name, value in state_dict["state"].items() if name in names}
        if "param_groups" not in state_dict:
            return {"state": state}
        groups = []
        for group in state_dict["param_groups"]:
            own = [names[name] for name in group["params"] if name in names]
            if own:
                groups.append({**group, "params": own})
        return {"state": state, "param_groups": groups}

    def __repr__(self) -> str:
        """Each part with its key."""
        parts = ", ".join(f"{key}: {part!r}" if key else repr(part) for key, part in self._optims)
        return f"CombinedOptimizer({parts})"


def leaves_of(optimizer: Optimizer, prefix: str = "") -> Iterator[tuple[str, Optimizer]]:
    """The optimizers within one that have state themselves, each with what stands before its parameters' names.

    Args:
        optimizer: any.
        prefix: beginning of all names.
    """
    if isinstance(optimizer, CombinedOptimizer):
        for key, part in optimizer.optimizers:
            yield from leaves_of(part, f"{prefix}{key}." if key else prefix)
    elif isinstance(optimizer, OptimizerWrapper):
        yield from leaves_of(optimizer.within, prefix)
    else:
        yield prefix, optimizer


class _JoinedState(MutableMapping[Tensor, dict[str, Any]]):
    """The states of several optimizers as one, always current."""

    def __init__(self, parts: Sequence[KeyedOptimizer]) -> None:
        self._parts = parts

    def __getitem__(self, param: Tensor) -> dict[str, Any]:
        for part in self._parts:
            if param in part.state:
                return part.state[param]
        raise KeyError(param)

    def __setitem__(self, param: Tensor, state: dict[str, Any]) -> None:
        self._part_with(param).state[param] = state

    def __delitem__(self, param: Tensor) -> None:
        del self._part_with(param).state[param]

    def __iter__(self) -> Iterator[Tensor]:
        return chain.from_iterable(part.state for part in self._parts)

    def __len__(self) -> int:
        return sum(len(part.state) for part in self._parts)

    def _part_with(self, param: Tensor) -> KeyedOptimizer:
        for part in self._parts:
            if any(param is own for own in part.params.values()):
                return part
        raise KeyError(param)


class _JoinedParams(Mapping[str, Tensor]):
    """The parameters of several optimizers as one, always current: resharding gives tables new ones."""

    def __init__(self, optims: Sequence[tuple[str, KeyedOptimizer]]) -> None:
        self._optims = optims

    def _now(self) -> dict[str, Tensor]:
        return _joined_params(self._optims)

    def __getitem__(self, name: str) -> Tensor:
        return self._now()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._now())

    def __len__(self) -> int:
        return len(self._now())


def _keyed(key: str, part: Optimizer) -> tuple[str, KeyedOptimizer]:
    """A part with its key.

    Raises:
        InvalidInputError: it is an optimizer of torch.
    """
    if not isinstance(part, KeyedOptimizer):
        raise InvalidInputError(
            f"CombinedOptimizer: {type(part).__name__} does not know its parameters by name. Make it by "
            "KeyedOptimizerWrapper(dict(in_backward_optimizer_filter(model.named_parameters())), "
            f"lambda params: {type(part).__name__}(params, ...))"
        )
    return key, part


def _joined_params(optims: Sequence[tuple[str, KeyedOptimizer]]) -> dict[str, Tensor]:
    joined: dict[str, Tensor] = {}
    for key, part in optims:
        for own_name, param in part.params.items():
            name = CombinedOptimizer.prepend_opt_key(own_name, key)
            if name in joined:
                raise DuplicateNameError(
                    f"two of the {len(optims)} optimizers have a parameter {name!r}; give them keys: "
                    "CombinedOptimizer([('sparse', a), ('dense', b)])"
                )
            joined[name] = param
    return joined
