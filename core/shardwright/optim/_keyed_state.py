"""Reading and writing optimizer state by parameter name: all is checked first, then all is written.

The form is ``{"state": {name: {entry: value}}, "param_groups": [{"params": [name, ...], "lr": ..., ...}]}``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

from shardwright.arguments import some
from shardwright.errors import InvalidInputError, UnknownNameError, nearest

State = MutableMapping[Tensor, dict[str, Any]]
Group = dict[str, Any]

# A scheduler puts it there; a checkpoint from before the scheduler has none.
_OPTIONAL = frozenset({"params", "initial_lr"})


def pack_state(params: Mapping[str, Tensor], state: Mapping[Tensor, Mapping[str, Any]]) -> dict[str, Any]:
    """The state of each parameter that has one, by name; tensors are not copied, objects give their state dict."""
    return {name: _entries(state[param]) for name, param in params.items() if param in state}


def _entries(held: Mapping[str, Any]) -> dict[str, Any]:
    return {entry: value.state_dict() if _has_own_state(value) else value for entry, value in held.items()}


def _has_own_state(value: Any) -> bool:
    return hasattr(value, "state_dict") and hasattr(value, "load_state_dict")


def full(values: Any) -> Any:
    """Copies in host memory of tensors, also of nested ones; of sharded ones the whole, by a collective."""
    if isinstance(values, Mapping):
        return {name: full(value) for name, value in values.items()}
    if hasattr(values, "full_tensor"):
        return values.full_tensor().cpu()
    return values.detach().to("cpu", copy=True) if isinstance(values, Tensor) else values


def names_of(params: Mapping[str, Tensor]) -> dict[Tensor, str]:
    """The name of each parameter; the further blocks of a sharded table bear that of the first."""
    return {
        own: name for name, param in params.items() for own in (param, *getattr(param, "further_blocks", ()))
    }


def pack_groups(params: Mapping[str, Tensor], groups: Iterable[Group]) -> list[Group]:
    """The groups with names instead of parameters."""
    names = names_of(params)
    return [
        {
            **{key: deepcopy(value) for key, value in group.items() if key != "params"},
            "params": sorted({names[param] for param in group["params"]}),
        }
        for group in groups
    ]


def make_state(
    params: Sequence[Tensor], state: State, groups: Sequence[Group], step: Callable[[], Any]
) -> None:
    """Make the state of parameters without any by a step with gradients of 0; values and counts of steps stay.

    Args:
        params: the optimizer's parameters.
        state: its state, in which the new one stands then.
        groups: its groups, whose weight decay is left out of the step.
        step: its step.
    """
    fresh = [param for param in params if param.requires_grad and not state.get(param)]
    gradients, values = [param.grad for param in params], [param.detach().clone() for param in fresh]
    decays = [group.get("weight_decay") for group in groups]
    try:
        for group in groups:
            group.update({"weight_decay": 0.0} if "weight_decay" in group else {})
        for param in params:
            param.grad = None
        for param in fresh:
            param.grad = torch.zeros_like(param)
        step()
    finally:
        for param, gradient in zip(params, gradients, strict=True):
            param.grad = gradient
        for group, decay in zip(groups, decays, strict=True):
            group.update({} if decay is None else {"weight_decay": decay})
    with torch.no_grad():
        for param, value in zip(fresh, values, strict=True):
            param.copy_(value)  # an optimizer of somebody's own may have moved it
            count = state.get(param, {}).get("step")
            if isinstance(count, Tensor):
                count.zero_()


def check_form(state_dict: Mapping[str, Any]) -> None:
    """Check that it looks like the state dict of an optimizer.

    Raises:
        InvalidInputError: it does not.
    """
    if "state" not in state_dict:
        raise InvalidInputError(
            f"this is no optimizer's state dict: it has {some(sorted(state_dict))}, but no 'state'"
        )


def check_state(params: Mapping[str, Tensor], state: State, loaded: Mapping[str, Mapping[str, Any]]) -> None:
    """Check that loaded state fits.

    Raises:
        UnknownNameError: it is of a parameter that the optimizer has not.
        InvalidInputError: a parameter that has state gets none, or entries or shapes differ.
    """
    check_names(params, loaded)
    lacking = [name for name, param in params.items() if state.get(param) and name not in loaded]
    if lacking:
        raise InvalidInputError(
            f"the state dict has no state for {len(lacking)} of the {len(params)} parameters, which have "
            f"some here: {some(lacking)}"
        )
    for name, entries in loaded.items():
        param = params[name]
        current = state.get(param)
        if current:
            _check_entries(name, current, entries)
        else:
            _check_matrices(name, param, entries)


def check_names(params: Mapping[str, Tensor], loaded: Iterable[Any]) -> None:
    """Check that the optimizer has the parameters named.

    Raises:
        UnknownNameError: it has one of them not.
    """
    unknown = [name for name in loaded if name not in params]
    if unknown:
        raise UnknownNameError(
            f"the state dict names {len(unknown)} parameters that the optimizer does not have: "
            f"{some(unknown)}. It has {len(params)}: {some(sorted(params))}."
            f"{nearest(str(unknown[0]), params)}"
        )


def _check_entries(name: str, current: Mapping[str, Any], loaded: Mapping[str, Any]) -> None:
    for entry in [*loaded, *current]:
        if entry not in loaded or entry not in current:
            raise InvalidInputError(
                f"the state of {name!r} has the entries {some(sorted(current))}; the state dict has "
                f"{some(sorted(loaded))}. Was it saved by another optimizer?"
            )
    for entry, value in loaded.items():
        own = _shape(current[entry])
        if own is not None and own != _shape(value):
            raise InvalidInputError(
                f"state {entry!r} of {name!r} has shape {own}; the state dict has {_described(value)}"
            )


def _check_matrices(name: str, param: Tensor, loaded: Mapping[str, Any]) -> None:
    """Without state to compare with: a matrix is shaped as its parameter, or 1 where it is reduced."""
    for entry, value in loaded.items():
        if not isinstance(value, Tensor) or value.dim() != param.dim() or param.dim() < 2:
            continue
        if any(size not in (own, 1) for size, own in zip(value.shape, param.shape, strict=True)):
            raise InvalidInputError(
                f"state {entry!r} of {name!r} has shape {list(value.shape)} in the state dict; the "
                f"parameter's is {list(param.shape)}"
            )


@torch.no_grad()
def write_state(params: Mapping[str, Tensor], state: State, loaded: Mapping[str, Mapping[str, Any]]) -> None:
    """Take over checked state: into the tensors there are, else as new ones on the parameter's device."""
    for name, entries in loaded.items():
        param = params[name]
        current = state.get(param)
        if not current:
            state[param] = {entry: _owned(value, param) for entry, value in entries.items()}
            continue
        for entry, value in entries.items():
            if isinstance(current[entry], Tensor):
                current[entry].copy_(torch.as_tensor(value))
            elif _has_own_state(current[entry]):
                current[entry].load_state_dict(value)
            else:
                current[entry] = deepcopy(value)


def check_groups(params: Mapping[str, Tensor], groups: Iterable[Group], loaded: Sequence[Group]) -> None:
    """Check that loaded groups fit. They may be cut otherwise, as long as no group gets contradictory values.

    Raises:
        UnknownNameError: they name a parameter that the optimizer has not.
        InvalidInputError: one of its parameters is in no loaded group, the parameters of one of its groups
            were saved with different values, or a value is missing.
    """
    for group in loaded:
        check_names(params, group["params"])
    for own, _ in _matched(params, groups, loaded):
        for saved in own[1:]:
            for key, value in own[0].items():
                if key != "params" and not _equal(value, saved.get(key)):
                    raise InvalidInputError(
                        f"{own[0]['params'][0]!r} and {saved['params'][0]!r} are in one group, but were "
                        f"saved with {key}={value!r} and {key}={saved.get(key)!r}"
                    )
    for own, group in _matched(params, groups, loaded):
        lacking = sorted(group.keys() - own[0].keys() - _OPTIONAL) if own else []
        if lacking:
            raise InvalidInputError(
                f"the saved group of {own[0]['params'][0]!r} has no {lacking[0]!r}; it has "
                f"{some(sorted(own[0].keys() - _OPTIONAL))}. Was it saved by another optimizer?"
            )


def write_groups(params: Mapping[str, Tensor], groups: Iterable[Group], loaded: Sequence[Group]) -> None:
    """Take over the hyperparameters of checked groups."""
    for saved, group in _matched(params, groups, loaded):
        if saved:
            group.update({key: deepcopy(value) for key, value in saved[0].items() if key != "params"})


def _matched(
    params: Mapping[str, Tensor], groups: Iterable[Group], loaded: Sequence[Group]
) -> Iterable[tuple[list[Group], Group]]:
    """Each group with the loaded groups in which its parameters are."""
    names = names_of(params)
    place = {name: index for index, group in enumerate(loaded) for name in group["params"]}
    for group in groups:
        own = list(dict.fromkeys(names[param] for param in group["params"]))
        lacking = [name for name in own if name not in place]
        if lacking:
            raise InvalidInputError(
                f"the state dict's param_groups lack {len(lacking)} parameters: {some(lacking)}"
            )
        yield [loaded[index] for index in sorted({place[name] for name in own})], group


def _equal(one: Any, other: Any) -> bool:
    return (
        bool(torch.as_tensor(one).equal(torch.as_tensor(other))) if isinstance(one, Tensor) else one == other
    )


def _owned(value: Any, param: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return deepcopy(value)
    # Counters stay where the optimizer had them: most keep them on the CPU.
    return value.detach().clone() if value.dim() == 0 else value.detach().clone().to(param.device)


def _shape(value: Any) -> list[int] | None:
    if isinstance(value, Tensor):
        return list(value.shape)
    return [] if isinstance(value, int | float) else None


def _described(value: Any) -> str:
    shape = _shape(value)
    return f"a {type(value).__name__}" if shape is None else str(shape)
