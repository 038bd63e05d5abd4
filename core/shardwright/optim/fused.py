"""Translation of torch's optimizers to `OptimizerSpec`, which kernels read, and back to unsharded optimizers.

The pairs are kept in a registry, which is open to other packages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from attrs import frozen
from torch import Tensor
from torch.optim import Optimizer

from shardwright.arguments import brief, checked
from shardwright.contracts.optimizer import RowRule
from shardwright.errors import (
    DuplicateNameError,
    InvalidInputError,
    UnknownNameError,
    UnsupportedError,
    nearest,
)
from shardwright.host.plugin_host import host
from shardwright.optim.by_rows import RuleOptimizer, rule_or_reason
from shardwright.optim.optimizers import in_backward_optimizers
from shardwright.optim.rows import LazyAdam, RowWiseAdagrad
from shardwright.planning.tables.optimizers import OptimizerSpec

__all__ = ["optimizer_spec_of", "register_fused_optimizer", "renaming", "spec_to_torch"]

Mapper = Callable[[Mapping[str, Any]], Mapping[str, Any]]
Builder = Callable[[OptimizerSpec, Iterable[Tensor]], Optimizer]

# These choose an implementation, or were left by a scheduler: they do not change what a step computes.
_WITHOUT_EFFECT = frozenset({"params", "capturable", "differentiable", "foreach", "fused", "initial_lr"})

# FBGEMM's defaults (split_table_batched_embeddings_ops_training.py), which differ from torch's.
_EPS = 1e-8
_BETA1, _BETA2 = 0.9, 0.999
_OF_TORCH = ("beta1", "beta2", "eps")
_DECOUPLED = "decoupled_weight_decay"  # of torch's Adam and AdamW, which differ in nothing else


@frozen
class _RegisteredOptimizer:
    torch_class: type[Optimizer]
    name: str
    mapping: Mapper
    unsharded: Builder | None


_REGISTERED: dict[type[Optimizer], _RegisteredOptimizer] = {}


@checked
def register_fused_optimizer(
    torch_class: type[Optimizer], name: str, mapping: Mapper, unsharded: Builder | None = None
) -> None:
    """Let a fused optimizer stand for a torch optimizer that users apply in the backward pass.

    Args:
        torch_class: the class users name; subclasses are not meant.
        name: the `OptimizerSpec.name` that kernels know.
        mapping: function from all of the torch optimizer's hyperparameters to the specification's
            ``learning_rate`` and parameters. It raises `UnsupportedError` for values that the fused optimizer does not
            support. See `renaming`.
        unsharded: builds a torch optimizer that does without sharding exactly what the specification says.

    Raises:
        DuplicateNameError: the class was registered otherwise before.
    """
    entry = _RegisteredOptimizer(torch_class, name, mapping, unsharded)
    known = _REGISTERED.setdefault(torch_class, entry)
    if known != entry:
        raise DuplicateNameError(
            f"{_name_of(torch_class)} is registered as {known.name!r} already, cannot be as {name!r} too"
        )


@checked
def renaming(names: Mapping[str, str | tuple[str, ...]]) -> Mapper:
    """A mapping that passes some hyperparameters on under new names and demands that the others are off.

    Args:
        names: torch optimizer's hyperparameter -> the specification's (a tuple for ``betas``).

    Returns:
        The mapping. It raises `UnsupportedError` if another hyperparameter is not 0, False or None.
    """

    def mapping(hyperparameters: Mapping[str, Any]) -> dict[str, Any]:
        mapped: dict[str, Any] = {}
        for name, value in hyperparameters.items():
            target = names.get(name)
            if isinstance(target, tuple):
                mapped.update(zip(target, value, strict=True))
            elif target is not None:
                mapped[target] = value
            elif name not in _WITHOUT_EFFECT and value:
                raise UnsupportedError(
                    f"{name}={value!r} has no fused counterpart; possible are {', '.join(sorted(names))}",
                    asked=name,
                    possible=names,
                )
        return mapped

    return mapping


@checked
def optimizer_spec_of(parameter: Tensor, name: str = "") -> OptimizerSpec | None:
    """The optimizer that was applied to a parameter in its backward pass, as a specification.

    Args:
        parameter: the parameter, treated by `apply_optimizer_in_backward` or torch's own function or not.
        name: its name, for messages.

    Returns:
        The specification with all hyperparameters, torch's defaults included; ``None`` if none was applied.

    Raises:
        UnsupportedError: more than one was applied, no fused optimizer stands for its class, or it has
            hyperparameters which that one does not know.

    Example:
        >>> import shardwright as sw
        >>> bags = sw.EmbeddingBagCollection([sw.EmbeddingBagConfig(100, 8, "item", feature_names=["item"])])
        >>> sw.apply_optimizer_in_backward(torch.optim.SGD, bags.parameters(), {"lr": 0.1})
        >>> sw.optimizer_spec_of(next(bags.parameters())).name
        'sgd'
    """
    what = f"parameter {name!r}" if name else f"a parameter of shape {list(parameter.shape)}"
    optimizers = in_backward_optimizers(parameter)
    if not optimizers:
        return None
    if len(optimizers) > 1:
        classes = ", ".join(_name_of(type(optimizer)) for optimizer in optimizers)
        raise UnsupportedError(
            f"{what} has {len(optimizers)} optimizers in backward ({classes}); only one can be fused",
            subject=name,
        )
    entry, group = _REGISTERED.get(type(optimizers[0])), optimizers[0].param_groups[0]
    class_name = _name_of(type(optimizers[0]))
    if entry is None:
        instead = _by_fused_params(optimizers[0], type(optimizers[0]).__name__.lower())
        known = ", ".join(sorted(map(_name_of, _REGISTERED)))
        raise UnsupportedError(
            f"{what} has {class_name} in backward, for which no fused optimizer stands.{instead} Known: {known}. "
            "Others can be added with register_fused_optimizer().",
            subject=name,
            asked=class_name,
            possible=sorted(map(_name_of, _REGISTERED)),
        )
    try:
        mapped = dict(entry.mapping(group))
    except UnsupportedError as error:
        instead = _by_fused_params(optimizers[0], entry.name)
        raise UnsupportedError(
            f"{what} has {class_name} in backward: {error}.{instead}", **{**error.facts, "subject": name}
        ) from error
    return OptimizerSpec(entry.name, float(mapped.pop("learning_rate")), mapped)


def _by_fused_params(optimizer: Optimizer, name: str) -> str:
    """The ``fused_params`` that ask for the like of an optimizer of torch, as a sentence; empty if none is like it.

    Args:
        optimizer: the torch optimizer.
        name: name of the registered optimizer that is like it, if there is one.
    """
    group = optimizer.param_groups[0]
    if name not in host().optimizers or not type(optimizer).__module__.startswith("torch.optim"):
        return ""
    given = {**group, **dict(zip(("beta1", "beta2"), group.get("betas", ()), strict=False))}
    known = host().optimizers.create(name).parameters
    foreign = given.keys() - known.keys() - _WITHOUT_EFFECT - {"lr", "betas", _DECOUPLED}
    if any(given[other] for other in foreign):
        return ""
    own = {key: given[key] for key, default in known.items() if key in given and given[key] != default}
    fused = {"optimizer": name, "learning_rate": group["lr"], **own}
    return (
        f" Give its sharder fused_params={fused!r} instead: that for the rows that a batch looks up, where torch moves "
        "all rows."
    )


@checked
def spec_to_torch(spec: OptimizerSpec, params: Iterable[Tensor]) -> Optimizer:
    """The optimizer that does without sharding what the fused one of a specification does.

    Args:
        spec: the specification; parameters that it leaves out have FBGEMM's defaults.
        params: tensors to update.

    Returns:
        A torch optimizer.

    Raises:
        UnknownNameError: none is known under the specification's name.
        InvalidInputError: it does not know one of the specification's parameters.

    Example:
        >>> import shardwright as sw
        >>> spec = sw.OptimizerSpec("sgd", learning_rate=0.1)
        >>> sw.spec_to_torch(spec, [torch.nn.Parameter(torch.zeros(3))]).param_groups[0]["lr"]
        0.1
    """
    builders = {entry.name: entry.unsharded for entry in _REGISTERED.values() if entry.unsharded is not None}
    if spec.name not in builders and spec.name not in host().optimizers:
        raise UnknownNameError(
            f"no unsharded optimizer for {spec.name!r}. Known: {', '.join(sorted(builders))}."
            f"{nearest(spec.name, builders)} Others can be added with register_fused_optimizer(unsharded=...)."
        )
    listed = list(params)
    for param in listed:
        if not isinstance(param, Tensor):
            raise InvalidInputError(f"spec_to_torch: params must be tensors, got {brief(param)} among them")
    if not listed:
        raise InvalidInputError("spec_to_torch: params are empty, there is nothing to update")
    if spec.name in builders and not _is_of_plugin(spec):
        return builders[spec.name](spec, listed)
    return RuleOptimizer(listed, spec)


def _is_of_plugin(spec: OptimizerSpec) -> bool:
    """True if a registered optimizer takes parameters that the torch optimizer of its name does not have."""
    has_more = any(name not in _OF_TORCH and not _is_idle(name, value) for name, value in spec.parameters)
    return has_more and isinstance(rule_or_reason(spec), RowRule)


def _name_of(torch_class: type[Optimizer]) -> str:
    return f"{torch_class.__module__.rpartition('.')[0] or torch_class.__module__}.{torch_class.__name__}"


def _parameters(spec: OptimizerSpec, **defaults: Any) -> dict[str, Any]:
    given = {name: value for name, value in spec.parameters if name in defaults or not _is_idle(name, value)}
    for name in given:
        if name not in defaults:
            known = ", ".join(["learning_rate", *sorted(defaults)])
            raise InvalidInputError(
                f"optimizer {spec.name!r} has no parameter {name!r}. Known: {known}.{nearest(name, defaults)}"
            )
    return {**defaults, **given}


def _is_idle(name: str, value: Any) -> bool:
    """True if a parameter has no effect on an optimizer that does not know it: FBGEMM accepts these for all."""
    return name in _OF_TORCH or not value


def _sgd(spec: OptimizerSpec, params: Iterable[Tensor]) -> Optimizer:
    return torch.optim.SGD(params, lr=spec.learning_rate, **_parameters(spec))


def _adagrad(spec: OptimizerSpec, params: Iterable[Tensor]) -> Optimizer:
    return torch.optim.Adagrad(params, lr=spec.learning_rate, **_parameters(spec, eps=_EPS))


def _adam(spec: OptimizerSpec, params: Iterable[Tensor]) -> Optimizer:
    parameters = _parameters(spec, eps=_EPS, beta1=_BETA1, beta2=_BETA2)
    betas = (parameters["beta1"], parameters["beta2"])
    return LazyAdam(params, lr=spec.learning_rate, betas=betas, eps=parameters["eps"])


def _row_wise_adagrad(spec: OptimizerSpec, params: Iterable[Tensor]) -> Optimizer:
    return RowWiseAdagrad(params, lr=spec.learning_rate, **_parameters(spec, eps=_EPS))


# No weight decay and no momentum: torch's are of all rows, touched or not; fused_params have those of touched rows.
_ADAGRAD = renaming({"lr": "learning_rate", "eps": "eps"})
_ADAM = renaming({"lr": "learning_rate", "betas": ("beta1", "beta2"), "eps": "eps"})
register_fused_optimizer(torch.optim.SGD, "sgd", renaming({"lr": "learning_rate"}), _sgd)
register_fused_optimizer(torch.optim.Adagrad, "adagrad", _ADAGRAD, _adagrad)
register_fused_optimizer(RowWiseAdagrad, "row_wise_adagrad", _ADAGRAD, _row_wise_adagrad)
register_fused_optimizer(torch.optim.Adam, "adam", _ADAM, _adam)
register_fused_optimizer(LazyAdam, "adam", _ADAM, _adam)
