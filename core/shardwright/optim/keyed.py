"""Optimizers whose state goes by parameter names, so that it outlives a change of plan, order or world size.

They are torch optimizers: learning-rate schedulers take them. So do gradient scalers, unless a part runs in the
backward pass: it would update by scaled gradients, and refuses. With ``update="in_step"`` it takes part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shardwright.arguments import brief, checked
from shardwright.errors import DuplicateNameError, InvalidInputError, UnsupportedError
from shardwright.optim import _keyed_state


class KeyedOptimizer(Optimizer):
    """An optimizer whose state dict is keyed by parameter names.

    A subclass brings `step`. Unlike torch's, the state dict is loaded into the tensors that are there, and
    only if all of it fits; state that the optimizer has not made yet is created.

    Args:
        params: the parameters by name; there may be none.
        state: the state of each parameter that has some; shared.
        param_groups: groups of the parameters with their hyperparameters; shared.

    Raises:
        DuplicateNameError: two names stand for one parameter.
        InvalidInputError: a group or the state has a parameter without a name.

    Example:
        >>> import torch, shardwright as sw
        >>> weight = torch.zeros(2, requires_grad=True)
        >>> class SignDescent(sw.KeyedOptimizer):
        ...     def step(self, closure=None):
        ...         for parameter in self.params.values():
        ...             parameter.data -= 0.1 * parameter.grad.sign()
        >>> optimizer = SignDescent({"weight": weight}, {}, [{"params": [weight]}])
        >>> (weight * torch.tensor([3.0, -5.0])).sum().backward()
        >>> optimizer.step()
        >>> weight.data
        tensor([-0.1000,  0.1000])
        >>> optimizer.state_dict()["param_groups"][0]["params"]
        ['weight']
    """

    @checked
    def __init__(
        self,
        params: Mapping[str, Tensor],
        state: MutableMapping[Any, Any],
        param_groups: list[dict[str, Any]],
    ) -> None:
        # Torch refuses an empty list, and would copy: it is given an empty group, then what is shared.
        super().__init__([{"params": []}], {})
        self.params: Mapping[str, Tensor] = dict(params)
        self.state = state  # type: ignore[assignment]  # any mapping will do
        self.param_groups = param_groups
        self._saves_param_groups = True
        _check_names(self.params, state, param_groups)

    def state_dict(self) -> dict[str, Any]:
        """The state by parameter name: ``{"state": {name: {...}}, "param_groups": [...]}``.

        State tensors are not copied; of tables over several ranks they are sharded tensors.
        Without ``param_groups`` after ``save_param_groups(False)``.
        """
        packed: dict[str, Any] = {"state": _keyed_state.pack_state(self.params, self.state)}
        if self._saves_param_groups:
            packed["param_groups"] = _keyed_state.pack_groups(self.params, self.param_groups)
        return packed

    def full_state_dict(self) -> dict[str, Any]:
        """The state dict with whole tensors, copies in host memory; a collective where tables are sharded."""
        packed = self.state_dict()
        return {**packed, "state": _keyed_state.full(packed["state"])}

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Check that a state dict fits, changing nothing.

        Raises:
            UnknownNameError: it names a parameter that the optimizer does not have.
            InvalidInputError: state is missing, or entries, shapes or groups differ.
        """
        _keyed_state.check_form(state_dict)
        _keyed_state.check_state(self.params, self.state, state_dict["state"])
        if self._saves_param_groups and "param_groups" in state_dict:
            self.check_groups(state_dict["param_groups"])

    @checked
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state dict; if it does not fit, nothing is changed.

        Groups may be cut otherwise than here: hyperparameters go by parameter name. They are left as they are
        if the state dict has none, or after ``save_param_groups(False)``.

        Raises:
            UnknownNameError: it names a parameter that the optimizer does not have.
            InvalidInputError: state is missing, or entries, shapes or groups differ.
        """
        with self.loading():
            self.check_state_dict(state_dict)
        _keyed_state.write_state(self.params, self.state, state_dict["state"])
        if self._saves_param_groups and "param_groups" in state_dict:
            _keyed_state.write_groups(self.params, self.param_groups, state_dict["param_groups"])
        self.post_load_state_dict()

    def loading(self) -> AbstractContextManager[None]:
        """A context for the checks before a state dict is loaded: what one rank refuses, all that share tables do."""
        return nullcontext()

    def check_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        """Check that loaded hyperparameters fit, changing nothing.

        Args:
            groups: groups of a state dict, which name parameters.

        Raises:
            UnknownNameError: they name a parameter that the optimizer does not have.
            InvalidInputError: they contradict each other, or lack a value or a parameter.
        """
        _keyed_state.check_groups(self.params, self.param_groups, groups)

    def take_groups(self, groups: Sequence[dict[str, Any]]) -> None:
        """Take over hyperparameters that were checked."""
        _keyed_state.write_groups(self.params, self.param_groups, groups)

    def post_load_state_dict(self) -> None:
        """Called after a state dict was loaded, for subclasses."""

    def save_param_groups(self, save: bool) -> None:
        """Set if hyperparameters are part of the state dict.

        They are by default (not so in TorchRec): without its learning rate an optimizer would not go on where
        it was saved.
        """
        self._saves_param_groups = save

    def init_state(self, sparse_grad_parameter_names: Set[str] | None = None) -> None:
        """Make the state of parameters that have none yet, by a step with gradients of 0 that changes no value.

        State dicts have it then, and ``torch.distributed.checkpoint`` can read into it before the first step.

        Args:
            sparse_grad_parameter_names: not needed; gradients of 0 are dense.
        """
        _keyed_state.make_state(list(self.params.values()), self.state, self.param_groups, self.step)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Groups come with the construction: a new one would have no names.

        Raises:
            UnsupportedError: always, once constructed.
        """
        if not hasattr(self, "params"):  # torch's constructor adds the empty group
            super().add_param_group(param_group)
            return
        raise UnsupportedError(
            f"{type(self).__name__} cannot add parameters, which would have no names: construct another, and "
            "join both in a CombinedOptimizer"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Everything, unlike torch's, but for the wrapper that a scheduler puts around ``step``."""
        return {name: value for name, value in self.__dict__.items() if name != "step"}


class Delegating(KeyedOptimizer):
    """Steps by another optimizer, whose state and groups it shares.

    Args:
        params: the optimizer's parameters by name.
        optimizer: any optimizer of torch.
    """

    def __init__(self, params: Mapping[str, Tensor], optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        super().__init__(params, optimizer.state, optimizer.param_groups)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step the optimizer within."""
        return self._optimizer.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of the optimizer within."""
        self._optimizer.zero_grad(set_to_none=set_to_none)


class KeyedOptimizerWrapper(Delegating):
    """Any torch optimizer, with its state by parameter names.

    Args:
        params: the parameters by name.
        optim_factory: builds the optimizer from the list of parameters.

    Raises:
        InvalidInputError: there are no parameters.

    Example:
        >>> from torch import nn
        >>> from torch.optim import SGD
        >>> model = nn.Linear(2, 1)
        >>> optimizer = KeyedOptimizerWrapper(
        ...     dict(model.named_parameters()), lambda params: SGD(params, lr=0.1)
        ... )
        >>> optimizer.state_dict()["param_groups"][0]["params"]
        ['bias', 'weight']
    """

    @checked
    def __init__(
        self, params: Mapping[str, Tensor], optim_factory: Callable[[list[Tensor]], Optimizer]
    ) -> None:
        if not params:
            raise InvalidInputError(
                "KeyedOptimizerWrapper got no parameters. If all of the model's are updated in the backward "
                "pass, use its fused_optimizer alone."
            )
        optimizer = optim_factory(list(params.values()))
        if not isinstance(optimizer, Optimizer):
            raise InvalidInputError(
                f"KeyedOptimizerWrapper: optim_factory must give an optimizer, it gave {brief(optimizer)}"
            )
        super().__init__(params, optimizer)


class OptimizerWrapper(Delegating):
    """A base for optimizers around another keyed one, such as one that warms up or clips gradients.

    Args:
        optimizer: the optimizer within.
    """

    def __init__(self, optimizer: KeyedOptimizer) -> None:
        super().__init__(optimizer.params, optimizer)
        self.params = optimizer.params  # those that it has now, whenever one asks
        self._keyed = optimizer

    @property
    def within(self) -> KeyedOptimizer:
        """The optimizer within."""
        return self._keyed

    def state_dict(self) -> dict[str, Any]:
        """The state dict of the optimizer within."""
        return self._keyed.state_dict()

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Check that a state dict fits the optimizer within."""
        self._keyed.check_state_dict(state_dict)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over a state dict into the optimizer within."""
        self._keyed.load_state_dict(state_dict)
        self.post_load_state_dict()

    def init_state(self, sparse_grad_parameter_names: Set[str] | None = None) -> None:
        """Make the state of the optimizer within, where it has none yet."""
        self._keyed.init_state(sparse_grad_parameter_names)

    def save_param_groups(self, save: bool) -> None:
        """Set if hyperparameters are part of the state dict."""
        self._keyed.save_param_groups(save)


def _check_names(
    params: Mapping[str, Tensor],
    state: Mapping[Tensor, Any],
    param_groups: Sequence[Mapping[str, Any]],
) -> None:
    names: dict[Tensor, str] = {}
    for name, param in params.items():
        if param in names:
            raise DuplicateNameError(f"{names[param]!r} and {name!r} are one parameter; give it one name")
        names[param] = name
    known = _keyed_state.names_of(params)
    for key in state:
        if not isinstance(key, Tensor):
            raise InvalidInputError(
                f"the state has the key {brief(key)}. All state keys must be params, which are tensors"
            )
    for where, held in (
        ("a group", chain.from_iterable(group["params"] for group in param_groups)),
        ("the state", state),
    ):
        for param in held:
            if param not in known:
                raise InvalidInputError(
                    f"{where} has a parameter of shape {list(param.shape)} that has no name among the "
                    f"{len(names)} given"
                )
