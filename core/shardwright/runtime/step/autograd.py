"""The joint with autograd: one node sends the outputs' gradients early, another updates tables last of all.

Of the nodes that are ready, autograd runs the one that was made last. The sending node is made when the outputs are
waited for, so it runs as soon as their gradients are there. The updating node is made one step ahead. It is older than
all dense layers of its forward pass, also those before the lookup, so it runs after their backward passes. Meanwhile
the gradients travel.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol

import torch
from attrs import define, evolve, frozen
from torch import Tensor

from shardwright.runtime.step.compiling import untraced


class DifferentiableStep(Protocol):
    """Calls that the nodes make to a step."""

    def expect_gradients(self) -> None:
        """Say that a backward pass may come."""

    def gradients_are_there(self, gradients: Sequence[Tensor], end: Any) -> None:
        """Send the outputs' gradients, in a backward pass that is to reach the node ``end``."""

    def weight_gradients(self) -> Tensor | None:
        """Wait for the gradients of ids' weights."""

    def update(self) -> Sequence[Tensor | None]:
        """Update the tables; gradients of the parameters that autograd sees."""


@define(eq=False)
class _Owner:
    """A reference to the step that a node updates; ``None`` until there is one."""

    step: DifferentiableStep | None = None


@frozen(eq=False)
class Anchor:
    """The end of a step's backward pass, made before the step.

    Args:
        owner: reference to the step.
        end: output of the node that updates tables, or of one that comes before it.
        last: node that every whole backward pass reaches.
    """

    owner: _Owner
    end: Tensor
    last: Any

    def after_weights(self, step: DifferentiableStep, weights: Tensor | None) -> Anchor:
        """Wait for the gradients of ids' weights before tables are updated.

        The node is made right after the lookup, so that it is younger than what made the weights, and older than what
        the outputs are used for: the gradients of later lookups are under way when it waits.

        Args:
            step: the step.
            weights: the weights of this rank's ids; ``None`` if only those of other ranks are trained.
        """
        if weights is not None:  # those of a batch in the host's memory, too
            weights = weights.to(self.end.device)
        return evolve(self, end=_Weights.apply(step, self.end, weights))

    def outputs(self, step: DifferentiableStep, values: Sequence[Tensor]) -> list[Tensor]:
        """Make a step's outputs differentiable, and return them."""
        self.owner.step = step
        step.expect_gradients()
        with _differentiably():
            made: tuple[Tensor, ...] = _Outputs.apply(step, self.end, self.last, *values)
        return list(made)


class Anchors:
    """The anchors of one collection's steps.

    Args:
        device: device of the outputs. Autograd orders only nodes of one device.
        parameters: parameters of the lookups that autograd sees.
    """

    def __init__(self, device: torch.device, parameters: Sequence[torch.nn.Parameter]) -> None:
        self._parameters = parameters
        # The token makes the outputs differentiable on a rank that owns no block: backward needs all ranks.
        self._token = torch.zeros((), requires_grad=True, device=device)
        self._next = self._make()

    def take(self) -> Anchor:
        """Take the anchor for the step that begins, and make the next one, so that it is older than its step."""
        taken, self._next = self._next, self._make()
        return taken

    def _make(self) -> Anchor:
        owner = _Owner()
        with _differentiably():
            end = _Update.apply(owner, self._token, *self._parameters)
            return Anchor(owner, end, end.grad_fn.next_functions[0][0])  # the token's end


def _differentiably() -> AbstractContextManager[object]:
    """A context in which autograd records, even inside ``no_grad`` or ``inference_mode``."""
    if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
        return nullcontext()
    modes = ExitStack()
    modes.enter_context(torch.inference_mode(False))
    modes.enter_context(torch.enable_grad())
    return modes


class _Update(torch.autograd.Function):
    """A node whose backward waits for the other ranks' gradients and updates the tables."""

    @staticmethod
    def forward(ctx: Any, owner: _Owner, token: Tensor, *parameters: Tensor) -> Tensor:
        ctx.owner = owner
        ctx.save_for_backward(token)  # so that autograd refuses a second backward pass, as it does unsharded
        return torch.zeros((), device=token.device)

    @staticmethod
    @untraced  # a compiled training step would go into it
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        _ = ctx.saved_tensors  # raises if the graph was freed: fused kernels must not update twice
        step: DifferentiableStep = ctx.owner.step
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            ctx.owner.step = None  # a loss that is kept keeps this node, which is not to keep the batch
        return None, None, *step.update()


class _Weights(torch.autograd.Function):
    """A node whose backward waits for the gradients of ids' weights, before the node behind it updates rows."""

    @staticmethod
    def forward(ctx: Any, step: DifferentiableStep, end: Tensor, weights: Tensor | None) -> Tensor:
        ctx.step = step
        ctx.save_for_backward(end)
        return torch.zeros_like(end)

    @staticmethod
    @untraced  # a compiled training step would go into it
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (end,) = ctx.saved_tensors
        step: DifferentiableStep = ctx.step
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            del ctx.step
        of_weights = step.weight_gradients()
        return None, torch.zeros_like(end), of_weights if ctx.needs_input_grad[2] else None


class _Outputs(torch.autograd.Function):
    """A node whose backward sends the outputs' gradients."""

    @staticmethod
    def forward(
        ctx: Any, step: DifferentiableStep, end: Tensor, last: Any, *values: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.step, ctx.last = step, last
        ctx.save_for_backward(end)
        return tuple(_not_a_view(value) for value in values)

    @staticmethod
    @untraced  # a compiled training step would go into it
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (end,) = ctx.saved_tensors
        step: DifferentiableStep = ctx.step
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            del ctx.step
        step.gradients_are_there([_as_rows(gradient) for gradient in gradients], ctx.last)
        return None, torch.zeros_like(end), None, *(None for _ in gradients)


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


def _not_a_view(value: Tensor) -> Tensor:
    """A tensor over the same memory that is no view, so that users may change it in place."""
    return torch.empty(0, dtype=value.dtype, device=value.device).set_(
        value.untyped_storage(), value.storage_offset(), value.shape, value.stride()
    )
