"""Known faults of kernels, found by comparing wrong sums and updates with those of faulty loops."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from shardwright_testing.kernels.loops import Bag, Batch, Loops

_RTOL, _ATOL = 1e-3, 1e-4
"""Near enough to name the cause, of values of halves too."""


def sums_look_like(sums: Tensor, loops: Loops, batch: Batch) -> str:
    """A sentence on the flat sums of a batch; empty if they are like nothing known."""
    guesses = [
        ("the weights of ids are lost: these are the plain sums", _weightless(batch)),
        ("these are means; kernels always sum, and the engine divides", _meant(batch)),
    ]
    return _found(sums, ((text, loops.sums(guess)) for text, guess in guesses))


def updates_look_like(
    weight: Tensor, block: int, before: Loops, batch: Batch, gradient: Tensor, rate: float
) -> str:
    """A sentence on the weights of a block after a backward pass; empty if they are like nothing known.

    Args:
        weight: wrong weights, ``[R, D]``.
        block: index of the block.
        before: loops with the block's state before the pass.
        batch: batch of the pass.
        gradient: gradient of its flat sums.
        rate: the learning rate.
    """
    guesses = [
        ("the weights of ids are lost: this is the update without them", _weightless(batch)),
        ("this is the update of means; kernels always sum, and the engine divides", _meant(batch)),
        ("of an id that is in the batch more than once, only the last counts", _last_of_each(batch)),
        ("nothing was updated", batch.changed(lambda bag: [])),
    ]

    def after(guess: Batch) -> Tensor:
        loops = before.copied()
        loops.update(guess, gradient, rate)
        return loops.weights[block]

    return _found(weight, ((text, after(guess)) for text, guess in guesses))


def _found(actual: Tensor, guesses: Iterable[tuple[str, Tensor]]) -> str:
    actual = actual.detach().double().cpu()
    for text, guess in guesses:
        if actual.shape == guess.shape and torch.allclose(actual, guess, rtol=_RTOL, atol=_ATOL):
            return f"{text}. "
    return ""


def _weightless(batch: Batch) -> Batch:
    return batch.changed(lambda bag: [(row, 1.0) for row, _ in bag])


def _meant(batch: Batch) -> Batch:
    return batch.changed(lambda bag: [(row, weight / len(bag)) for row, weight in bag])


def _last_of_each(batch: Batch) -> Batch:
    """Each id once, where it comes last in a source's slot: what an assignment by index leaves."""
    return Batch([[_last_of(samples) for samples in slots] for slots in batch.bags], True, batch.is_pooled)


def _last_of(samples: list[Bag]) -> list[Bag]:
    seen: set[int] = set()
    result: list[Bag] = []
    for bag in reversed(samples):
        own: Bag = []
        for row, weight in reversed(bag):
            if row not in seen:
                own.append((row, weight))
            seen.add(row)
        result.append(own)
    return result[::-1]
