"""Translation of torch's optimizers to `OptimizerSpec`, which kernels read, and back to unsharded optimizers.

The pairs come from plugins, as extensions at the point ``torch_optimizers``, and are registered by programs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import starmap
from typing import Any

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
from shardwright.host.extensions import ask_at, words_at
from shardwright.host.plugin_host import host
from shardwright.optim.by_rows import RuleOptimizer, rule_or_reason
from shardwright.optim.optimizers import in_backward_optimizers
from shardwright.planning.tables.optimizers import OptimizerSpec

Mapper = Callable[[Mapping[str, Any]], Mapping[str, Any]]
Builder = Callable[[OptimizerSpec, Iterable[Tensor]], Optimizer]

# These choose an implementation, or were left by a scheduler: they do not change what a step computes.
_WITHOUT_EFFECT = frozenset({"params", "capturable", "differentiable", "foreach", "fused", "initial_lr"})

_DECOUPLED = "decoupled_weight_decay"  # of torch's Adam and AdamW, which differ in nothing else


@frozen
class _RegisteredOptimizer:
    torch_class: type[Optimizer]
    name: str
    mapping: Mapper
    unsharded: Builder | None = None


_POINT = "torch_optimizers"
_BROUGHT = Sequence[tuple[type[Optimizer], str, Mapper] | tuple[type[Optimizer], str, Mapper, Builder | None]]
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
    known = _known().get(torch_class)
    if known is None:
        _REGISTERED[torch_class] = entry
    elif known != entry:
        raise DuplicateNameError(
            f"{_name_of(torch_class)} is registered as {known.name!r} already, cannot be as {name!r} too"
        )


def _known() -> dict[type[Optimizer], _RegisteredOptimizer]:
    """The optimizers of torch that fused ones stand for: those of plugins, and those registered in this process.

    Raises:
        DuplicateNameError: two extensions bring one class, each otherwise.
    """
    offered, brought = host().extensions, dict[type[Optimizer], _RegisteredOptimizer]()
    for word in words_at(_POINT, offered):
        for entry in starmap(_RegisteredOptimizer, ask_at(_POINT, word, offered, _BROUGHT)):
            known = brought.setdefault(entry.torch_class, entry)
            if known != entry:
                raise DuplicateNameError(
                    f"{_name_of(entry.torch_class)} stands for {known.name!r} by one plugin already, and for "
                    f"{entry.name!r} by {f'{_POINT}:{word}'!r}: turn one of them off (SHARDWRIGHT_PLUGINS)"
                )
    return brought | _REGISTERED


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
    registered, group = _known(), optimizers[0].param_groups[0]
    entry = registered.get(type(optimizers[0]))
    class_name = _name_of(type(optimizers[0]))
    if entry is None:
        instead = _by_fused_params(optimizers[0], type(optimizers[0]).__name__.lower())
        known = sorted(map(_name_of, registered))
        raise UnsupportedError(
            f"{what} has {class_name} in backward, for which no fused optimizer stands.{instead} Known: "
            f"{', '.join(known)}. Others can be added with register_fused_optimizer().",
            subject=name,
            asked=class_name,
            possible=known,
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
    builders = {entry.name: entry.unsharded for entry in _known().values() if entry.unsharded is not None}
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
    if spec.name in builders:
        try:
            return builders[spec.name](spec, listed)
        except InvalidInputError:
            # The registered optimizer of the name may take more parameters than torch's.
            if not isinstance(rule_or_reason(spec), RowRule):
                raise
    return RuleOptimizer(listed, spec)


def _name_of(torch_class: type[Optimizer]) -> str:
    return f"{torch_class.__module__.rpartition('.')[0] or torch_class.__module__}.{torch_class.__name__}"
