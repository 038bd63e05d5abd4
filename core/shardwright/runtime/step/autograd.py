"""The joint with autograd: one node sends the outputs' gradients early, another updates tables last of all.

Of the nodes that are ready, autograd runs the newest first. The sending node is made when the outputs are
waited for, so it runs as soon as their gradients are there. The updating node is made one step ahead. It is older than
all dense layers of its forward pass, also those before the lookup, so it runs after their backward passes. Meanwhile
the gradients travel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from shardwright.errors import UnsupportedError
from shardwright.runtime.step.compiling import untraced

_R = TypeVar("_R")


class DifferentiableStep(Protocol):
    """Calls that the nodes make to a step, which has the name of its collection."""

    name: str

    def arrange(self) -> Sequence[Tensor]:
        """Wait for the results and arrange them as outputs; a backward pass may come."""

    def gradients_are_there(self, gradients: Sequence[Tensor], end: Any) -> None:
        """Send the outputs' gradients, in a backward pass that is to reach the node ``end``."""

    def weight_gradients(self) -> Tensor | None:
        """Wait for the gradients of ids' weights."""

    def update(self) -> Sequence[Tensor | None]:
        """Update the tables; gradients of the parameters that autograd sees."""


class Anchors:
    """The ends of the backward passes of one collection's steps, each made before its step.

    Args:
        device: device of the outputs. Autograd orders only nodes of one device.
        parameters: parameters of the lookups that autograd sees.
    """

    def __init__(self, device: torch.device, parameters: Sequence[torch.nn.Parameter]) -> None:
        # The token makes the outputs differentiable on a rank that owns no block: backward needs all ranks.
        self._token = torch.zeros((), requires_grad=True, device=device)
        self._parameters = parameters
        self._next = self._make()
        self._last = self._next.grad_fn.next_functions[0][0]  # type: ignore[union-attr]  # every whole pass reaches it

    def _make(self) -> Tensor:
        end: Tensor = _differentiably(_Update.apply, self._token, *self._parameters)
        return end

    def take(self, step: DifferentiableStep) -> Tensor:
        """Take the output of the node that updates tables for ``step``, and make the next one, older than its step."""
        taken, self._next = self._next, self._make()
        taken.grad_fn.step = step  # type: ignore[union-attr]
        return taken

    def after_weights(self, end: Tensor, step: DifferentiableStep, weights: Tensor | None) -> Tensor:
        """Wait for the gradients of ids' weights before tables are updated.

        The node is made right after the lookup, so that it is younger than what made the weights, and older than what
        the outputs are used for: the gradients of later lookups are under way when it waits.

        Args:
            end: output of the node that updates tables.
            step: the step.
            weights: the weights of this rank's ids; ``None`` if only those of other ranks are trained.

        Returns:
            The output of the node that waits.
        """
        if weights is not None:  # those of a batch in the host's memory, too
            weights = weights.to(end.device)
        waiting: Tensor = _Weights.apply(step, end, weights)
        return waiting

    def outputs(self, end: Tensor, step: DifferentiableStep) -> list[Tensor]:
        """Make a step's outputs differentiable, and return them."""
        return list(_differentiably(_Outputs.apply, step, end, self._last))


def _differentiably(function: Callable[..., _R], *arguments: Any) -> _R:
    """Call a function while autograd records, even inside ``no_grad`` or ``inference_mode``."""
    if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
        return function(*arguments)
    with torch.inference_mode(False), torch.enable_grad():
        return function(*arguments)


def _once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a node's backward pass: it is not traced, and no graph of it is made."""

    @untraced  # a compiled training step would go into it
    def call(ctx: Any, *gradients: Tensor) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *gradients)
        name = getattr(ctx.step, "name", "")
        with torch.no_grad():  # create_graph=True
            found = backward(ctx, *gradients)
        return _Derivatives.apply(name, found, *gradients)

    return call


class _Derivatives(torch.autograd.Function):
    """A node whose outputs are the first derivatives of a lookup; it has no second."""

    @staticmethod
    def forward(ctx: Any, name: str, found: Any, *gradients: Tensor) -> Any:
        ctx.name = name
        return found

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise UnsupportedError(
            f"a lookup of {ctx.name} has no second derivative: gradients of tables, or of the weights of ids, were "
            "computed with create_graph=True, and then differentiated. Leave them out of what is differentiated, or "
            "compute that with the unsharded module",
            asked="create_graph",
        )


def _step_of(ctx: Any) -> tuple[DifferentiableStep, Tensor]:
    """The step of a node, and the tensor that it saved.

    Raises:
        RuntimeError: the graph was freed; fused kernels must not update twice.
    """
    (saved,), step = ctx.saved_tensors, ctx.step
    if not torch._C._autograd._get_current_graph_task_keep_graph():
        ctx.step = None  # a loss that is kept keeps this node, which is not to keep the batch
    return step, saved


class _Update(torch.autograd.Function):
    """A node whose backward waits for the other ranks' gradients and updates the tables."""

    @staticmethod
    def forward(ctx: Any, token: Tensor, *parameters: Tensor) -> Tensor:
        ctx.save_for_backward(token)  # so that autograd refuses a second backward pass, as it does unsharded
        return token.data  # a zero like it, over the same memory

    @staticmethod
    @_once
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        step, _ = _step_of(ctx)
        return None, *step.update()


class _Weights(torch.autograd.Function):
    """A node whose backward waits for the gradients of ids' weights, before the node behind it updates rows."""

    @staticmethod
    def forward(ctx: Any, step: DifferentiableStep, end: Tensor, weights: Tensor | None) -> Tensor:
        ctx.step = step
        ctx.save_for_backward(end)
        return torch.zeros_like(end)

    @staticmethod
    @_once
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        step, end = _step_of(ctx)
        of_weights = step.weight_gradients()
        return None, torch.zeros_like(end), of_weights if ctx.needs_input_grad[2] else None


class _Outputs(torch.autograd.Function):
    """A node that arranges a step's outputs, and whose backward sends their gradients."""

    @staticmethod
    def forward(ctx: Any, step: DifferentiableStep, end: Tensor, last: Any) -> tuple[Tensor, ...]:
        ctx.step, ctx.last = step, last
        ctx.save_for_backward(end)
        # Tensors over the same memory that are no views, so that users may change them in place.
        return tuple([value.data for value in step.arrange()])

    @staticmethod
    @_once
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        step, end = _step_of(ctx)
        step.gradients_are_there([_as_rows(gradient) for gradient in gradients], ctx.last)
        return None, end.data, None  # a zero


def _as_rows(gradient: Tensor) -> Tensor:
    """A gradient ``[B, C]`` whose rows stand one after the other in memory, as they are sent; itself if they do.

    Torch also hands over views: of one value (of a sum), of other strides, negated; and sparse gradients.
    """
    if gradient.layout is not torch.strided:
        return gradient.to_dense()
    # A single value is called contiguous whatever its stride, but cannot be viewed as bytes.
    if gradient.is_contiguous() and gradient.stride(-1) == 1 and not gradient.is_neg():
        return gradient
    return gradient.clone(memory_format=torch.contiguous_format)
