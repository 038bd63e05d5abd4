"""Optimizers in the backward pass: attaching them to parameters, and telling such parameters apart."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shardwright.arguments import brief, checked
from shardwright.errors import InvalidInputError

# The names under which torch.distributed.optim._apply_optimizer_in_backward keeps the same things.
_OPTIMIZERS = "_in_backward_optimizers"
_CLASSES = "_optimizer_classes"
_ARGUMENTS = "_optimizer_kwargs"


@checked
def apply_optimizer_in_backward(
    optimizer_class: type[Optimizer],
    params: Iterable[nn.Parameter],
    optimizer_kwargs: Mapping[str, Any],
) -> None:
    """Let an optimizer update each parameter as soon as its gradient is there, in the backward pass.

    Gradients are ``None`` after the update, so other optimizers leave these parameters alone. Apply it before
    sharding: the fused kernels then take over (see `optimizer_spec_of`). Torch's own
    ``torch.distributed.optim._apply_optimizer_in_backward`` has the same effect and is understood as well.

    A copy of a collection of tables (``copy.deepcopy``) has optimizers of its own, in the same state. Copying other
    modules, or materialising one that is on ``meta``, makes new parameters without their optimizers, as torch does.

    Args:
        optimizer_class: such as ``torch.optim.SGD``.
        params: leaf parameters that require gradients; they may be on ``meta``.
        optimizer_kwargs: the optimizer's arguments, ``{"lr": 0.02}``.

    Raises:
        InvalidInputError: a parameter does not require gradients, or is no leaf.

    Example:
        >>> import torch, shardwright as sw
        >>> weight = torch.nn.Parameter(torch.ones(2))
        >>> sw.apply_optimizer_in_backward(torch.optim.SGD, [weight], {"lr": 0.5})
        >>> weight.sum().backward()
        >>> weight.data, weight.grad
        (tensor([0.5000, 0.5000]), None)
    """
    for param in params:
        if not isinstance(param, Tensor):
            raise InvalidInputError(
                f"apply_optimizer_in_backward: params must be parameters, got {brief(param)} among them"
            )
        if not (param.requires_grad and param.is_leaf):
            raise InvalidInputError(
                f"{optimizer_class.__name__} cannot be applied in the backward pass of a tensor of shape "
                f"{list(param.shape)}: requires_grad is {param.requires_grad}, is_leaf is {param.is_leaf}; "
                "both must be True"
            )
        is_first = not hasattr(param, _OPTIMIZERS)
        for attribute, value in (
            (_OPTIMIZERS, _made(optimizer_class, param, optimizer_kwargs)),
            (_CLASSES, optimizer_class),
            (_ARGUMENTS, dict(optimizer_kwargs)),
        ):
            setattr(param, attribute, [*getattr(param, attribute, ()), value])
        if is_first:  # one hook runs them all
            param.register_post_accumulate_grad_hook(_step_and_clear)


def _made(optimizer_class: type[Optimizer], param: Tensor, optimizer_kwargs: Mapping[str, Any]) -> Optimizer:
    try:
        return optimizer_class([param], **optimizer_kwargs)
    except (TypeError, ValueError) as error:
        raise InvalidInputError(
            f"apply_optimizer_in_backward: {optimizer_class.__name__} cannot be made with optimizer_kwargs "
            f"{brief(dict(optimizer_kwargs))}: {error}"
        ) from error


def _step_and_clear(param: Tensor) -> None:
    for optimizer in in_backward_optimizers(param):
        optimizer.step()
    param.grad = None


def copy_in_backward_optimizers(source: Tensor, copied: Tensor) -> None:
    """Give the copy of a parameter copies of its optimizers in the backward pass, in the same state.

    Args:
        source: parameter that was copied.
        copied: its copy, which ``copy.deepcopy`` made without optimizers.
    """
    if hasattr(copied, _OPTIMIZERS):  # another module that has the parameter was copied before
        return
    needs_gradient = copied.requires_grad
    copied.requires_grad_(True)  # torch hooks no others; a table may have been frozen since
    for kind, arguments in zip(getattr(source, _CLASSES, ()), getattr(source, _ARGUMENTS, ()), strict=True):
        apply_optimizer_in_backward(kind, [copied], arguments)  # type: ignore[list-item]
    copied.requires_grad_(needs_gradient)
    for old, new in zip(in_backward_optimizers(source), in_backward_optimizers(copied), strict=True):
        new.load_state_dict(copy.deepcopy(old.state_dict()))


def in_backward_optimizers(param: Tensor) -> tuple[Optimizer, ...]:
    """The optimizers that update a parameter in the backward pass."""
    return tuple(getattr(param, _OPTIMIZERS, ()))


@checked
def in_backward_optimizer_filter(
    named_parameters: Iterable[tuple[str, nn.Parameter]], include: bool = False
) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that are not updated in the backward pass, which need an optimizer; or those that are.

    Args:
        named_parameters: names and parameters, as of ``model.named_parameters()``.
        include: yield those that are updated in the backward pass instead.

    Yields:
        Names and parameters.

    Example:
        >>> import shardwright as sw
        >>> class Model(torch.nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         table = sw.EmbeddingBagConfig(100, 8, "item", feature_names=["item"])
        ...         self.bags = sw.EmbeddingBagCollection([table])
        ...         self.over = torch.nn.Linear(8, 1)
        >>> sharders = [sw.EmbeddingBagCollectionSharder({"optimizer": "sgd"})]
        >>> env = sw.ShardingEnv.local(device_type="cpu")
        >>> model = sw.DistributedModelParallel(Model(), env=env, sharders=sharders)
        >>> [name for name, _ in sw.in_backward_optimizer_filter(model.named_parameters())]
        ['over.weight', 'over.bias']
    """
    for named in named_parameters:
        if not (isinstance(named, tuple) and len(named) == 2):
            raise InvalidInputError(
                "in_backward_optimizer_filter: named_parameters must be pairs of a name and a parameter, as "
                f"model.named_parameters() gives them; got {brief(named)} among them"
            )
        name, param = named
        if hasattr(param, _OPTIMIZERS) == include:
            yield name, param
